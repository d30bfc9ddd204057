"""FlashMLA's two sparse kernels over a `Scene`, for the test and the benchmark of the KV gather."""
import torch
from kv_scene import HEAD_DIM, Scene

HEADS, SCALE = 64, HEAD_DIM**-0.5


def queries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(count, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16).cuda()
    return q, torch.randn(HEADS, generator=generator).cuda()


def attend(q, sink, rows, indices, lengths) -> torch.Tensor:
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    out = torch.empty_like(q)
    flash_mla_sparse_fwd(
        q=q, kv=rows.view(-1, 1, HEAD_DIM), indices=indices.unsqueeze(1), sm_scale=SCALE, attn_sink=sink,
        topk_length=lengths, out=out,
    )
    return out


def stock_decode(case: Scene, q: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """deepseek_v4/nvidia/flashmla.py _forward_decode."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    slots = lengths = None
    if case.topk:
        page, count = case.topk.cache.shape[1], (case.positions + 1) // case.ratio
        local = case.topk.local if case.topk.local is not None else torch.arange(case.top_k, device="cuda").int()
        local = local.expand(len(q), -1)
        lengths = count.clamp(max=case.top_k).int()
        live = torch.arange(case.top_k, device="cuda") < lengths[:, None]
        logical = (local.clamp(min=0) // page).clamp(max=case.topk.block_table.shape[1] - 1).long()
        pages = case.topk.block_table[case.request[:, None].long(), logical]
        slots = torch.where(live, pages * page + local % page, -1).int().unsqueeze(1)
    out, _ = flash_mla_with_kvcache(
        q=q.unsqueeze(1), k_cache=case.window.cache.unsqueeze(-2), block_table=None, head_dim_v=HEAD_DIM,
        tile_scheduler_metadata=get_mla_metadata()[0], cache_seqlens=None, is_fp8_kvcache=True,
        indices=case.window.slots.unsqueeze(1), topk_length=case.window.lengths, softmax_scale=SCALE, attn_sink=sink,
        extra_k_cache=case.topk.cache.unsqueeze(-2) if case.topk else None, extra_indices_in_kvcache=slots,
        extra_topk_length=lengths,
    )
    return out.squeeze(1)
