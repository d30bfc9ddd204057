"""The block-FP8 linear layer: the deployment's kernels on a BF16 master, and a BF16 backward.

Invariant: the forward value is what the engine computes for the same row and the same exported weight, bit for bit. It
holds because it is the same chain of functions: the exporter's cast, the engine's own post-processing at load, its
activation quantiser, and DeepGEMM's `fp8_gemm_nt`, whose rows do not depend on the batch (tests/gpu/test_deep_gemm.py).

    forward    y  = fp8_gemm_nt(quantise(x), load(cast(master)))
    backward   dx = dy @ master        dmaster = dy.T @ x        BF16 operands, fp32 accumulation

The backward takes both quantisers for the identity (straight-through) and differentiates by the BF16 master, as an
unquantised layer would (first article, section 3.1). `kernels`, `cache` and `guard` get None.

x: [..., K] bf16, master: [N, K] bf16, N and K in multiples of 128 -> [..., N] bf16.
Upstream: vllm/model_executor/kernels/linear/scaled_mm/deep_gemm.py:33-140, layers/quantization/utils/fp8_utils.py:1195.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import quant_fp8
from .masters import Masters
from .version_guard import Mark, WeightGuard, _mark


class Fp8Kernels(NamedTuple):
    """`multiply(x, operand)` and the two steps that make `operand` of a master."""

    cast: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # master -> codes and scales, as exported
    load: Callable[[torch.Tensor, torch.Tensor], Any]  # codes, scales -> what the engine keeps resident
    multiply: Callable[[torch.Tensor, Any], torch.Tensor]  # x: [M, K] bf16 -> [M, N] bf16

    def operand(self, master: torch.Tensor) -> Any:
        return self.load(*self.cast(master))


def _reference_multiply(x: torch.Tensor, operand: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    rows = quant_fp8.dequantise_rows(*quant_fp8.quantise_rows(x), torch.float64)
    return (rows @ quant_fp8.dequantise_weight(*operand, torch.float64).T).to(x.dtype)


# Plain PyTorch: the deployment's quantisation, and a product in fp64 instead of DeepGEMM's order of sums.
REFERENCE = Fp8Kernels(quant_fp8.quantise_weight, lambda codes, scales: (codes, scales), _reference_multiply)
# No quantisation at all, in any dtype: what the backward differentiates. For gradcheck.
EXACT = Fp8Kernels(lambda master: (master, None), lambda master, _: master, lambda x, master: x @ master.T)


def vllm_cast(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exporter's cast of one [N, K] matrix by vLLM's function; codes and scales are fresh tensors."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8(master, [quant_fp8.BLOCK, quant_fp8.BLOCK], use_ue8m0=True)


def vllm_quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [M, K] rows in the layout that DeepGEMM's dense product takes (QuantFP8.forward_cuda)."""
    import vllm.envs as envs
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT, is_deep_gemm_e8m0_used

    if DeepGemmQuantScaleFMT.from_oracle() == DeepGemmQuantScaleFMT.UE8M0:
        return fp8_utils.per_token_group_quant_fp8_packed_for_deepgemm(x, group_size=quant_fp8.BLOCK, use_ue8m0=True)
    return fp8_utils.per_token_group_quant_fp8(
        x, group_size=quant_fp8.BLOCK, column_major_scales=True,
        tma_aligned_scales=envs.VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES, use_ue8m0=is_deep_gemm_e8m0_used(),
    )


def _vllm_load(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    block = (quant_fp8.BLOCK, quant_fp8.BLOCK)
    return deepgemm_post_process_fp8_weight_block(codes, scales, block, use_e8m0=is_deep_gemm_e8m0_used())


def _vllm_multiply(x: torch.Tensor, operand: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_e8m0_used

    out = torch.empty(x.shape[0], operand[0].shape[0], dtype=torch.bfloat16, device=x.device)
    fp8_gemm_nt(vllm_quantise_rows(x), operand, out, is_deep_gemm_e8m0_used=is_deep_gemm_e8m0_used())
    return out


VLLM = Fp8Kernels(vllm_cast, _vllm_load, _vllm_multiply)


class OperandCache:
    """Quantised weights kept between forwards of one weight version: memory for the time of re-quantising.

    Kept by master, and used only while the guard's version and the master's mark (address, write counter) are those it
    was made from. One cache serves any number of weights; `clear` frees it.
    """

    def __init__(self, guard: WeightGuard):
        self._guard = guard
        self._kept: dict[int, tuple[int, Mark, Any]] = {}

    def get(self, master: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        version, mark = self._guard.version, _mark(master)
        kept = self._kept.get(id(master))
        if kept is None or kept[:2] != (version, mark):
            self._kept.pop(id(master), None)  # free the old operand before the new one is made
            kept = self._kept[id(master)] = (version, mark, make(master.detach()))
        return kept[2]

    def clear(self) -> None:
        self._kept.clear()


def matmul_grads(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, need_x: bool, need_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `x @ weight.T`; x: [M, K], weight: [N, K], grad: [M, N]."""
    return (grad @ weight if need_x else None), (grad.T @ x if need_weight else None)


class _LinearFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, x, master, cache, guard):
        ctx.masters = Masters(guard, master=master)
        ctx.save_for_backward(x, master)
        operand = kernels.operand(master.detach()) if cache is None else cache.get(master, kernels.operand)
        return kernels.multiply(x.detach(), operand)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        x, master = ctx.saved_tensors
        return None, *matmul_grads(grad, x, master, *ctx.needs_input_grad[1:3]), None, None


def linear_fp8(
    kernels: Fp8Kernels, x: torch.Tensor, master: torch.Tensor, *,
    cache: OperandCache | None = None, guard: WeightGuard | None = None,
) -> torch.Tensor:
    """x: [..., K] bf16, master: [N, K] bf16 -> [..., N] bf16; see the module."""
    if kernels is not EXACT:
        quant_fp8.check_blocks("linear_fp8", master)
        if x.dtype != torch.bfloat16 or master.dtype != torch.bfloat16:
            raise ValueError(
                f"linear_fp8: found x {x.dtype} and master {master.dtype}, expected bfloat16 for both: the deployment "
                "quantises BF16; cast the input, and keep fp32 masters in the optimizer"
            )
    if x.shape[-1] != master.shape[-1]:
        raise ValueError(
            f"linear_fp8: found x {tuple(x.shape)} and master {tuple(master.shape)}, expected [..., K] and [N, K]"
        )
    rows = x.reshape(-1, x.shape[-1])
    return _LinearFp8.apply(kernels, rows, master, cache, guard).unflatten(0, x.shape[:-1])
