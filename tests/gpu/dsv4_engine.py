"""DeepSeek-V4's operators as the engine calls them, over shuffled pages, to compare the trainer's operators with.

Nothing here goes through the trainer's package. Weights come quantised by the plain PyTorch cast, on the CPU.
"""
from types import SimpleNamespace

import torch

DEVICE = "cuda"
BLOCK = [128, 128]


def linear(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A block-FP8 layer loaded from a checkpoint and called: the engine's kernel class, from load to product."""
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    kernel = DeepGemmFp8BlockScaledMMKernel(
        FP8ScaledMMLinearLayerConfig(
            weight_quant_key=kFp8Static128BlockSym, activation_quant_key=kFp8Dynamic128Sym,
            weight_shape=tuple(codes.shape), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
        )
    )
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(codes.to(DEVICE), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scales.to(DEVICE), requires_grad=False)
    layer.weight_block_size = BLOCK
    kernel.process_weights_after_loading(layer)
    return kernel.apply_weights(layer, x)


def experts(x, w13, w2, weights, ids, limit: float) -> torch.Tensor:
    """DeepGemmExperts.apply on loaded weights; w13, w2: (codes, scales)."""
    from vllm.model_executor.layers.fused_moe import config as moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    w13, s13, w2, s2 = (t.to(DEVICE) for t in (*w13, *w2))
    w13, w2, s13, s2 = fp8_utils.prepare_fp8_moe_layer_for_deepgemm(w13, w2, s13, s2, tuple(BLOCK))
    count, double, hidden = w13.shape
    config = moe.FusedMoEConfig(
        num_experts=count, experts_per_token=ids.shape[1], hidden_dim=hidden, intermediate_size=double // 2,
        num_local_experts=count, num_logical_experts=count, activation=MoEActivation.SILU, device=DEVICE,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(), in_dtype=torch.bfloat16,
        routing_method=moe.RoutingMethodType.TopK,
    )
    quant = moe.fp8_w8a8_moe_quant_config(
        w1_scale=s13, w2_scale=s2, block_shape=BLOCK, gemm1_clamp_limit=limit
    )
    layer = DeepGemmExperts(config, quant)
    codes, scales = fp8_utils.per_token_group_quant_fp8(x, 128)
    shapes = layer.workspace_shapes(
        len(x), double, hidden, ids.shape[1], count, count, None, MoEActivation.SILU
    )
    first, second, out = (torch.empty(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    layer.apply(
        out, codes, w13, w2, weights, ids, MoEActivation.SILU, count, None, scales, None, first, second, None, False
    )
    return out


class Pages:
    """A paged cache of one kind for several requests, pages handed out in a shuffled order."""

    def __init__(self, rows: list[int], page: int, width: int, dtype=torch.uint8, alignment=576, seed=0):
        counts = [max(1, -(-n // page)) for n in rows]
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).int()
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for i, n in enumerate(counts):
            table[i, :n] = order[sum(counts[:i]) :][:n]
        stride = -(-page * width * dtype.itemsize // alignment) * alignment // dtype.itemsize
        flat = torch.zeros(len(order) * stride, dtype=dtype, device=DEVICE)
        self.cache = flat.as_strided((len(order), page, width), (stride, width, 1))
        self.page, self.table = page, table.to(DEVICE)

    def slots(self, request: int, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(DEVICE)
        return self.table[request, rows // self.page].long() * self.page + rows % self.page


def token_slots(pages: Pages, lengths, ratio: int = 1) -> torch.Tensor:
    """[tokens] int64: a slot for each token (ratio 1), or for the last token of each group, -1 elsewhere."""
    parts = []
    for request, n in enumerate(lengths):
        p = torch.arange(n, device=DEVICE)
        slot = pages.slots(request, (p // ratio).clamp(max=max(0, n // ratio - 1)))  # no row behind the last group
        parts.append(torch.where((p + 1) % ratio == 0, slot, -1))
    return torch.cat(parts)


def gather_rows(pages: Pages, request: int, rows: int, out: torch.Tensor, offset: int) -> None:
    from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache

    length = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    dequantize_and_gather_k_cache(
        out, pages.cache, seq_lens=length, gather_lens=length, block_table=pages.table[request : request + 1].clone(),
        block_size=pages.page, offset=offset,
    )


def compress(kv_score, ape, norm, lengths, positions, cos_sin, ratio: int, eps: float, head_dim: int) -> Pages:
    """DeepseekCompressor.forward and _compress_norm_rope_store over shuffled pages; head_dim 512, or 128 (indexer)."""
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
    from vllm.models.deepseek_v4.common.ops.save_partial_states import _SAVE_PARTIAL_STATES_KERNEL

    state_page = 4 if ratio == 4 else 8
    states = Pages(list(lengths), state_page, kv_score.shape[1], torch.float32, seed=1)
    width = kv_score.shape[1] // 2
    kv, score = kv_score.split([width, width], dim=-1)
    slots = token_slots(states, lengths)
    _SAVE_PARTIAL_STATES_KERNEL(
        kv=kv, score=score, ape=ape, positions=positions, state_cache=states.cache, slot_mapping=slots,
        block_size=state_page, state_width=width, compress_ratio=ratio, pdl_kwargs={"launch_pdl": False},
    )
    if head_dim == 512:
        from vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl import (
            _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL as store,
        )

        keys, sizes = Pages([n // ratio for n in lengths], 256 // ratio, 584, seed=2), (64, 576, 8)
    else:
        store = compress_norm_rope_store_triton
        keys, sizes = Pages([n // ratio for n in lengths], 256 // ratio, head_dim + 4, seed=2), (128, 128, 4)
    request = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]).to(DEVICE)
    store(
        state_cache=states.cache, num_actual=len(kv_score), token_to_req_indices=request, positions=positions,
        slot_mapping=slots, block_table=states.table, block_size=state_page, state_width=width, cos_sin_cache=cos_sin,
        kv_cache=keys.cache, k_cache_metadata=SimpleNamespace(slot_mapping=token_slots(keys, lengths, ratio)),
        pdl_kwargs={"launch_pdl": False}, head_dim=head_dim, rope_head_dim=64, compress_ratio=ratio,
        overlap=ratio == 4, use_fp4_cache=False, rms_norm_weight=norm, rms_norm_eps=eps, quant_block=sizes[0],
        token_stride=sizes[1], scale_dim=sizes[2],
    )
    return keys


def prefill(q, window: Pages, keys: Pages | None, chosen, lengths, sink, ratio: int, top_k: int) -> torch.Tensor:
    """DeepseekV4FlashMLAAttention._forward_prefill, one request at a time; chosen: [tokens, top_k] int32."""
    from vllm.models.deepseek_v4.common.ops import combine_topk_swa_indices
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    out, first = torch.empty_like(q), 0
    for request, n in enumerate(lengths):
        rows = n // ratio if keys else 0
        kv = torch.zeros(1, rows + n, q.shape[2], dtype=torch.bfloat16, device=DEVICE)
        if rows:
            gather_rows(keys, request, rows, kv, 0)
        gather_rows(window, request, n, kv, rows)
        length = torch.tensor([n], dtype=torch.int32, device=DEVICE)
        part = slice(first, first + n)
        indices, counts = combine_topk_swa_indices(
            chosen[part].contiguous(), torch.tensor([0, n], dtype=torch.int32, device=DEVICE), length, length, 128,
            ratio, top_k, rows + n, rows,
        )
        flash_mla_sparse_fwd(
            q=q[part], kv=kv.view(-1, 1, q.shape[2]), indices=indices.unsqueeze(1), sm_scale=q.shape[2] ** -0.5,
            attn_sink=sink, topk_length=counts, out=out[part],
        )
        first += n
    return out


def choose(q, head_weights, keys: Pages, lengths, positions, cos_sin, top_k: int) -> torch.Tensor:
    """The indexer's prefill over the whole batch in one call: quantised queries, gathered keys, scores, Top-K."""
    from vllm import _custom_ops as ops
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits
    from vllm.zero_mismatch import topk

    heads, dim = q.shape[1:]
    codes, weights = fused_indexer_q_rope_quant(positions, q, cos_sin, head_weights, dim**-0.5, heads**-0.5)
    rows = [n // 4 for n in lengths]
    k_codes = torch.empty(sum(rows), dim, dtype=torch.float8_e4m3fn, device=DEVICE)
    k_scales = torch.empty(sum(rows), 4, dtype=torch.uint8, device=DEVICE)
    bounds = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32, device=DEVICE)
    ops.cp_gather_indexer_k_quant_cache(keys.cache, k_codes, k_scales, keys.table, bounds)
    starts = torch.cat([torch.full((n,), sum(rows[:i])) for i, n in enumerate(lengths)]).int().to(DEVICE)
    counts = ((positions + 1) // 4).int()
    scores = fp8_fp4_mqa_logits(
        (codes, None), (k_codes, k_scales.view(torch.float32).squeeze(-1)), weights, starts, starts + counts, max(rows)
    )
    out = torch.empty(len(q), top_k, dtype=torch.int32, device=DEVICE)
    scratch = torch.empty(topk.scratch_shape(scores.shape[1]), dtype=torch.int32, device=DEVICE)
    return topk.top_k(scores, counts, out, scratch)
