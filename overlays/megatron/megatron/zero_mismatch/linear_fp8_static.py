"""An FP8 projection with one scale for its weight and a calibrated one for its input, on a BF16 master.

Invariant: the forward value is the engine's for the same row and the same exported weight, bit for bit: ModelOpt's cast
of the master, vLLM's own quantiser for the row, and Cutlass' product, whose tile follows N alone under
VLLM_BATCH_INVARIANT (tests/gpu/test_fp8_static.py). Behind ReLU^2 the engine squares and quantises in one kernel
(layers/fusion/relu2_fp8_quant.py of 0.33.0), which multiplies by the scale's reciprocal: `squared` takes that kernel.

    codes = e4m3(x / input scale)           or e4m3(bf16(relu(x)^2) / input scale)
    y     = (codes @ e4m3(W / scale).T) * input scale * scale           scale = max |W| / 448

Backward: both quantisers are taken for the identity, also where the input saturates, and the derivative is taken at
what was multiplied, not at the masters: dx = dy Wq, dW = dy^T xq, with Wq and xq dequantised to BF16; through ReLU^2
dx = 2 relu(x) dy Wq. Gradients: x and the master; the input's scale stays as calibrated and has none.

x: [M, K] bf16, master: [N, K] bf16, N and K in multiples of 16, input_scale: fp32 of one element -> [M, N] bf16.
Upstream: quantization/modelopt.py KFp8StaticTensor, kernels/linear/scaled_mm/cutlass.py:182-290.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import relu2
from .linear_fp8 import OperandCache, matmul_grads
from .masters import Masters
from .packing import divided, wide
from .version_guard import WeightGuard

FP8_MAX = 448.0
MULTIPLE = 16  # Cutlass' alignment; the engine pads other widths


class Operand(NamedTuple):
    codes: torch.Tensor  # [N, K] e4m3
    scale: torch.Tensor  # fp32, no dimension


class StaticKernels(NamedTuple):
    """Values only."""

    operand: Callable[[torch.Tensor], Operand]  # of a master
    quantise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x, input scale -> codes
    square: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # the same of relu(x)^2
    multiply: Callable[[torch.Tensor, torch.Tensor, Operand], torch.Tensor]  # codes, input scale, operand -> [M, N]


def cast(master: torch.Tensor) -> Operand:
    """ModelOpt's FP8 of a whole matrix, as the recipe's writer has it; a matrix of zeros has scale 1."""
    largest = master.float().abs().amax()
    scale = torch.where(largest > 0, divided(largest, FP8_MAX), 1.0)
    return Operand(to_e4m3(master, scale), scale)


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (wide(codes) * scale).to(dtype)


def _reference_multiply(codes, input_scale, operand: Operand) -> torch.Tensor:
    product = codes.double() @ operand.codes.double().T
    return (product * (input_scale * operand.scale).double()).to(torch.bfloat16)


# Plain PyTorch: the deployment's quantisers, products in fp64. EXACT leaves out quantisers and roundings (gradcheck).
REFERENCE = StaticKernels(cast, to_e4m3, lambda x, scale: to_e4m3(relu2.reference(x), scale), _reference_multiply)
EXACT = StaticKernels(
    lambda master: Operand(master, master.new_ones(())), lambda x, scale: x / scale,
    lambda x, scale: relu2.reference(x) / scale, lambda codes, scale, operand: codes * scale @ operand.codes.T,
)  # fmt: skip


def vllm_quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x: [M, K] -> codes, as QuantFP8.forward_cuda calls it for one scale."""
    from vllm import _custom_ops

    return _custom_ops.scaled_fp8_quant(x.contiguous(), scale, group_shape=(-1, -1))[0]


def _vllm_square(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from types import SimpleNamespace

    from vllm.model_executor.layers.fusion.relu2_fp8_quant import relu_squared_static_fp8_quant

    return relu_squared_static_fp8_quant(x.contiguous(), SimpleNamespace(input_scale=scale)).data


def _vllm_multiply(codes, input_scale, operand: Operand) -> torch.Tensor:
    from vllm import _custom_ops

    return _custom_ops.cutlass_scaled_mm(codes, operand.codes.t(), scale_a=input_scale, scale_b=operand.scale,
                                         out_dtype=torch.bfloat16)


VLLM = StaticKernels(cast, vllm_quantise, _vllm_square, _vllm_multiply)


class _LinearFp8Static(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, x, master, input_scale, squared, cache, guard):
        ctx.masters, ctx.squared = Masters(guard, master=master), squared
        x, scale = x.detach(), input_scale.detach()
        operand = kernels.operand(master.detach()) if cache is None else cache.get(master, kernels.operand)
        codes = (kernels.square if squared else kernels.quantise)(x, scale)
        ctx.save_for_backward(x if squared else None, codes, scale, *operand)
        ctx.dtype = x.dtype
        return kernels.multiply(codes, scale, operand)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        x, codes, scale, *operand = ctx.saved_tensors
        weight, rows = dequantise(*operand, ctx.dtype), dequantise(codes, scale, ctx.dtype)
        dx, dw = matmul_grads(grad, rows, weight, *ctx.needs_input_grad[1:3])
        if ctx.squared and dx is not None:
            dx = (2 * wide(x).clamp(min=0) * wide(dx)).to(ctx.dtype)
        return None, dx, dw, None, None, None, None


def linear_fp8_static(
    kernels: StaticKernels, x: torch.Tensor, master: torch.Tensor, input_scale: torch.Tensor, *, squared: bool = False,
    cache: OperandCache | None = None, guard: WeightGuard | None = None,
) -> torch.Tensor:
    """[M, N]: x, or with `squared` relu(x)^2, through the projection; see the module."""
    if x.shape[-1] != master.shape[-1] or input_scale.numel() != 1:
        raise ValueError(f"linear_fp8_static: found x {tuple(x.shape)}, master {tuple(master.shape)} and input scale "
                         f"{tuple(input_scale.shape)}, expected [M, K], [N, K] and one number")
    if kernels is not EXACT:
        if master.shape[0] % MULTIPLE or master.shape[1] % MULTIPLE:
            raise ValueError(f"linear_fp8_static: found a master of shape {tuple(master.shape)}, expected multiples of "
                             f"{MULTIPLE}: the engine pads other widths, which is not written here")
        if x.dtype != torch.bfloat16 or master.dtype != torch.bfloat16:
            raise ValueError(f"linear_fp8_static: found x {x.dtype} and master {master.dtype}, expected bfloat16 for "
                             "both; keep fp32 masters in the optimizer")
    return _LinearFp8Static.apply(kernels, x, master, input_scale, squared, cache, guard)
