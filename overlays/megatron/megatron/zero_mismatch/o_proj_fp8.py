"""The grouped output projection: turn the heads back, quantise, one FP8 product a group of heads.

    z[t, g] = wo_a[g] @ quantise(concatenation of the group's heads, each turned back)

Invariant: the engine's value, bit for bit: `fused_inv_rope_fp8_quant` turns and quantises a (token, head) by itself,
and DeepGEMM's einsum gives a row the same bits at every number of tokens (tests/gpu/test_deep_gemm.py). The second
half of the projection, wo_b, is an ordinary `linear_fp8`.

Backward, quantisers and roundings as the identity, BF16 products: dwo_a[g] = dz[:, g].T @ (turned heads of g),
dheads = turned forward (dz[:, g] @ wo_a[g]). Positions, cos_sin, kernels, cache and guard get None.

heads: [T, G * M, D] bf16, M heads a group; wo_a: [G * N, M * D] bf16 -> z: [T, G, N] bf16.
Upstream: vllm/models/deepseek_v4/nvidia/ops/o_proj.py:33.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import quant_fp8
from .batched import product
from .linear_fp8 import OperandCache, vllm_cast
from .masters import Masters
from .rotary import rotate
from .version_guard import WeightGuard


class OProjKernels(NamedTuple):
    operand: Callable[[torch.Tensor, int], Any]  # master, groups -> what the engine keeps resident
    project: Callable[..., torch.Tensor]  # (heads, positions, cos_sin, operand, groups) -> z


def _grouped(heads, positions, cos_sin, groups: int) -> torch.Tensor:
    """[T, G, M * D] in the wide type."""
    return rotate(heads, positions, cos_sin, back=True).unflatten(1, (groups, -1)).flatten(2)


def _reference_operand(master, groups):
    return [part.unflatten(0, (groups, -1)) for part in quant_fp8.quantise_weight(master)]


def _reference_project(heads, positions, cos_sin, operand, groups):
    # The kernel quantises the turned values from fp32, without a rounding to BF16 between.
    rows = quant_fp8.quantise_rows(_grouped(heads, positions, cos_sin, groups))
    rows, weight = quant_fp8.dequantise_rows(*rows, torch.float64), quant_fp8.dequantise_weight(*operand, torch.float64)
    return torch.einsum("tgk,gnk->tgn", rows, weight).to(heads.dtype)


def _exact_project(heads, positions, cos_sin, master, groups):
    return torch.einsum("tgk,gnk->tgn", _grouped(heads, positions, cos_sin, groups), master.unflatten(0, (groups, -1)))


# Plain PyTorch: the deployment's quantisers and a product in fp64; and the same without quantisers, for gradcheck.
REFERENCE = OProjKernels(_reference_operand, _reference_project)
EXACT = OProjKernels(lambda master, groups: master, _exact_project)


def _vllm_operand(master, groups):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return deepgemm_post_process_fp8_weight_block(
        *vllm_cast(master), (quant_fp8.BLOCK, quant_fp8.BLOCK), use_e8m0=is_deep_gemm_e8m0_used(), is_bmm=True,
        bmm_batch_size=groups,
    )


def _vllm_project(heads, positions, cos_sin, operand, groups):
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe
    from vllm.utils.deep_gemm import fp8_einsum

    recipe, tma_aligned = compute_fp8_einsum_recipe()
    turned = cos_sin.shape[-1]
    rows = fused_inv_rope_fp8_quant(
        heads, positions, cos_sin, n_groups=groups, heads_per_group=heads.shape[1] // groups,
        nope_dim=heads.shape[2] - turned, rope_dim=turned, quant_group_size=recipe[2], tma_aligned_scales=tma_aligned,
        quantize=True,
    )
    z = heads.new_empty(heads.shape[0], groups, operand[0].shape[1])
    fp8_einsum("bhr,hdr->bhd", rows, operand, z, recipe=recipe)
    return z


VLLM = OProjKernels(_vllm_operand, _vllm_project)


class _OProj(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, heads, wo_a, positions, cos_sin, groups, cache, guard):
        ctx.masters = Masters(guard, wo_a=wo_a)
        ctx.save_for_backward(heads, wo_a, positions, cos_sin)
        ctx.groups = groups
        def make(master):
            return kernels.operand(master, groups)

        operand = make(wo_a.detach()) if cache is None else cache.get(wo_a, make)
        return kernels.project(heads.detach(), positions, cos_sin, operand, groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        heads, wo_a, positions, cos_sin = ctx.saved_tensors
        by_group = grad.transpose(0, 1)  # [G, T, N]
        dheads = dwo_a = None
        if ctx.needs_input_grad[1]:
            turned = product(by_group, wo_a.unflatten(0, (ctx.groups, -1))).transpose(0, 1)
            dheads = rotate(turned.unflatten(2, (-1, heads.shape[2])).flatten(1, 2), positions, cos_sin).to(heads.dtype)
        if ctx.needs_input_grad[2]:
            rows = _grouped(heads, positions, cos_sin, ctx.groups).to(heads.dtype).transpose(0, 1)
            dwo_a = product(by_group.mT, rows).flatten(0, 1)
        return None, dheads, dwo_a, None, None, None, None, None


def o_proj_fp8(
    kernels: OProjKernels, heads: torch.Tensor, wo_a: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    groups: int, *, cache: OperandCache | None = None, guard: WeightGuard | None = None,
) -> torch.Tensor:
    if heads.shape[1] % groups or wo_a.shape[1] != heads.shape[1] // groups * heads.shape[2]:
        raise ValueError(
            f"o_proj_fp8: found heads {tuple(heads.shape)}, wo_a {tuple(wo_a.shape)} and {groups} groups; expected "
            "[T, G * M, D] and [G * N, M * D]"
        )
    return _OProj.apply(kernels, heads, wo_a, positions, cos_sin, groups, cache, guard)
