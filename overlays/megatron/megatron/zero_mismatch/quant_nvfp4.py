"""NVFP4 as ModelOpt writes it, in plain PyTorch: E2M1 codes, an e4m3 scale for 16 columns, an fp32 scale a matrix.

    overall = max |w| / (6 * 448);   scale = e4m3(max of 16 |w| / 6 / overall);   code = e2m1(w / (scale * overall))

A code is rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; two codes make a byte, the even
column low. The bits are those of the recipe's own writer (recipes/nemotron-3.5-lightning/tiny-quantised/weights.py).
There a block too small for its matrix has scale 0 and no codes; here the smallest e4m3 number stands in its place, and
1 for the scale of a matrix of zeros, so that training may pass through either. The value is 0 as it would have been.
"""
import torch

from .packing import divided

GROUP = 16
FP4_MAX, FP8_MAX = 6.0, 448.0
SMALLEST_SCALE = 2.0**-9  # e4m3's smallest number
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring values, by the lower one's code
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Largest error of one value, relative to its group's largest magnitude: half the step from 4 to 6, and e4m3's rounding
# of the scale (2**-4), by which the largest magnitude itself may be off.
TOLERANCE = 1 / 6 + 2.0**-4


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    size, code = scaled.abs(), torch.zeros_like(scaled, dtype=torch.uint8)
    for lower, middle in enumerate(MIDDLES):
        code += size >= middle if lower % 2 else size > middle
    return code | (scaled < 0).to(torch.uint8) << 3


def quantise(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """master: [..., N, K] -> codes [..., N, K / 2] uint8, scales [..., N, K / 16] e4m3, overall [...] fp32."""
    if master.ndim < 2 or master.shape[-1] % GROUP:
        raise ValueError(f"quant_nvfp4: found a weight of shape {tuple(master.shape)}, expected [..., N, K] with K in "
                         f"multiples of {GROUP}: NVFP4 has whole groups; use a width in multiples of it")
    blocks = master.float().unflatten(-1, (-1, GROUP))
    overall = divided(blocks.abs().amax((-3, -2, -1)), FP4_MAX * FP8_MAX)
    overall = torch.where(overall > 0, overall, 1.0)
    scales = divided(blocks.abs().amax(-1), FP4_MAX) / overall[..., None, None]
    scales = scales.clamp(min=SMALLEST_SCALE).to(torch.float8_e4m3fn)
    codes = _codes(blocks / (scales.float() * overall[..., None, None])[..., None]).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, overall


def dequantise(codes: torch.Tensor, scales: torch.Tensor, overall: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """The values that `quantise` stands for: [..., N, K]. A code times its scale is exact in BF16."""
    code = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)
    values = torch.cat([values, -values])[code].unflatten(-1, (-1, GROUP))
    return ((values * scales.float()[..., None]).flatten(-2) * overall[..., None, None]).to(dtype)
