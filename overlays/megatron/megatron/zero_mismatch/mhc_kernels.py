"""The forward kernels of `mhc`: vLLM's, and plain PyTorch ones that stand in for them on a CPU.

The PyTorch ones round where the kernels store BF16 (the streams and the layer's input) and where the mixed stream is
stashed before its norm (tilelang_kernels.py:323 `mhc_pre_big_fuse_with_norm_tilelang`); in fp64 they do not round.
"""
from typing import NamedTuple

import torch

from .mhc import Settings
from .packing import wide


class MhcKernels(NamedTuple):
    pre: object
    pre_broadcast: object
    post: object
    head: object


def _mix(x, fn, scale, base, settings: Settings):
    mixes = x @ fn.T * torch.rsqrt(x.square().mean(-1, keepdim=True) + settings.rms_eps)
    return mixes * scale + base


def _reference_pre(residual, fn, scale, base, weight, settings: Settings):
    streams = residual.shape[1]
    sizes = [streams, streams, streams * streams]
    factors = wide(scale).repeat_interleave(torch.tensor(sizes, device=scale.device))
    logits = _mix(wide(residual).flatten(1), wide(fn), factors, wide(base), settings)
    collapse, out, comb = logits.split(sizes, -1)
    comb = torch.softmax(comb.unflatten(-1, (streams, streams)), -1) + settings.hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + settings.hc_eps)
    for _ in range(settings.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + settings.hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + settings.hc_eps)
    mixed = ((torch.sigmoid(collapse) + settings.hc_eps)[..., None] * wide(residual)).sum(1)
    rstd = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + settings.norm_eps)
    layer_input = (wide(mixed.to(residual.dtype)) * rstd * wide(weight)).to(residual.dtype)
    return layer_input, torch.sigmoid(out) * settings.post_scale, comb


def _reference_pre_broadcast(x, fn, scale, base, weight, settings: Settings):
    residual = x[:, None].repeat(1, fn.shape[1] // x.shape[1], 1)
    return residual, *_reference_pre(residual, fn, scale, base, weight, settings)


def _reference_post(x, residual, post, comb):
    mixed = torch.einsum("tio,tih->toh", wide(comb), wide(residual))
    return (wide(post)[..., None] * wide(x)[:, None] + mixed).to(residual.dtype)


def _reference_head(residual, fn, scale, base, settings: Settings):
    collapse = torch.sigmoid(_mix(wide(residual).flatten(1), wide(fn), wide(scale), wide(base), settings))
    return ((collapse + settings.hc_eps)[..., None] * wide(residual)).sum(1).to(residual.dtype)


REFERENCE = MhcKernels(_reference_pre, _reference_pre_broadcast, _reference_post, _reference_head)


def _arguments(settings: Settings):
    return (settings.rms_eps, settings.hc_eps, settings.hc_eps, settings.post_scale, settings.iterations)


def _vllm_pre(residual, fn, scale, base, weight, settings: Settings):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_pre_tilelang

    out, comb, layer_input = mhc_pre_tilelang(
        residual, fn, scale, base, *_arguments(settings), norm_weight=weight, norm_eps=settings.norm_eps
    )
    return layer_input, out.squeeze(-1), comb


def _vllm_pre_broadcast(x, fn, scale, base, weight, settings: Settings):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_pre_broadcast_tilelang

    # nvidia/model.py `finalize_mhc_broadcast_weights`: the same sum over streams, of the same tensor.
    summed = fn.view(fn.shape[0], -1, x.shape[1]).sum(dim=1)
    residual, out, comb, layer_input = mhc_pre_broadcast_tilelang(
        x, fn, scale, base, *_arguments(settings), norm_weight=weight, norm_eps=settings.norm_eps, fn_broadcast=summed
    )
    return residual, layer_input, out.squeeze(-1), comb


def _vllm_post(x, residual, post, comb):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_post_tilelang

    return mhc_post_tilelang(x, residual, post.unsqueeze(-1), comb)


def _vllm_head(residual, fn, scale, base, settings: Settings):
    from vllm.model_executor.kernels.mhc.tilelang import hc_head_fused_kernel_tilelang

    return hc_head_fused_kernel_tilelang(residual, fn, scale, base, settings.rms_eps, settings.hc_eps)


VLLM = MhcKernels(_vllm_pre, _vllm_pre_broadcast, _vllm_post, _vllm_head)
