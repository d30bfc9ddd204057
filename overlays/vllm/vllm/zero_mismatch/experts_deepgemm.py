"""The routed experts' fixed choices: one grouped FP8 GEMM at every M, and the order in which slots are summed.

Invariant: an expert row's bits depend on that row, its expert's weights and nothing else; a token's output is the fp32
sum of its expert rows in top-k slot order.

Why it holds: DeepGEMM's grouped kernels accumulate each row over K in blocks of 128 with one promotion a block,
whatever tile the row lies in, so the masked layout, the contiguous one, the place within an expert and the number of
rows do not enter. Upstream picks Triton on SM90 (fused_moe/oracle/fp8.py:125) and, even when asked for DeepGEMM, Triton
below 128 tokens or at N <= 512 (experts/triton_deep_gemm_moe.py:73, deep_gemm_moe.py:67); those are other arithmetics.
`experts_permute` lays the rows out; `ep_gather` then adds slot 0, 1, 2, ... in fp32 (deep_gemm_utils.py:250).

Tile height. On SM90 DeepGEMM's contiguous kernel has tiles exactly as high as the alignment that experts start at
(csrc/jit_kernels/heuristics/sm90.hpp, get_layout_candidates), and loads and stores whole tiles. Upstream aligns to 128
rows, so at 6 rows an expert the padding moves more bytes than the rows. Below 64 rows the tensor cores' 64 rows read
past the tile, into values that are not stored (impls/sm90_fp8_gemm_1d2d.cuh, do_wgmma_store); DeepGEMM does the same
for its dense products of up to 32 rows. A row's sum over K is the same instructions at every height, so the height may
follow the step's tokens; tests/gpu/test_experts_layout.py holds it to that.
"""
import torch

# Tile heights, by the rows that an expert gets on average: a height serves up to 0.8 of itself, so that most experts
# fill one tile and read their weights once. 128 serves the rest.
TILE_HEIGHTS = ((16, 12), (32, 25), (64, 51))
TALLEST = 128

# The masked GEMM tunes its tile to the expected rows of an expert. Upstream derives it from the step's tokens and bakes
# it into the captured graph (experts/batched_deep_gemm_moe.py:385). One decode step of 256 requests, top-6 of 256
# experts, gives 6 rows an expert and a prefill step a few hundred; 64 is DeepGEMM's smallest SM90 tile.
MASKED_EXPECTED_M = 64


def tile_height(slots: int, experts: int) -> int:
    """Rows that each expert's place is rounded up to, for `slots` (tokens times top-k) spread over `experts`."""
    return next((height for height, most in TILE_HEIGHTS if slots <= most * experts), TALLEST)


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
