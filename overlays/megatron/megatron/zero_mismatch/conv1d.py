"""Mamba's causal depthwise convolution with SiLU: y[t] = silu(b + sum over j of w[:, j] x[t - (width - 1) + j]).

Values: vLLM's `causal_conv1d_fn` (mamba/ops/causal_conv1d.py:383 of 0.33.0), from an empty window: a packed sequence
starts at position 0. A row is a function of its own `width` rows; decode's update kernel has the same arithmetic.
Backward: by re-running the same sum in fp32. Gradients: x, weight and bias.
"""
import torch

from .packing import Packed, wide
from .ste import replayed


def conv1d(kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x: [tokens, channels] (may be a view of a wider tensor), weight: [channels, width], bias: [channels]."""
    return replayed(
        lambda x, weight, bias: kernel(x, weight, bias, packed),
        lambda x, weight, bias: reference(x, weight, bias, packed),
        x, weight, bias,
    )  # fmt: skip


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, packed: Packed) -> torch.Tensor:
    width = weight.shape[1]
    total = wide(bias).expand(x.shape[0], -1)
    for back in range(width - 1, -1, -1):
        rows = wide(x) if back == 0 else torch.nn.functional.pad(wide(x), (0, 0, back, 0))[: x.shape[0]]
        inside = (packed.positions >= back)[:, None]
        total = total + torch.where(inside, rows, 0.0) * wide(weight)[:, width - 1 - back]
    return (total * torch.sigmoid(total)).to(x.dtype)
