"""GPT-J rotary embedding on the last columns of a row, and its inverse: pairs (2i, 2i + 1) turned by the token's angle.

DeepSeek-V4 turns q and k forward, and the attention's output back, since its values carry k's rotation. A rotation's
derivative is the rotation back, so each is the other's backward. cos_sin: [positions, R] fp32, R / 2 cosines then R / 2
sines, as vLLM's rotary_emb.cos_sin_cache; R is the number of columns turned.
Upstream: csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu:330, common/ops/fused_inv_rope_fp8_quant.py:105.
"""
import torch

from .packing import wide


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, back: bool = False) -> torch.Tensor:
    """x: [tokens, ..., D], turned in the wide type; positions: [tokens] int64."""
    turned = cos_sin.shape[-1]
    angle = cos_sin[positions].view(len(x), *[1] * (x.ndim - 2), turned)
    cos, sin = angle.chunk(2, -1)
    sin = -sin if back else sin
    head, tail = wide(x).split([x.shape[-1] - turned, turned], -1)
    even, odd = tail.unflatten(-1, (-1, 2)).unbind(-1)
    tail = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([head, tail], -1)
