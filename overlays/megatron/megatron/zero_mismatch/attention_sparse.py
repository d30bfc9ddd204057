"""Sparse attention of DeepSeek-V4 over one list of K rows a query; values are the rows themselves, with a sink.

    l[h, j] = scale * q[h] . k[list[j]];   out[h] = sum_j exp(l[h, j]) k[list[j]] / (sum_j exp(l[h, j]) + exp(sink[h]))

Invariant: the list of a query at position p is the engine's, in the engine's order: min((p + 1) // ratio, K) compressed
rows (the indexer's choice, or 0, 1, 2, ... in the ratio-128 layers), then the window by ascending position. On it
`flash_mla_sparse_fwd` gives a query the same bits in prefill, decode and here, wherever its rows lie in memory
(vllm/zero_mismatch/fp8_kv_gather.py). -1 fills the list up to a multiple of 128.

Backward: the softmax is computed again in fp32 from the listed rows, queries block by block, then

    dp = dout k.T;   dl = p * (dp - dout . out);   dq = scale * dl k;   dk = scale * dl.T q + p.T dout
    dsink = -p_sink * dout . out

dk is added up over the queries that list a row, in fp32 and without atomics, so that two backwards have the same bits.
PyTorch's derivative of an embedding does it: sorts a block's entries by row, stably, adds each row's by tens and then
the tens, or walks up to 3,072 entries in their order (aten/src/ATen/native/cuda: EmbeddingBackwardKernel.cu,
Embedding.cu). Gradients reach q, rows and sink; lists, scale and kernel get None: the choice of rows is a constant, as
the indexer is not trained.

Memory of the backward: a block's gathered rows, its dk and the sums by tens, each up to BLOCK_BYTES (or what one
query's list takes), and two fp32 copies of rows: the total and the block's part of it.

q: [T, heads, D] bf16; rows: [R, D] bf16; indices: [T, W] int32; lengths: [T] int32; sink: [heads] fp32.
Upstream: vllm/models/deepseek_v4/nvidia/flashmla.py:305-422, common/ops/cache_utils.py:752.
"""
import torch

from .batched import product
from .masters import Masters
from .packing import Packed, wide

ALIGNMENT = 128  # flash_mla_sparse_fwd takes lists in multiples of it
BLOCK_BYTES = 1 << 28  # of gathered fp32 rows in one block of the backward


