"""The routed experts: the engine's grouped FP8 kernels on BF16 masters, and a BF16 backward.

Invariant: a token's output is the engine's for the same row, weights and routing, bit for bit, whatever other tokens
are in the batch. It holds for the reasons in vllm/zero_mismatch/experts_deepgemm.py; this module calls the same
functions in the order of DeepGemmExperts.apply (fused_moe/experts/deep_gemm_moe.py:340-459):

    codes  = quantise(x), scattered into experts            rows of an expert lie together, in any order
    hidden = codes @ w13[e].T                               [places, 2 * I] bf16
    acted  = quantise(bf16(clamped SwiGLU(hidden)))         silu_mul_quant.py: one rounding, then e4m3
    rows   = acted @ w2[e].T                                [places, H] bf16
    out[t] = bf16(sum over slots s of weight[t, s] * rows[place[t, s]])     fp32, slot 0 first

Backward, quantisers taken for the identity, in BF16 products with fp32 accumulation:

    dweight[t, s] = dout[t] . rows[place[t, s]]             fp32; the gradient that reaches the router
    drows         = weight * dout        dw2[e] = drows.T @ acted      dacted = drows @ w2[e]
    dhidden       = SwiGLU'(hidden)      dw13[e] = dhidden.T @ x       dx[t] = sum over slots of dhidden @ w13[e]

Slots with expert -1 (padding, or another rank's) contribute nothing and get zero. `ids`, `limit`, `kernels`, `cache`
and `guard` get None. Each expert's rows are laid out by ascending token and padded with zeros to those of the fullest
expert, so that one batched product serves all experts of a block; zeros change no sum, and two runs give the same bits.

x: [T, H] bf16; w13: [E, 2 * I, H] bf16, gate rows first; w2: [E, H, I] bf16; ids: [T, S] int32; weights: [T, S] fp32.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import quant_fp8, swiglu
from .batched import product
from .linear_fp8 import OperandCache, vllm_cast
from .masters import Masters
from .packing import wide
from .version_guard import WeightGuard

BLOCK_BYTES = 1 << 28  # of one padded [experts, rows, H] operand in the backward


class Parts(NamedTuple):
    """What a forward leaves for its backward beside its inputs."""

    out: torch.Tensor  # [T, H]
    hidden: torch.Tensor  # [places, 2 * I]
    rows: torch.Tensor  # [places, H]
    place: torch.Tensor  # [T, S] int: the row of each slot; undefined where the expert is -1


class ExpertKernels(NamedTuple):
    operand: Callable[[torch.Tensor], Any]  # [E, N, K] master -> what the engine keeps resident
    experts: Callable[..., Parts]  # (x, operand13, operand2, ids, weights, limit)


def _reference_experts(quantised: bool):
    def experts(x, w13, w2, ids, weights, limit) -> Parts:
        def through(rows, operand):  # fp64 product of one expert; with quantisation or without
            if not quantised:
                return rows @ operand.T
            codes, scales = operand
            rows = quant_fp8.dequantise_rows(*quant_fp8.quantise_rows(rows), torch.float64)
            return (rows @ quant_fp8.dequantise_weight(codes, scales, torch.float64).T).to(x.dtype)

        flat = ids.flatten()
        order = torch.argsort(torch.where(flat < 0, flat.max() + 1, flat).long(), stable=True)
        order = order[: int((flat >= 0).sum())]
        place = torch.zeros_like(flat).index_copy(0, order, torch.arange(len(order), device=x.device).to(flat.dtype))
        token, expert = order // ids.shape[1], flat[order]
        hidden, rows = [], []
        for e in expert.unique().tolist():
            each = [w[e] if not quantised else (w[0][e], w[1][e]) for w in (w13, w2)]
            hidden.append(through(x[token[expert == e]], each[0]))
            rows.append(through(swiglu.product(hidden[-1], limit).to(x.dtype), each[1]))
        hidden, rows = torch.cat(hidden), torch.cat(rows)
        place = place.view_as(ids)
        total = torch.zeros_like(wide(x))
        for slot in range(ids.shape[1]):
            live = torch.where(ids[:, slot] >= 0, weights[:, slot], 0)
            total = total + rows[place[:, slot].long()] * live[:, None]
        return Parts(total.to(x.dtype), hidden, rows, place)

    return experts


# Plain PyTorch: the deployment's quantisers, products in fp64. EXACT leaves out quantisers and roundings (gradcheck).
REFERENCE = ExpertKernels(quant_fp8.quantise_weight, _reference_experts(quantised=True))
EXACT = ExpertKernels(lambda master: master, _reference_experts(quantised=False))


def vllm_operand(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exporter's cast of all experts as one matrix (blocks do not reach across experts: N is a multiple of 128),
    then the engine's load (`prepare_fp8_moe_layer_for_deepgemm`)."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    codes, scales = (part.unflatten(0, (len(master), -1)) for part in vllm_cast(master.flatten(0, 1)))
    block = (quant_fp8.BLOCK, quant_fp8.BLOCK)
    return deepgemm_post_process_fp8_weight_block(codes, scales, block, use_e8m0=is_deep_gemm_e8m0_used())


def _vllm_experts(x, w13, w2, ids, weights, limit) -> Parts:
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
    from vllm.utils import deep_gemm
    from vllm.zero_mismatch.silu_mul_quant import gated_silu_quant_contiguous

    block = [quant_fp8.BLOCK, quant_fp8.BLOCK]
    codes, scales = moe_kernel_quantize_input(x, None, torch.float8_e4m3fn, False, block)
    codes, scales, ends, place, alignment = deep_gemm_utils.deepgemm_moe_permute(
        codes, scales, ids, local_num_experts=w13[0].shape[0], expert_map=None, expert_tokens_meta=None,
        use_psum_layout=True,
    )
    with deep_gemm.mk_alignment_scope(alignment):
        hidden = x.new_empty(codes.shape[0], w13[0].shape[1])
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes, scales), w13, hidden, ends, use_psum_layout=True)
        acted = gated_silu_quant_contiguous(
            hidden, scale_format=deep_gemm.DeepGemmQuantScaleFMT.from_oracle().name, limit=limit, expert_ends=ends,
            alignment=alignment,
        )
        rows = x.new_empty(codes.shape[0], x.shape[1])
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(acted, w2, rows, ends, use_psum_layout=True)
    out = torch.empty_like(x)
    deep_gemm_utils.deepgemm_unpermute_and_reduce(rows, ids, weights, place, None, out)
    return Parts(out, hidden, rows, place)


VLLM = ExpertKernels(vllm_operand, _vllm_experts)


def _blocks(counts: list[int], row_bytes: int):
    """(experts, their slots in the order by expert, rows of the fullest of them) of each block of experts."""
    size, begin = max(1, BLOCK_BYTES // (max(1, *counts) * row_bytes)), 0
    for first in range(0, len(counts), size):
        part = counts[first : first + size]
        yield slice(first, first + len(part)), slice(begin, begin + sum(part)), max(1, *part)
        begin += sum(part)


def _padded(values: torch.Tensor, lie: torch.Tensor, experts: int, most: int) -> torch.Tensor:
    """[rows, N] -> [experts, most, N], row i at place lie[i] of all; zeros elsewhere."""
    return values.new_zeros(experts * most, values.shape[1]).index_copy_(0, lie, values).unflatten(0, (experts, most))


def _block_grads(drows, gate_up, x, w13, w2, limit: float):
    """(dx, dw13, dw2) of a block; drows, x: [experts, most, H], gate_up: [experts, most, 2 * I], zero where padded."""
    dw2 = product(drows.mT, swiglu.product(gate_up, limit).to(x.dtype))
    dhidden = swiglu.product_grad(gate_up, product(drows, w2), limit)
    return product(dhidden, w13), product(dhidden.mT, x), dw2


class _GroupedFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, x, w13, w2, weights, ids, limit, cache, guard):
        ctx.masters = Masters(guard, w13=w13, w2=w2)
        ctx.limit = limit
        operands = [
            kernels.operand(w.detach()) if cache is None else cache.get(w, kernels.operand) for w in (w13, w2)
        ]
        parts = kernels.experts(x.detach(), *operands, ids, weights.detach(), limit)
        ctx.save_for_backward(x, w13, w2, weights, ids, parts.hidden, parts.rows, parts.place)
        return parts.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        x, w13, w2, weights, ids, hidden, rows, place = ctx.saved_tensors
        flat = ids.flatten()
        live = (flat >= 0).nonzero().squeeze(1)
        order = live[torch.argsort(flat[live], stable=True)]  # slots by expert, then by token
        expert = flat[order].long()
        counts = torch.bincount(expert, minlength=len(w13))
        rank = torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[expert]
        dw13, dw2, dweights = torch.empty_like(w13), torch.empty_like(w2), torch.zeros_like(weights).flatten()
        slots = x.new_zeros(flat.numel(), x.shape[1])
        for experts, part, most in _blocks(counts.tolist(), x.shape[1] * x.element_size()):
            own, lie = order[part], (expert[part] - experts.start) * most + rank[part]
            token, at = own // ids.shape[1], place.flatten()[own].long()
            dout, among = wide(grad[token]), (lie, experts.stop - experts.start, most)
            dweights[own] = (dout * wide(rows[at])).sum(-1)
            drows = (dout * weights.flatten()[own, None]).to(x.dtype)
            slabs = (_padded(values, *among) for values in (drows, hidden[at], x[token]))
            dslots, dw13[experts], dw2[experts] = _block_grads(*slabs, w13[experts], w2[experts], ctx.limit)
            slots[own] = dslots.flatten(0, 1)[lie]
        dx = slots.view(*ids.shape, -1).sum(1, dtype=wide(x).dtype).to(x.dtype)
        return None, dx, dw13, dw2, dweights.view_as(weights), None, None, None, None


def grouped_fp8(
    kernels: ExpertKernels, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
    ids: torch.Tensor, limit: float, *, cache: OperandCache | None = None, guard: WeightGuard | None = None,
) -> torch.Tensor:
    """[T, H]: each token through its experts, weighted and summed; see the module."""
    experts, double, hidden = w13.shape
    if w2.shape != (experts, hidden, double // 2) or x.shape[-1] != hidden or ids.shape != weights.shape:
        raise ValueError(
            f"grouped_fp8: found x {tuple(x.shape)}, w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}, weights "
            f"{tuple(weights.shape)}, ids {tuple(ids.shape)}; expected [T, H], [E, 2I, H], [E, H, I], [T, S], [T, S]"
        )
    if ids.dtype != torch.int32 or (kernels is not EXACT and weights.dtype != torch.float32):
        raise ValueError(
            f"grouped_fp8: found ids {ids.dtype} and weights {weights.dtype}, expected int32 and float32 as the router "
            "gives them"
        )
    if kernels is not EXACT:
        quant_fp8.check_blocks("grouped_fp8", w13)
        quant_fp8.check_blocks("grouped_fp8", w2)
    return _GroupedFp8.apply(kernels, x, w13, w2, weights, ids, limit, cache, guard)
