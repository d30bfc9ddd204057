"""Clamped SwiGLU between two FP8 projections: the engine's kernel forward, hand-written fp32 derivative.

    gate' = min(gate, limit);   up' = clamp(up, -limit, limit);   y = gate' / (1 + exp(-gate')) * up'
    dgate = [gate <= limit] * dy * up' * s * (1 + gate' * (1 - s)),   s = 1 / (1 + exp(-gate'))
    dup   = [|up| <= limit] * dy * gate' * s

Invariant: the value is the engine's. The shared expert's kernel rounds silu to BF16 before the product
(csrc/activation_kernels.cu:306, `SiluAndMulWithClamp`); the routed experts' rounds once and quantises at once
(vllm/zero_mismatch/silu_mul_quant.py) and belongs to `grouped_fp8`, which takes its derivative from here. Both
derivatives are that of the formula: roundings count as the identity, and a clamped value, which the formula does not
depend on, gets no gradient. At the bound itself the gradient passes, as torch.clamp has it.

gate_up: [..., 2 * I] bf16, gate first -> [..., I] bf16. `limit` and `kernel` get None.
"""
import torch

from .packing import wide


def product(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """The formula, in gate_up's dtype, at least fp32, not rounded."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def product_grad(gate_up: torch.Tensor, grad: torch.Tensor, limit: float) -> torch.Tensor:
    """Gradient of `product` at gate_up, [..., 2 * I], in grad's dtype; computed in at least fp32."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    dy = wide(grad)
    kept_gate, kept_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(gate)
    dgate = torch.where(kept_gate, dy * up * s * (1 + gate * (1 - s)), 0)
    dup = torch.where(kept_up, dy * gate * s, 0)
    return torch.cat([dgate, dup], dim=-1).to(grad.dtype)


def reference(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Plain PyTorch with the kernel's two roundings; in fp64 it does not round at all."""
    gate, up = gate_up.chunk(2, dim=-1)
    clamped = wide(gate).clamp(max=limit)
    return (clamped * torch.sigmoid(clamped)).to(gate.dtype) * up.clamp(-limit, limit)


def vllm(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    torch.ops._C.silu_and_mul_with_clamp(out, gate_up, limit, 1.0, 0.0)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, gate_up, limit):
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        return kernel(gate_up.detach(), limit)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return None, product_grad(gate_up, grad, ctx.limit), None


def swiglu(kernel, gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    return _SwiGLU.apply(kernel, gate_up, limit)
