"""The KV compressor: groups of tokens pooled into one K row, by a softmax over the group in every column.

    s[t] = score[t] + ape[p mod ratio];   row = RMSNorm(sum_t softmax_t(s)[t] * kv[t]) * w, turned at the group's start

ratio 128: a group is 128 tokens and kv, score have D columns. ratio 4: they have 2 D; a row pools the 4 tokens of its
group by their last D columns and the 4 tokens before them by their first D (none before the first group). The row then
makes the trip through the FP8 cache (`kv_fp8`). Tokens after a sequence's last whole group give no row.

Invariant: rows are the engine's. A row is written by its own programs from the fp32 states of its own tokens, by one
kernel in prefill and decode (nvidia/ops/sparse_attn_compress_cutedsl.py); the states are written by one kernel as well.

Backward: the formula is run again in PyTorch, in fp32, and differentiated there; the trip through the cache counts as
the identity. Softmax and mean are written out: in the engine's process torch.softmax is replaced by a kernel without a
derivative (determinism/batch_invariant.py:1357). Gradients reach kv_score, ape and w; layout, cos_sin, eps, kernel and
guard get None.

kv_score: [T, 2 * c * D] fp32, kv first, c = 2 if ratio is 4 else 1; ape: [ratio, c * D] fp32; w: [D]
-> rows [sum of length // ratio, D] bf16, sequence after sequence. Upstream: vllm/models/deepseek_v4/compressor.py.
"""
from types import SimpleNamespace

import torch

from . import kv_fp8
from .masters import Masters
from .packing import Packed, wide
from .rotary import rotate

STATE_PAGE = {4: 4, 128: 8}  # tokens of a page of states; the C128 kernel is written for 8 (compressor.py:165)


