"""Block FP8 as the deployment quantises: e4m3 codes, one power-of-two (UE8M0) scale a block, in plain PyTorch.

Weights, 128 x 128 blocks (vllm/utils/deep_gemm.py:1027 `per_block_cast_to_fp8(use_ue8m0=True)`):

    scale = 2 ** ceil(log2(max(max |w|, 1e-4) / 448));   code = e4m3(w / scale)

Activations, 128 columns of a row (csrc per_token_group_quant.cu, `per_token_group_quant_fp8(use_ue8m0=True)`): the same
with the floor 1e-10. Both divide by a power of two, so the only rounding is to e4m3, to nearest even.

What a checkpoint holds and what the engine makes of it: the exporter writes `quantise_weight(master)`, and the engine's
load quantises codes and scales once more (fp8_utils.py:1096 `requant_weight_ue8m0_inplace`). For these codes that
changes no value: the largest magnitude of a block is f * 448 * scale with 1/2 < f <= 1, so its code is at least 224;
where it is 224 the second pass halves the scale and doubles every code, which is exact, and elsewhere it changes
nothing. One rounding stands between master and engine; the trainer's forward goes through both steps all the same.

Why ceil(log2(x)) has no rounding of its own to fear: the argument is m / 7 * 2 ** j with m the 8-bit significand of a
BF16 number (448 = 7 * 64), so it is a power of two or differs from every one by 1/224 of it, while log2 errs by some
2 ** -20. An fp32 master keeps no such distance; the operators take BF16.

These functions are the reference kernels of CPU tests. On the GPU the operators call vLLM's; tests/gpu compares both.
"""
import torch

BLOCK = 128
FP8_MAX = 448.0
WEIGHT_FLOOR = 1e-4  # of a block's largest magnitude, upstream's; an all-zero block then has a finite scale
TOKEN_FLOOR = 1e-10

# Largest error of one code, relative to its block's largest magnitude: e4m3 keeps 4 significant bits, half a step of
# the top binade is 2**-5 of it, and the scale may leave the largest magnitude just above half of 448.
TOLERANCE = 2.0**-4


def _ue8m0(magnitude: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that brings `magnitude` to at most 448."""
    return torch.exp2(torch.ceil(torch.log2(magnitude / FP8_MAX)))


def check_blocks(name: str, weight: torch.Tensor) -> None:
    """Whole 128 x 128 blocks, so that merged projections quantise as their parts do."""
    if weight.ndim < 2 or weight.shape[-1] % BLOCK or weight.shape[-2] % BLOCK:
        raise ValueError(
            f"{name}: found a weight of shape {tuple(weight.shape)}, expected [..., N, K] in multiples of {BLOCK}: the "
            "deployment's block FP8 has whole blocks; use a width in multiples of it"
        )


def quantise_weight(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """master: [..., N, K] bf16 -> codes [..., N, K] e4m3 and scales [..., N / 128, K / 128] fp32, powers of two."""
    check_blocks("quantise_weight", master)
    blocks = master.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N/128, 128, K/128, 128]
    scale = _ue8m0(blocks.abs().amax((-3, -1), keepdim=True).clamp(min=WEIGHT_FLOOR))
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return codes.flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2)


def dequantise_weight(codes: torch.Tensor, scales: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    full = scales.to(dtype).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return codes.to(dtype) * full


def quantise_rows(
    x: torch.Tensor, group: int = BLOCK, floor: float = TOKEN_FLOOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., K] bf16 -> codes [..., K] e4m3 and scales [..., K / group] fp32, powers of two."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = _ue8m0(groups.abs().amax(-1, keepdim=True).clamp(min=floor))
    return (groups / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def dequantise_rows(codes: torch.Tensor, scales: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    return (codes.to(dtype).unflatten(-1, (scales.shape[-1], -1)) * scales.to(dtype)[..., None]).flatten(-2)
