"""Which function computes each operator's values: one table for the aligned trainer, one of plain PyTorch.

`from_vllm` calls the functions the rollout engine calls under VLLM_BATCH_INVARIANT, with the same layouts, and refuses
to run without that switch: with it off the engine itself takes other kernels. vLLM is imported inside functions only,
here and beside the quantised operators. `reference` is for CPU tests: same shapes and the same places of rounding, not
the same bits.
"""
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import torch

from . import (
    attention,
    attention_fp8,
    conv1d,
    experts,
    experts_nvfp4,
    linear,
    linear_fp8_static,
    logprob,
    mamba2,
    norm,
    relu2,
    router,
)
from .packing import Packed


@dataclass(frozen=True)
class Quantised:
    """A ModelOpt checkpoint of FP8, NVFP4 and an FP8 cache runs these for linear, relu2, attention and experts."""

    linear: linear_fp8_static.StaticKernels
    attention: attention_fp8.CacheKernels
    experts: experts_nvfp4.ExpertKernels


@dataclass(frozen=True)
class Kernels:
    """Values only: no gradient, and nothing is written to an argument. Shapes: the operators' modules."""

    linear: Callable
    rms_norm: Callable
    add_rms_norm: Callable
    gated_rms_norm: Callable
    relu2: Callable
    conv1d: Callable
    mamba2: Callable
    attention: Callable
    router_logits: Callable
    router_top_k: Callable
    experts: Callable
    logprob: Callable
    quantised: Quantised | None = None


def reference() -> Kernels:
    return Kernels(
        linear=linear.reference,
        rms_norm=norm.reference,
        add_rms_norm=norm.reference_add,
        gated_rms_norm=norm.reference_gated,
        relu2=relu2.reference,
        conv1d=conv1d.reference,
        mamba2=mamba2.reference,
        attention=attention.reference,
        router_logits=router.reference_logits,
        router_top_k=router.reference_top_k,
        experts=experts.reference,
        logprob=logprob.reference,
        quantised=Quantised(linear_fp8_static.REFERENCE, attention_fp8.REFERENCE, experts_nvfp4.REFERENCE),
    )


def exact() -> Kernels:
    """`reference` without quantisers, in any dtype: what the backwards differentiate."""
    plain = Quantised(linear_fp8_static.EXACT, attention_fp8.EXACT, experts_nvfp4.EXACT)
    return replace(reference(), quantised=plain)


def from_vllm(page: int) -> Kernels:
    """`page`: tokens of a KV page, the engine's own (cache_config.block_size)."""
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        raise ValueError(
            "kernels: found VLLM_BATCH_INVARIANT unset, expected 1: without it vLLM picks kernels by the batch and no "
            "trainer can follow. Set it before vLLM is imported, for the engine and for the trainer"
        )
    from vllm import _custom_ops
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant, rms_norm_batch_invariant
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
    from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32

    def add_rms_norm(x, residual, weight, eps):
        out, total = x.clone(), residual.clone()  # the kernel writes both in place
        _custom_ops.fused_add_rms_norm(out, total, weight, eps)
        return out, total

    def gated_rms_norm(x, gate, weight, eps, group):
        return rms_norm_gated(x, weight, None, z=gate, eps=eps, group_size=group, norm_before_gate=False)

    return Kernels(
        linear=linear_batch_invariant,
        rms_norm=rms_norm_batch_invariant,
        add_rms_norm=add_rms_norm,
        gated_rms_norm=gated_rms_norm,
        relu2=_vllm_relu2,
        conv1d=_vllm_conv1d,
        mamba2=_vllm_mamba2,
        attention=lambda q, k, v, packed, scale: _vllm_attention(q, k, v, packed, scale, page),
        router_logits=bi_mm_fp32,
        router_top_k=_vllm_top_k,
        experts=_vllm_experts,
        logprob=compute_token_logprobs,
        quantised=Quantised(linear_fp8_static.VLLM, attention_fp8.vllm(page), experts_nvfp4.VLLM),
    )


