"""The lightning indexer of a ratio-4 layer: which compressed rows a query attends to. Frozen: it has no gradient.

    score[t, r] = sum_h w[t, h] relu(q[t, h] . k[r]);   chosen[t] = the K best of the (p + 1) // 4 rows before t

Invariant: the choice, and its order, are the engine's. Every step is its own function: queries through the FP8 linear,
turned and quantised; keys pooled, turned, quantised and written to a private FP8 cache; DeepGEMM's scores, whose rows
depend on the query and its keys alone; the exact Top-K by (score, position), positions descending, -1 last
(vllm/zero_mismatch/topk.py). Sequences are scored one by one and in blocks of queries; neither can change a row.

No gradient reaches its weights or inputs: the choice is a constant of the step (first article, section 4.3). The
weights still belong to the checkpoint, so the guard and the weight sync cover them.

hidden: [T, H] bf16; qr: [T, R] bf16, the normed low-rank query -> chosen [T, K] int32, rows of its own sequence.
Upstream: vllm/models/deepseek_v4/attention.py:900 (DeepseekV4Indexer), layers/sparse_attn_indexer.py:640.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import compressor, kv_fp8, quant_fp8
from .linear_fp8 import Fp8Kernels, OperandCache
from .packing import Packed, wide
from .rotary import rotate

RATIO = 4
FLOOR = 1e-4  # of a query's or a key's largest magnitude, both quantised as one group
BLOCK_SCORES = 1 << 26  # fp32 scores of one block of queries


class IndexerWeights(NamedTuple):
    wq_b: torch.Tensor  # [heads * D, R] bf16, block FP8 in the engine
    weights_proj: torch.Tensor  # [heads, H] bf16
    wkv_wgate: torch.Tensor  # [4 * D, H] bf16
    ape: torch.Tensor  # [4, 2 * D] fp32
    norm: torch.Tensor  # [D] bf16


class IndexerKernels(NamedTuple):
    linear: Fp8Kernels
    mm: Callable  # (x [M, K] bf16, weight [N, K] bf16) -> fp32
    keys: Callable  # (kv_score, ape, norm, packed, cos_sin, eps) -> (codes [rows, D] e4m3, scales [rows] fp32)
    queries: Callable  # (q [T, heads, D], w [T, heads] bf16, positions, cos_sin, factors) -> (codes, w fp32)
    scores: Callable  # (codes [M, heads, D], w, keys, scales, first row, counts [M] int32, width) -> [M, width] fp32
    top_k: Callable  # (scores, counts, K) -> [M, K] int32


@torch.no_grad()
def select(
    kernels: IndexerKernels, hidden, qr, weights: IndexerWeights, packed: Packed, cos_sin, k: int, eps: float,
    cache: OperandCache | None = None,
) -> torch.Tensor:
    dim, heads = weights.norm.shape[0], weights.weights_proj.shape[0]
    operand = (lambda w: kernels.linear.operand(w.detach())) if cache is None else (
        lambda w: cache.get(w, kernels.linear.operand))
    q = kernels.linear.multiply(qr, operand(weights.wq_b)).unflatten(1, (heads, dim))
    head_weights = kernels.mm(hidden, weights.weights_proj).to(hidden.dtype)
    factors = dim**-0.5, heads**-0.5
    codes, head_weights = kernels.queries(q, head_weights, packed.positions, cos_sin, factors)
    chosen = torch.full((packed.tokens, k), -1, dtype=torch.int32, device=hidden.device)
    if not compressor.count(packed, RATIO):
        return chosen
    keys, scales = kernels.keys(
        kernels.mm(hidden, weights.wkv_wgate), weights.ape, weights.norm, packed, cos_sin, eps
    )
    first, counts = 0, ((packed.positions + 1) // RATIO).int()
    for begin, end in packed.bounds:
        rows = (end - begin) // RATIO
        block = max(1, BLOCK_SCORES // max(1, rows))
        for start in range(begin, end if rows else begin, block):  # a sequence without rows chooses none
            part = slice(start, min(start + block, end))
            score = kernels.scores(codes[part], head_weights[part], keys, scales, first, counts[part], rows)
            chosen[part] = kernels.top_k(score, counts[part], k)
        first += rows
    return chosen


def _reference_keys(kv_score, ape, norm, packed, cos_sin, eps):
    row = compressor.pooled(kv_score, ape, norm, packed, cos_sin, RATIO, eps)
    codes, scales = quant_fp8.quantise_rows(row.to(torch.bfloat16), row.shape[-1], FLOOR)
    return codes, scales.squeeze(-1)


def _reference_queries(q, head_weights, positions, cos_sin, factors):
    codes, scales = quant_fp8.quantise_rows(rotate(q, positions, cos_sin).to(torch.bfloat16), q.shape[-1], FLOOR)
    return codes, wide(head_weights) * scales.squeeze(-1) * factors[0] * factors[1]


def _reference_scores(codes, head_weights, keys, scales, first, counts, width):
    rows = slice(first, first + width)
    product = torch.einsum("mhd,rd->mhr", codes.double(), keys[rows].double()).clamp(min=0)
    return torch.einsum("mhr,mh->mr", product, head_weights.double()).float() * scales[rows]


def _reference_top_k(scores, counts, k):
    from vllm.zero_mismatch.topk import top_k_reference

    return top_k_reference(scores, counts, k)


def reference_kernels(linear: Fp8Kernels) -> IndexerKernels:
    """Plain PyTorch; scores in fp64, rounded once. `linear` is linear_fp8's table."""
    return IndexerKernels(
        linear, lambda x, w: (x.double() @ w.double().T).float(), _reference_keys, _reference_queries,
        _reference_scores, _reference_top_k,
    )