def row_lists(
    packed: Packed, window: int, ratio: int = 0, top_k: int = 0, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices [T, W], lengths [T]) into rows laid out as [compressed rows of every sequence, one row a token].

    ratio 0: a sliding-window layer. `chosen`: [T, top_k] int32 positions in the sequence's compressed rows, the live
    ones first; None stands for 0, 1, 2, ...
    """
    device, positions = packed.device, packed.positions
    compressed = [length // ratio if ratio else 0 for length in packed.lengths]
    base = [sum(compressed[:i]) for i in range(len(compressed))]
    lengths = torch.tensor(packed.lengths, device=device)
    base = torch.tensor(base, device=device).repeat_interleave(lengths)
    top = ((positions + 1) // ratio).clamp(max=top_k) if ratio else torch.zeros_like(positions)
    inside = (positions + 1).clamp(max=window)
    width = -(-(min(top_k, max(compressed)) + window) // ALIGNMENT) * ALIGNMENT
    column = torch.arange(width, device=device)
    listed = column.expand(packed.tokens, -1)
    if chosen is not None:
        listed = torch.nn.functional.pad(chosen, (0, max(0, width - chosen.shape[1])), value=-1)[:, :width].long()
    from_top = torch.where(listed >= 0, listed + base[:, None], -1)
    place = column - top[:, None]
    token = torch.arange(packed.tokens, device=device)[:, None]
    from_window = sum(compressed) + token - inside[:, None] + 1 + place
    indices = torch.where(place < 0, from_top, torch.where(place < inside[:, None], from_window, -1))
    return indices.int(), (top + inside).int()


def _listed(rows, indices, lengths):
    """(the listed rows [C, W, D] in the wide type, [C, W] whether an entry has none) of one block of queries."""
    live = (torch.arange(indices.shape[1], device=rows.device) < lengths[:, None]) & (indices >= 0)
    return wide(rows[indices.clamp(min=0).long()]), ~live


def _softmax(logits, dead, sink):
    """(p [C, heads, W], p_sink [C, heads]); logits: [C, heads, W] in the wide type."""
    logits = logits.masked_fill(dead[:, None], float("-inf"))
    largest = torch.maximum(logits.amax(-1), wide(sink))
    e, e_sink = torch.exp(logits - largest[..., None]), torch.exp(wide(sink) - largest)
    total = e.sum(-1) + e_sink
    return e / total[..., None], e_sink / total


def _by_row(dk, listed, count: int) -> torch.Tensor:
    """[count, D]: what one block's entries add to each row. dk: [C, W, D], 0 where an entry has no row; listed: [C, W]
    int32."""
    listed = listed.flatten()
    # Entries without a row are spread over all of them: in each column one thread adds up a row's tens.
    anywhere = torch.arange(len(listed), device=listed.device, dtype=listed.dtype) % count
    target = torch.where(listed < 0, anywhere, listed)
    return torch.ops.aten.embedding_dense_backward(dk.flatten(0, 1), target, count, -1, False)


def reference(q, rows, indices, lengths, sink, scale: float) -> torch.Tensor:
    """Plain PyTorch, in the wide type, rounded once."""
    k, dead = _listed(rows, indices, lengths)
    p, _ = _softmax(product(wide(q), k.mT) * scale, dead, sink)
    return (p @ k).to(q.dtype)


def vllm(q, rows, indices, lengths, sink, scale: float) -> torch.Tensor:
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    out = torch.empty_like(q)
    flash_mla_sparse_fwd(
        q=q, kv=rows.unsqueeze(1), indices=indices.unsqueeze(1), sm_scale=scale, attn_sink=sink, topk_length=lengths,
        out=out,
    )
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, q, rows, sink, indices, lengths, scale, guard):
        ctx.masters = Masters(guard, attn_sink=sink)
        ctx.save_for_backward(q, rows, sink, indices, lengths)
        ctx.scale = scale
        return kernel(q.detach(), rows.detach(), indices, lengths, sink.detach(), scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        q, rows, sink, indices, lengths = ctx.saved_tensors
        indices = indices[:, : int(lengths.max())]  # behind it no list has a row
        block = max(1, BLOCK_BYTES // (4 * indices.shape[1] * q.shape[2]))
        dq, drows = torch.empty_like(q), torch.zeros_like(wide(rows))
        dsink = torch.zeros_like(wide(sink))
        for start in range(0, len(q), block):
            part = slice(start, start + block)
            k, dead = _listed(rows, indices[part], lengths[part])
            both = wide(torch.cat([q[part], grad[part]], 1))  # each product is made for q and dout at once
            logits, dp = product(both, k.mT).chunk(2, 1)
            p, p_sink = _softmax(logits * ctx.scale, dead, sink)
            along = (p * dp).sum(-1)  # dout . out
            dl = p * (dp - along[..., None]) * ctx.scale
            dq[part] = product(dl, k).to(q.dtype)
            # An entry without a row has p = 0, hence dk = 0.
            drows += _by_row(product(torch.cat([dl, p], 1).mT, both), indices[part], len(rows))
            dsink -= (p_sink * along).sum(0)
        return None, dq, drows.to(rows.dtype), dsink.to(sink.dtype), None, None, None, None


def attend(kernel, q, rows, sink, indices, lengths, scale: float, guard=None) -> torch.Tensor:
    """-> [T, heads, D]. On the GPU heads is 64 or 128 and D is 512."""
    if q.shape[-1] != rows.shape[-1] or sink.shape != q.shape[1:2] or indices.shape[0] != len(q):
        raise ValueError(
            f"attend: found q {tuple(q.shape)}, rows {tuple(rows.shape)}, sink {tuple(sink.shape)}, lists "
            f"{tuple(indices.shape)}; expected [T, heads, D], [R, D], [heads], [T, W]"
        )
    return _Attend.apply(kernel, q, rows, sink, indices, lengths, scale, guard)
