"""From the low-rank projections to what DeepSeek-V4's attention reads: the two norms, then q and the window's K rows.

    norms    qr' = RMSNorm(qr) * w_q;   kv' = RMSNorm(kv) * w_kv                                      one kernel
    q and k  q'[h] = turn(RMSNorm(q[h]));   row = through the FP8 cache (turn(kv'))                   one kernel

Invariant: values are the engine's. Both kernels give each token its own warps and read no other token
(models/common/ops/fused_qk_rmsnorm.py, csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu), and the row is read back
from a private FP8 cache that the second one wrote (`kv_fp8`).

Backward: RMSNorm's and the rotation's derivatives in fp32 at the forward's inputs; the trip through the cache counts as
the identity. Gradients reach qr, kv, w_q and w_kv; q and kv'. Positions, cos_sin, eps, kernels and guard get None.

qr: [T, R], kv: [T, D], w_q: [R], w_kv: [D], q: [T, heads, D], all bf16; cos_sin: [positions, turned] fp32.
"""
from typing import NamedTuple

import torch

from . import kv_fp8
from .masters import Masters
from .packing import wide
from .rms import rms_grad
from .rotary import rotate


class InputKernels(NamedTuple):
    norms: object  # (qr, kv, w_q, w_kv, eps) -> (qr', kv')
    q_and_k: object  # (q, kv', positions, cos_sin, eps) -> (q' [T, heads, D], rows [T, D])


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


def _reference_norms(qr, kv, w_q, w_kv, eps):
    return (_rms(qr, eps) * wide(w_q)).to(qr.dtype), (_rms(kv, eps) * wide(w_kv)).to(kv.dtype)


def _reference_q_and_k(q, kv, positions, cos_sin, eps):
    turned = cos_sin.shape[-1]
    row = kv_fp8.through_cache(rotate(kv, positions, cos_sin), turned)
    return rotate(_rms(q, eps), positions, cos_sin).to(q.dtype), row


REFERENCE = InputKernels(_reference_norms, _reference_q_and_k)


def _vllm_norms(qr, kv, w_q, w_kv, eps):
    from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm

    return fused_q_kv_rmsnorm(qr, kv, w_q, w_kv, eps)


def _vllm_q_and_k(q, kv, positions, cos_sin, eps):
    tokens, heads, dim = q.shape
    cache = kv_fp8.private_cache(tokens, q.device)
    slots = torch.arange(tokens, device=q.device)
    turned = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, kv, cache.view(cache.shape[0], -1), slots, positions, cos_sin, heads, eps, cache.shape[1]
    )
    return turned, kv_fp8.read_back(cache, tokens, dim)


VLLM = InputKernels(_vllm_norms, _vllm_q_and_k)


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, qr, kv, w_q, w_kv, eps, guard):
        ctx.masters = Masters(guard, q_norm=w_q, kv_norm=w_kv)
        ctx.save_for_backward(qr, kv, w_q, w_kv)
        ctx.eps = eps
        return kernel(*(t.detach() for t in (qr, kv, w_q, w_kv)), eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_q, grad_kv):
        ctx.masters.check()
        saved = ctx.saved_tensors  # asked for once: recomputation gives them out once
        qr, kv, w_q, w_kv = saved
        dqr, dw_q = rms_grad(grad_q, qr, w_q, ctx.eps)
        dkv, dw_kv = rms_grad(grad_kv, kv, w_kv, ctx.eps)
        grads = zip((dqr, dkv, dw_q, dw_kv), saved, strict=True)
        return None, *(d.to(t.dtype) for d, t in grads), None, None


class _QAndK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, q, kv, positions, cos_sin, eps):
        ctx.save_for_backward(q, positions, cos_sin)
        ctx.eps = eps
        return kernel(q.detach(), kv.detach(), positions, cos_sin, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_q, grad_row):
        q, positions, cos_sin = ctx.saved_tensors
        straight = rotate(grad_q, positions, cos_sin, back=True)
        dq, _ = rms_grad(straight, q, None, ctx.eps)
        dkv = rotate(grad_row, positions, cos_sin, back=True).to(grad_row.dtype)
        return None, dq.to(q.dtype), dkv, None, None, None


def norms(kernels: InputKernels, qr, kv, w_q, w_kv, eps: float, guard=None) -> tuple[torch.Tensor, torch.Tensor]:
    return _Norms.apply(kernels.norms, qr, kv, w_q, w_kv, eps, guard)


def q_and_k(kernels: InputKernels, q, kv, positions, cos_sin, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _QAndK.apply(kernels.q_and_k, q, kv, positions, cos_sin, eps)