def _vllm_mm(x, weight):
    from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32

    return bi_mm_fp32(x, weight)


def _vllm_keys(kv_score, ape, norm, packed, cos_sin, eps):
    from vllm import _custom_ops as ops
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
    from vllm.utils.deep_gemm import mqa_logits_use_mx_scales

    dim, rows, device = norm.shape[0], compressor.count(packed, RATIO), kv_score.device
    cache = kv_fp8.private_cache(rows, device, RATIO, dim + 4)
    quant = {"quant_block": dim, "token_stride": dim, "scale_dim": 4}
    compressor.write_rows(compress_norm_rope_store_triton, kv_score, ape, norm, packed, cos_sin, RATIO, eps, cache, dim,
                          quant, True)
    codes = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(rows, 4, dtype=torch.uint8, device=device)
    table = torch.arange(len(cache), dtype=torch.int32, device=device)[None]
    bounds = torch.tensor([0, rows], dtype=torch.int32, device=device)
    ops.cp_gather_indexer_k_quant_cache(cache, codes, scales, table, bounds)
    return codes, scales.view(torch.int32 if mqa_logits_use_mx_scales() else torch.float32).squeeze(-1)


def _vllm_queries(q, head_weights, positions, cos_sin, factors):
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant

    return fused_indexer_q_rope_quant(positions, q, cos_sin, head_weights, *factors, use_fp4=False)


def _vllm_scores(codes, head_weights, keys, scales, first, counts, width):
    from vllm.model_executor.layers.sparse_attn_indexer import as_fp32_logits
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits, mqa_logits_mx_inputs

    q_scale, head_weights = mqa_logits_mx_inputs(codes, None, head_weights)
    starts = torch.full_like(counts, first)
    scores = fp8_fp4_mqa_logits((codes, q_scale), (keys, scales), head_weights, starts, starts + counts, width)
    return as_fp32_logits(scores, counts)


def _vllm_top_k(scores, counts, k):
    from vllm.zero_mismatch import topk

    out = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    scratch = torch.empty(topk.scratch_shape(scores.shape[1]), dtype=torch.int32, device=scores.device)
    return topk.top_k(scores, counts, out, scratch)


def vllm_kernels(linear: Fp8Kernels) -> IndexerKernels:
    return IndexerKernels(linear, _vllm_mm, _vllm_keys, _vllm_queries, _vllm_scores, _vllm_top_k)
