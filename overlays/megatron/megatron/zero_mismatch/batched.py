"""a @ b over leading dimensions, for derivatives: in the operands' own precision, whatever the engine has replaced.

An engine with batch invariance on replaces `aten::bmm` in the whole process by a Triton kernel that multiplies fp32 as
TF32 and knows no fp64 (determinism/batch_invariant.py:831, :1374 of 0.33.0). `aten::baddbmm` it leaves to cuBLAS, which
init_batch_invariance has set to ieee. Nothing here gives a forward value, so no bit of a logprob depends on it.
Gradients: both operands, once.
"""
import torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., m, k] and [..., k, n] of one dtype and equal leading dimensions -> [..., m, n]; no gradient of its own."""
    unread = a.new_empty(1, 1, 1)  # beta is 0
    flat = torch.baddbmm(unread, a.flatten(0, -3), b.flatten(0, -3), beta=0)
    return flat.unflatten(0, a.shape[:-2])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return product(a.detach(), b.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return product(grad, b.mT), product(a.mT, grad)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`product` with its gradient."""
    return _Product.apply(a, b)