def pooled(kv_score, ape, weight, packed: Packed, cos_sin, ratio: int, eps: float) -> torch.Tensor:
    """The formula: [rows, D] in the wide type, turned, not rounded and not quantised."""
    starts = row_positions(packed, ratio)
    first = torch.cat([torch.full((length // ratio,), begin) for (begin, _), length in
                       zip(packed.bounds, packed.lengths, strict=True)]).to(packed.device)
    tokens = (first + starts)[:, None] + torch.arange(ratio, device=packed.device)
    # index_select: no token is in two groups, so its gradient adds nothing to anything
    part = wide(kv_score).index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
    kv, score = part.chunk(2, -1)
    score = score + wide(ape)
    if ratio == 4:
        kv, score = (_with_previous(t, starts == 0, fill) for t, fill in ((kv, 0.0), (score, float("-inf"))))
    e = torch.exp(score - score.detach().amax(1, keepdim=True))
    row = (e * kv).sum(1) / e.sum(1)
    row = row * torch.rsqrt(row.square().sum(-1, keepdim=True) / row.shape[-1] + eps) * wide(weight)
    return rotate(row, starts, cos_sin)


def _with_previous(x: torch.Tensor, none: torch.Tensor, fill: float) -> torch.Tensor:
    """[G, 4, 2 D] -> [G, 8, D]: the previous group's first D columns, then this group's last D. none: [G], the first
    groups of their sequences, which have `fill` before them."""
    first, last = x.chunk(2, -1)
    return torch.cat([first.roll(1, 0).masked_fill(none[:, None, None], fill), last], 1)


def row_positions(packed: Packed, ratio: int) -> torch.Tensor:
    """[rows] int64: the position at which each row is turned, its group's first."""
    return torch.cat([torch.arange(length // ratio) * ratio for length in packed.lengths]).to(packed.device)


def count(packed: Packed, ratio: int) -> int:
    return sum(length // ratio for length in packed.lengths)


def reference(kv_score, ape, weight, packed: Packed, cos_sin, ratio: int, eps: float) -> torch.Tensor:
    row = pooled(kv_score, ape, weight, packed, cos_sin, ratio, eps)
    return kv_fp8.through_cache(row, cos_sin.shape[-1])


class States:
    """Where the engine's kernels find a packed batch: pages of states a sequence, and one slot a compressed row."""

    def __init__(self, packed: Packed, ratio: int, width: int):
        page, device = STATE_PAGE[ratio], packed.device
        pages = [-(-length // page) for length in packed.lengths]
        first = [sum(pages[:i]) for i in range(len(pages))]
        lengths = torch.tensor(packed.lengths, device=device)
        self.page = page
        self.cache = torch.zeros(sum(pages), page, width, dtype=torch.float32, device=device)
        column = torch.arange(max(pages), dtype=torch.int32, device=device)
        self.table = torch.tensor(first, dtype=torch.int32, device=device)[:, None] + column
        self.request = torch.arange(len(pages), dtype=torch.int32, device=device).repeat_interleave(lengths)
        self.slots = torch.tensor(first, device=device).repeat_interleave(lengths) * page + packed.positions
        base = [sum(length // ratio for length in packed.lengths[:i]) for i in range(len(pages))]
        row = torch.tensor(base, device=device).repeat_interleave(lengths) + packed.positions // ratio
        self.row_slots = torch.where((packed.positions + 1) % ratio == 0, row, -1)


def write_rows(kernel, kv_score, ape, weight, packed, cos_sin, ratio, eps, cache, dim, quant, overlap) -> None:
    """Upstream's two steps into `cache`: states (DeepseekCompressor.forward), then compress, norm, turn and store."""
    from vllm.models.deepseek_v4.common.ops.save_partial_states import _SAVE_PARTIAL_STATES_KERNEL

    kv, score = kv_score.chunk(2, -1)
    states = States(packed, ratio, kv_score.shape[1])
    _SAVE_PARTIAL_STATES_KERNEL(
        kv=kv, score=score, ape=ape, positions=packed.positions, state_cache=states.cache, slot_mapping=states.slots,
        block_size=states.page, state_width=kv.shape[1], compress_ratio=ratio, pdl_kwargs={"launch_pdl": False},
    )
    kernel(
        state_cache=states.cache, num_actual=packed.tokens, token_to_req_indices=states.request,
        positions=packed.positions, slot_mapping=states.slots, block_table=states.table, block_size=states.page,
        state_width=kv.shape[1], cos_sin_cache=cos_sin, kv_cache=cache,
        k_cache_metadata=SimpleNamespace(slot_mapping=states.row_slots), pdl_kwargs={"launch_pdl": False},
        head_dim=dim, rope_head_dim=cos_sin.shape[-1], compress_ratio=ratio, overlap=overlap, use_fp4_cache=False,
        rms_norm_weight=weight, rms_norm_eps=eps, **quant,
    )


def vllm(kv_score, ape, weight, packed: Packed, cos_sin, ratio: int, eps: float) -> torch.Tensor:
    from vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl import _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL

    dim, rows = weight.shape[0], count(packed, ratio)
    cache = kv_fp8.private_cache(rows, kv_score.device, ratio)
    quant = {"quant_block": kv_fp8.GROUP, "token_stride": 576, "scale_dim": 8}
    write_rows(_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL, kv_score, ape, weight, packed, cos_sin, ratio, eps, cache, dim,
               quant, ratio == 4)
    return kv_fp8.read_back(cache, rows, dim)


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, kv_score, ape, weight, packed, cos_sin, ratio, eps, guard):
        ctx.masters = Masters(guard, ape=ape, norm=weight)
        ctx.save_for_backward(kv_score, ape, weight, cos_sin)
        ctx.rest = packed, ratio, eps
        return kernel(kv_score.detach(), ape.detach(), weight.detach(), packed, cos_sin, ratio, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        *tensors, cos_sin = ctx.saved_tensors
        packed, ratio, eps = ctx.rest
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            row = pooled(*leaves, packed, cos_sin, ratio, eps)
        return None, *torch.autograd.grad(row, leaves, wide(grad)), None, None, None, None, None


def compress(kernel, kv_score, ape, weight, packed: Packed, cos_sin, ratio: int, eps: float, guard=None):
    """[rows, D] bf16; with no whole group in the batch, no rows and no gradient."""
    if ratio not in STATE_PAGE or ape.shape[0] != ratio:
        raise ValueError(f"compress: found ratio {ratio}, ape {tuple(ape.shape)}; expected 4 or 128, [ratio, c * D]")
    if not count(packed, ratio):
        return kv_score.new_zeros(0, weight.shape[0], dtype=weight.dtype)
    return _Compress.apply(kernel, kv_score, ape, weight, packed, cos_sin, ratio, eps, guard)