def _vllm_relu2(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops._C.relu_squared(out, x)
    return out


# What every layer asks of a batch is made once for it: the host waits for each copy to the device, and would have no
# launches in flight at any layer's begin.
@lru_cache(maxsize=4)
def _conv1d_programs(packed: Packed) -> SimpleNamespace:
    """Which sequence, and which rows of it, each program of `causal_conv1d_fn` works on."""
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    programs, batch, offsets = compute_causal_conv1d_metadata(packed.starts.cpu(), device=packed.device)
    return SimpleNamespace(nums_dict=programs, batch_ptr=batch, token_chunk_offset_ptr=offsets)


@lru_cache(maxsize=4)
def _mamba2_pieces(packed: Packed):
    """Without tails: no ring is written."""
    from vllm.zero_mismatch import mamba2_pieces, mamba2_replay, mamba2_scan

    def to_device(rows):
        return torch.tensor(rows, dtype=torch.int32).to(packed.device)

    pieces = mamba2_pieces.prefill([0] * len(packed.lengths), list(packed.lengths), mamba2_replay.CHUNK,
                                   mamba2_scan.TILE, to_device)
    return replace(pieces, tails=None)


def _vllm_conv1d(x, weight, bias, packed: Packed) -> torch.Tensor:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

    sequences, width = len(packed.lengths), weight.shape[1]
    # Slot 0 is vLLM's null block. The window a sequence leaves behind is written and not read.
    windows = x.new_zeros(sequences + 1, width - 1, x.shape[1]).transpose(1, 2)
    return causal_conv1d_fn(
        x.transpose(0, 1), weight, bias, activation="silu", conv_states=windows,
        has_initial_state=torch.zeros(sequences, dtype=torch.bool, device=x.device),
        cache_indices=torch.arange(1, sequences + 1, dtype=torch.int32, device=x.device),
        query_start_loc=packed.starts,
        metadata=_conv1d_programs(packed),
    ).transpose(0, 1)  # fmt: skip


def _vllm_mamba2(xbc, dt, a, d, dt_bias, packed: Packed, sizes: mamba2.Sizes) -> torch.Tensor:
    from vllm.zero_mismatch import mamba2_replay

    shape = (sizes.heads, sizes.head_dim, sizes.groups, sizes.state, mamba2_replay.CHUNK)
    x, b, c = xbc.split([sizes.x_width, sizes.bc_width, sizes.bc_width], dim=-1)
    step = mamba2_replay.Step(x, b, c, dt, a, d, dt_bias, shape, sizes.first_group)
    # Fresh sequences read nothing of their slot, and no tails are written: one slot takes every state left behind.
    cache = mamba2_replay.new_cache(2, shape, xbc.dtype, xbc.device, 0.0)
    slots = torch.ones(len(packed.lengths), dtype=torch.int32, device=xbc.device)
    out = torch.empty(xbc.shape[0], sizes.x_width, dtype=xbc.dtype, device=xbc.device)
    mamba2_replay.prefill(step, cache, _mamba2_pieces(packed), slots, out)
    return out


def _vllm_attention(q, k, v, packed: Packed, scale: float, page: int) -> torch.Tensor:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    pages = attention.Pages.of(packed, page)
    cache = k.new_zeros(pages.count * page, k.shape[1], 2 * k.shape[2])
    cache[pages.rows] = torch.cat([k, v], dim=-1)
    keys, values = cache.view(-1, page, *cache.shape[1:]).split(k.shape[2], dim=-1)
    longest = max(packed.lengths)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    unified_attention(
        q=q, k=keys, v=values, out=out, cu_seqlens_q=packed.starts, max_seqlen_q=longest,
        seqused_k=packed.starts.diff(), max_seqlen_k=longest, softmax_scale=scale, causal=True, window_size=(-1, -1),
        block_table=pages.table, softcap=0, q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip
    return out


def _vllm_top_k(logits, bias, k: int, renormalise: bool):
    from vllm import _custom_ops

    return _custom_ops.grouped_topk(logits, 1, 1, k, renormalise, 1.0, bias, 1)


def _vllm_experts(x, w1, w2, weights, ids) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    return fused_experts(x, w1, w2, weights, ids, activation=MoEActivation.RELU2_NO_MUL)
