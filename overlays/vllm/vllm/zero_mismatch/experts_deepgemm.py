"""The routed experts' fixed choices: one grouped FP8 GEMM at every M, and the order in which slots are summed.

Invariant: an expert row's bits depend on that row, its expert's weights and nothing else; a token's output is the fp32
sum of its expert rows in top-k slot order.

Why it holds: DeepGEMM's grouped kernels accumulate each row over K in blocks of 128 with one promotion a block,
whatever tile the row lies in, so the masked layout, the contiguous one, the place within an expert and the number of
rows do not enter. Upstream picks Triton on SM90 (fused_moe/oracle/fp8.py:125) and, even when asked for DeepGEMM, Triton
below 128 tokens or at N <= 512 (experts/triton_deep_gemm_moe.py:73, deep_gemm_moe.py:67); those are other arithmetics.
The row that a token gets within its expert comes from an atomic counter (deep_gemm_utils.py:236), which moves rows, not
values; `ep_gather` then adds slot 0, 1, 2, ... in fp32 (deep_gemm_utils.py:250).
"""
import torch

# The masked GEMM tunes its tile to the expected rows of an expert. Upstream derives it from the step's tokens and bakes
# it into the captured graph (experts/batched_deep_gemm_moe.py:385). One decode step of 256 requests, top-6 of 256
# experts, gives 6 rows an expert and a prefill step a few hundred; 64 is DeepGEMM's smallest SM90 tile.
MASKED_EXPECTED_M = 64


def expected_m(capacity: int) -> int:
    """Rows an expert is said to expect; `capacity` is the static size of its slab."""
    return min(capacity, MASKED_EXPECTED_M)


def combine_reference(
    rows: torch.Tensor,  # [places, hidden] bf16: the experts' outputs
    place: torch.Tensor,  # [tokens, top_k] int: the row of each slot
    weights: torch.Tensor,  # [tokens, top_k] fp32
    expert: torch.Tensor,  # [tokens, top_k] int: -1 marks an empty slot
) -> torch.Tensor:
    """Plain PyTorch: the fp32 sum in slot order, one fused multiply-add a slot, rounded once to BF16."""
    total = torch.zeros(len(place), rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(place.shape[1]):
        live = (expert[:, slot] >= 0)[:, None]
        row = rows[place[:, slot].clamp(min=0).long()]
        # A 24-bit times an 8-bit significand is exact in fp64: one rounding to fp32, as a fused multiply-add has.
        fused = (row.double() * weights[:, slot, None].double() + total.double()).float()
        total = torch.where(live, fused, total)
    return total.to(rows.dtype)
