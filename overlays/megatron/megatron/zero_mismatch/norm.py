"""RMSNorm, RMSNorm behind a residual addition, and Mamba-2's gated, grouped RMSNorm.

    y = w x rsqrt(mean(x^2) + eps);      r' = x + r, y = norm(r');      y = norm_by_group(x silu(gate)) w

Values: vLLM's own kernels under VLLM_BATCH_INVARIANT: the first norm of the model `rms_norm_batch_invariant`, every
other one `_C.fused_add_rms_norm` (determinism/batch_invariant.py:1065), whose r' is rounded to the residual's dtype and
is what the norm then sees; the gated one `rms_norm_gated(group_size=...)` (mamba/ops/layernorm_gated.py:144, patch
gated-norm-one-kernel). One program owns a row, so rows do not depend on the batch.

Backward: written out in fp32, at the forward's own rounded inputs. r' is the point of linearisation, not x + r.
Gradients: x, residual, gate and weight. Sums over tokens for dw run in fp32 and are rounded once.
"""
import torch

from .packing import wide
from .rms import rms_grad
from .ste import replayed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernel(x.detach(), weight.detach(), eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx, dw = rms_grad(grad, x, weight, ctx.eps)
        return None, dx.to(x.dtype), dw.to(weight.dtype), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, residual, weight, eps):
        out, total = kernel(x.detach(), residual.detach(), weight.detach(), eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return out, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_total):
        total, weight = ctx.saved_tensors
        dx, dw = rms_grad(grad, total, weight, ctx.eps)
        dx = (dx + wide(grad_total)).to(total.dtype)
        return None, dx, dx, dw.to(weight.dtype), None


def rms_norm(kernel, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [tokens, hidden], weight: [hidden] -> [tokens, hidden]."""
    return _RMSNorm.apply(kernel, x, weight, eps)


def add_rms_norm(kernel, x, residual, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [tokens, hidden] -> (the norm of their sum, the sum). `kernel` must write to neither."""
    return _AddRMSNorm.apply(kernel, x, residual, weight, eps)


def gated_rms_norm(kernel, x, gate, weight, eps: float, group: int) -> torch.Tensor:
    """x, gate: [tokens, width] (gate may be a view of a wider tensor), weight: [width]; `group` divides width."""
    return replayed(
        lambda x, gate, weight: kernel(x, gate, weight, eps, group),
        lambda x, gate, weight: reference_gated(x, gate, weight, eps, group),
        x, gate, weight,
    )  # fmt: skip


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rstd = torch.rsqrt(wide(x).square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (wide(x) * rstd * wide(weight)).to(x.dtype)


def reference_add(x, residual, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = (wide(x) + wide(residual)).to(x.dtype)
    return reference(total, weight, eps), total


def reference_gated(x, gate, weight, eps: float, group: int) -> torch.Tensor:
    z = wide(gate)
    gated = (wide(x) * z * torch.sigmoid(z)).unflatten(-1, (-1, group))
    rstd = torch.rsqrt(gated.square().sum(-1, keepdim=True) / group + eps)
    return ((gated * rstd).flatten(-2) * wide(weight)).to(x.dtype)
