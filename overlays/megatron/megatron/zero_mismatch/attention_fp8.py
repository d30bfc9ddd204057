"""Causal attention over an FP8 cache, one calibrated scale each for queries, keys and values.

Invariant: the forward value is the engine's for the same query and the same keys, bit for bit. vLLM's TRITON_ATTN with
an FP8 cache multiplies in FP8: the layer quantises the query (layers/attention/attention.py:483 and :526 of 0.33.0),
`triton_reshape_and_cache_flash` the keys and values as it stores them, and `unified_attention` takes the three scales
into the scores and the output. The trainer calls the same three over a private cache, laid out as in `attention`.

Backward: the quantisers are taken for the identity, and the derivative is that of `attention` at what the kernel read,
dequantised. The kernel's own rounding of the softmax weights to e4m3 is passed through as well. Gradients: q, k and v.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import attention
from .linear_fp8_static import dequantise, to_e4m3, vllm_quantise
from .packing import Packed, wide


class Scales(NamedTuple):
    """fp32 of one element each, as calibrated; no gradient."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class CacheKernels(NamedTuple):
    """Values only."""

    quantise: Callable  # q, k, v, scales, packed -> (codes of q, k, v in their shapes, the cache that `attend` reads)
    attend: Callable  # codes of q, cache, scales, packed, softmax scale -> [tokens, heads, D]


def _reference_quantise(q, k, v, scales: Scales, packed: Packed):
    codes = tuple(to_e4m3(t, scale) for t, scale in zip((q, k, v), scales, strict=True))
    return codes, codes[1:]


def _reference_attend(q, cache, scales: Scales, packed: Packed, scale: float) -> torch.Tensor:
    values = [wide(t) * s for t, s in zip((q, *cache), scales, strict=True)]
    return attention.reference(*values, packed, scale).to(torch.bfloat16)


def _exact_quantise(q, k, v, scales: Scales, packed: Packed):
    codes = tuple(t / scale for t, scale in zip((q, k, v), scales, strict=True))
    return codes, codes[1:]


def _exact_attend(q, cache, scales: Scales, packed: Packed, scale: float) -> torch.Tensor:
    return attention.reference(*(t * s for t, s in zip((q, *cache), scales, strict=True)), packed, scale)


# Plain PyTorch: the deployment's quantisers, softmax in fp32. EXACT leaves out quantisers and roundings (gradcheck).
REFERENCE = CacheKernels(_reference_quantise, _reference_attend)
EXACT = CacheKernels(_exact_quantise, _exact_attend)


def vllm(page: int) -> CacheKernels:
    """`page`: tokens of a KV page, the engine's own."""

    def quantise(q, k, v, scales: Scales, packed: Packed):
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

        pages = attention.Pages.of(packed, page)
        cache = torch.zeros(pages.count, page, k.shape[1], 2 * k.shape[2], dtype=torch.uint8, device=k.device)
        keys, values = cache.view(torch.float8_e4m3fn).split(k.shape[2], dim=-1)
        triton_reshape_and_cache_flash(k.contiguous(), v.contiguous(), keys, values, pages.rows, "fp8", scales.k,
                                       scales.v)
        stored = cache.flatten(0, 1)[pages.rows].view(torch.float8_e4m3fn).split(k.shape[2], dim=-1)
        return (vllm_quantise(q.flatten(1), scales.q).view(q.shape), *stored), (keys, values, pages.table)

    def attend(q, cache, scales: Scales, packed: Packed, scale: float) -> torch.Tensor:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        keys, values, table = cache
        longest, descale = max(packed.lengths), (len(packed.lengths), keys.shape[2])
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        unified_attention(
            q=q, k=keys, v=values, out=out, cu_seqlens_q=packed.starts, max_seqlen_q=longest,
            seqused_k=packed.starts.diff(), max_seqlen_k=longest, softmax_scale=scale, causal=True,
            window_size=(-1, -1), block_table=table, softcap=0, q_descale=scales.q, k_descale=scales.k.expand(descale),
            v_descale=scales.v.expand(descale), kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        )  # fmt: skip
        return out

    return CacheKernels(quantise, attend)


class _AttentionFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, q, k, v, packed, scale, scales):
        ctx.packed, ctx.scale, ctx.dtype = packed, scale, q.dtype
        scales = Scales(*(s.detach() for s in scales))
        codes, cache = kernels.quantise(q.detach(), k.detach(), v.detach(), scales, packed)
        ctx.save_for_backward(*codes, *scales)
        return kernels.attend(codes[0], cache, scales, packed, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        read = [dequantise(codes, scale, ctx.dtype) for codes, scale in zip(saved[:3], saved[3:], strict=True)]
        return None, *attention.gradients(*read, grad, ctx.packed, ctx.scale), None, None, None


def attention_fp8(kernels: CacheKernels, q, k, v, packed: Packed, scale: float, scales: Scales) -> torch.Tensor:
    """q: [tokens, heads, D], k and v: [tokens, kv heads, D] (views of one tensor may do) -> [tokens, heads, D]."""
    if any(s.numel() != 1 for s in scales):
        raise ValueError(f"attention_fp8: found scales of {[tuple(s.shape) for s in scales]}, expected one number each")
    return _AttentionFp8.apply(kernels, q, k, v, packed, scale, scales)
