"""y = x W^T in the activations' dtype, without a bias: the projections and, by itself, the embedding's lookup.

Values: vLLM's `linear_batch_invariant` (model_executor/determinism/batch_invariant.py:1126 of 0.33.0), which every
unquantised linear calls under VLLM_BATCH_INVARIANT (layers/linear.py:238). A row of y is a function of its row of x and
of W: cutting a batch into micro-batches cuts rows, and changes no bit.

Backward: dX = dY W and dW = dY^T X by ordinary GEMMs (fp32 accumulation). Both operands are the forward's own.
Gradients: x and weight. Source: seeds section 4 (BF16 GEMMs for the backward of linears).
"""
import torch

from .packing import wide


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, weight):
        ctx.save_for_backward(x, weight)
        return kernel(x.detach(), weight.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        dx = grad @ weight if ctx.needs_input_grad[1] else None
        dw = grad.T @ x if ctx.needs_input_grad[2] else None
        return None, dx, dw


def linear(kernel, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [tokens, K], weight: [N, K], one dtype -> [tokens, N]."""
    if x.dtype != weight.dtype:
        raise ValueError(f"linear: found x {x.dtype} and weight {weight.dtype}, expected one; cast the master once")
    return _Linear.apply(kernel, x, weight)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (wide(x) @ wide(weight).T).to(x.dtype)
