"""Sparse decode attention through the prefill's arithmetic: gather, dequantise, `flash_mla_sparse_fwd`.

Invariant: a query at position p gets the same output bits whether p is decoded, prefilled, prefilled in chunks or
reached after a prefix hit. It holds because both phases feed one kernel with one row list: the top-k part first
(`min((p + 1) // ratio, top_k)` rows, in the indexer's order), then the sliding window by ascending position, then -1.
The prefill builds that list in `combine_topk_swa_indices` (deepseek_v4/common/ops/cache_utils.py); stock decode reads
the FP8 cache with another kernel, the window first, in splits planned from its batch
(deepseek_v4/nvidia/flashmla.py:248).
`flash_mla_sparse_fwd` gives each query its own thread blocks and walks that query's list only, so neighbours, the width
of the index tensor and the place of a row in memory do not enter its arithmetic. Queries are therefore independent,
and running them in slices of a fixed size changes nothing either.

Dequantisation is exact, hence equal to the prefill's by construction: e4m3 has 4 significant bits, the scale is a
power of two, so `fp8 * 2**(e - 127)` is representable in BF16 and no order or rounding is left to choose.

`prefill_decode.py` calls this from the engine. Nothing here allocates or reads a value back to the host.
"""
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

HEAD_DIM = 512
# Rows of one program. It divides every top-k width and the window; rows are independent, so it fixes no order.
ROWS = 16
NUM_WARPS = 4
# `flash_mla_sparse_fwd` wants index lists in multiples of 128 (two blocks of 64); the prefill pads to the same.
LIST_ALIGNMENT = 128


@dataclass(frozen=True)
class Record:
    """How one token's K row of 512 lies in a page of the FP8 cache."""

    bytes_per_token: int  # last dimension of the cache tensor; identifies the record
    fp8_dim: int  # leading dims stored as e4m3; the rest is BF16
    group: int  # dims that share one UE8M0 scale
    interleaved: bool  # scales follow each token's data; otherwise they follow all data of the page

    @property
    def data_bytes(self) -> int:
        return self.fp8_dim + 2 * (HEAD_DIM - self.fp8_dim)

    @property
    def scale_bytes(self) -> int:
        return self.bytes_per_token - self.data_bytes

    @property
    def token_stride(self) -> int:
        return self.bytes_per_token if self.interleaved else self.data_bytes

    @property
    def scale_stride(self) -> int:
        return self.bytes_per_token if self.interleaved else self.scale_bytes

    def scale_base(self, page_tokens: int) -> int:
        return self.data_bytes if self.interleaved else page_tokens * self.data_bytes


RECORDS = {
    584: Record(584, fp8_dim=448, group=64, interleaved=False),  # V4: 448 NoPE in FP8, 64 RoPE in BF16
    528: Record(528, fp8_dim=512, group=32, interleaved=True),  # V4.1: all 512 dims in FP8
}


def record_of(cache: torch.Tensor) -> Record:
    """The record of `cache: [pages, page_tokens, bytes_per_token] uint8`."""
    record = RECORDS.get(cache.shape[-1])
    if record is None or cache.dtype != torch.uint8:
        raise ValueError(
            f"batch-invariant sparse decode reads uint8 records of {sorted(RECORDS)} bytes per token; found "
            f"{cache.shape[-1]} of {cache.dtype}. Set kv_cache_dtype to 'fp8_ds_mla'."
        )
    return record


@triton.jit
def _row(
    cache_ptr, page, offset, live, out_ptr,
    PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SCALE_BASE: tl.constexpr,
    FP8_DIM: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):
    """Dequantise one row a lane from (page, offset) to `out_ptr: [ROWS, 1, 1]`, where live."""
    GROUPS: tl.constexpr = DIM // GROUP
    token = cache_ptr + page.to(tl.int64) * PAGE_STRIDE + offset * TOKEN_STRIDE
    scales = cache_ptr + page.to(tl.int64) * PAGE_STRIDE + SCALE_BASE + offset * SCALE_STRIDE
    group = tl.arange(0, GROUPS)[None, :, None]
    lane = tl.arange(0, GROUP)[None, None, :]
    column = group * GROUP + lane
    quantised = live[:, None, None] & (group * GROUP < FP8_DIM)
    code = tl.load(token[:, None, None] + column, mask=quantised, other=0)
    exponent = tl.load(scales[:, None, None] + group, mask=quantised, other=0)
    # The exponent byte moved into the fp32 exponent field is the scale itself.
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(out_ptr[:, None, None] + column, value.to(tl.bfloat16), mask=quantised)
    if FP8_DIM < DIM:
        tail = tl.arange(0, DIM - FP8_DIM)[None, :]
        source = (token + FP8_DIM).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(source[:, None] + tail, mask=live[:, None], other=0.0)
        tl.store(out_ptr[:, None] + FP8_DIM + tail, rope, mask=live[:, None])


@triton.jit
def _gather_kernel(
    rows_ptr,  # [tokens, WIDTH, DIM] bf16, out
    indices_ptr,  # [tokens, WIDTH] int32, out
    lengths_ptr,  # [tokens] int32, out
    positions_ptr,  # [tokens] int64
    request_ptr,  # [tokens] int32
    topk_ptr, topk_stride,  # [tokens, >= TOP_K] int32; unused without HAS_LIST
    topk_cache_ptr, topk_table_ptr, topk_table_stride,
    window_ptr, window_stride, window_len_ptr,  # slots of the window, ascending by position
    window_cache_ptr,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, HAS_LIST: tl.constexpr, WIDTH: tl.constexpr,
    TOPK_PAGE: tl.constexpr, TOPK_PAGE_STRIDE: tl.constexpr, TOPK_SCALE_BASE: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, WINDOW_PAGE_STRIDE: tl.constexpr, WINDOW_SCALE_BASE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, FP8_DIM: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):
    token = tl.program_id(0)
    tile = tl.program_id(1)
    window_len = tl.load(window_len_ptr + token)
    topk_len = 0
    if TOP_K > 0:
        # A padding token has an empty window; its list is empty and the attention writes zeros.
        by_position = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, TOP_K).to(tl.int32)
        topk_len = tl.where(window_len > 0, by_position, 0)
    length = topk_len + window_len
    lane = tl.arange(0, ROWS)
    column = tile * ROWS + lane
    first_row = token.to(tl.int64) * WIDTH
    slots = window_ptr + token.to(tl.int64) * window_stride
    # The window's rows are listed behind the top-k part, whichever tile copies them. One without a slot stays masked.
    in_window = (column >= topk_len) & (column < length)
    listed = (column < length) & (tl.load(slots + column - topk_len, mask=in_window, other=0) >= 0)
    if tile * ROWS < TOP_K:
        live = column < topk_len
        if HAS_LIST:
            local = tl.load(topk_ptr + token.to(tl.int64) * topk_stride + column, mask=live, other=0)
            # An entry the indexer failed to fill stays masked, as in the prefill of V4.1.
            listed = listed & (local >= 0)
            live = live & (local >= 0)
        else:
            local = column
        request = tl.load(request_ptr + token).to(tl.int64)
        page = tl.load(topk_table_ptr + request * topk_table_stride + local // TOPK_PAGE, mask=live, other=0)
        out = rows_ptr + (first_row + column) * DIM
        _row(
            topk_cache_ptr, page, local % TOPK_PAGE, live, out, TOPK_PAGE_STRIDE, TOKEN_STRIDE, SCALE_STRIDE,
            TOPK_SCALE_BASE, FP8_DIM, GROUP, DIM,
        )
    else:
        place = column - TOP_K
        live = place < window_len
        slot = tl.load(slots + place, mask=live, other=0)
        live = live & (slot >= 0)
        out = rows_ptr + (first_row + topk_len + place) * DIM
        _row(
            window_cache_ptr, slot // WINDOW_PAGE, slot % WINDOW_PAGE, live, out, WINDOW_PAGE_STRIDE, TOKEN_STRIDE,
            SCALE_STRIDE, WINDOW_SCALE_BASE, FP8_DIM, GROUP, DIM,
        )
    tl.store(indices_ptr + first_row + column, tl.where(listed, (first_row + column).to(tl.int32), -1))
    if tile == 0:
        tl.store(lengths_ptr + token, length)


@dataclass(frozen=True)
class Window:
    """The sliding window of each query: `cache: [pages, page_tokens, bytes]`, `slots: [tokens, window]`, `lengths`."""

    cache: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class TopK:
    """The compressed rows of each query. `local: [tokens, width]` are positions in the request's compressed sequence;
    None stands for 0, 1, 2, ... (the ratio-128 layers attend to every compressed row)."""

    cache: torch.Tensor
    block_table: torch.Tensor  # [requests, pages] int32
    local: torch.Tensor | None
    width: int
    ratio: int


def list_width(top_k: int, window: int) -> int:
    return -(-(top_k + window) // LIST_ALIGNMENT) * LIST_ALIGNMENT


def gather(
    rows: torch.Tensor,  # [tokens, width, 512] bf16, out
    indices: torch.Tensor,  # [tokens, width] int32, out: rows of `rows` flattened, -1 after the last
    lengths: torch.Tensor,  # [tokens] int32, out
    positions: torch.Tensor,  # [tokens] int
    request: torch.Tensor,  # [tokens] int32: the request of each token
    window: Window,
    topk: TopK | None,
) -> None:
    """Fill the workspace of one launch; `indices` and `lengths` are what `flash_mla_sparse_fwd` takes."""
    tokens, width, _ = rows.shape
    record = record_of(window.cache)
    top_k = 0 if topk is None else topk.width
    if top_k % ROWS or width % LIST_ALIGNMENT or width < top_k + window.slots.shape[-1]:
        raise ValueError(
            f"the gather takes a top-k width in multiples of {ROWS} and a list of top-k + window rows rounded up to "
            f"{LIST_ALIGNMENT}; found top-k {top_k}, window {window.slots.shape[-1]}, list {width}."
        )
    if topk is None:  # sliding-window layer: the top-k arguments are not read
        cache, table, local, ratio = window.cache, request, request, 1
    else:
        if record_of(topk.cache) != record:
            raise ValueError("the compressed and the window cache hold different FP8 records; use one kv_cache_dtype")
        cache, table, ratio = topk.cache, topk.block_table, topk.ratio
        local = request if topk.local is None else topk.local
    _gather_kernel[(tokens, width // ROWS)](
        rows, indices, lengths, positions, request,
        local, local.stride(0), cache, table, table.stride(0),
        window.slots, window.slots.stride(0), window.lengths, window.cache,
        RATIO=ratio, TOP_K=top_k, HAS_LIST=topk is not None and topk.local is not None, WIDTH=width,
        TOPK_PAGE=cache.shape[1], TOPK_PAGE_STRIDE=cache.stride(0), TOPK_SCALE_BASE=record.scale_base(cache.shape[1]),
        WINDOW_PAGE=window.cache.shape[1], WINDOW_PAGE_STRIDE=window.cache.stride(0),
        WINDOW_SCALE_BASE=record.scale_base(window.cache.shape[1]),
        TOKEN_STRIDE=record.token_stride, SCALE_STRIDE=record.scale_stride, FP8_DIM=record.fp8_dim,
        GROUP=record.group, DIM=HEAD_DIM, ROWS=ROWS, num_warps=NUM_WARPS,
    )


def gather_reference(
    positions: torch.Tensor, request: torch.Tensor, window: Window, topk: TopK | None, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain PyTorch: (rows, indices, lengths) of `gather`. Rows that no index names are zero."""
    tokens = positions.shape[0]
    rows = torch.zeros(tokens, width, HEAD_DIM, dtype=torch.bfloat16)
    indices = torch.full((tokens, width), -1, dtype=torch.int32)
    lengths = torch.zeros(tokens, dtype=torch.int32)
    for t in range(tokens):
        n = int(window.lengths[t])
        cached = [_window_row(window, int(slot)) for slot in window.slots[t, :n]]
        if topk is not None and n:
            count = min((int(positions[t]) + 1) // topk.ratio, topk.width)
            local = range(count) if topk.local is None else topk.local[t, :count].tolist()
            cached = [_topk_row(topk, int(request[t]), int(row)) for row in local] + cached
        lengths[t] = len(cached)
        for column, row in enumerate(cached):
            if row is not None:
                rows[t, column] = row
                indices[t, column] = t * width + column
    return rows, indices, lengths


def _window_row(window: Window, slot: int) -> torch.Tensor | None:
    return None if slot < 0 else dequantise(window.cache, *divmod(slot, window.cache.shape[1]))


def _topk_row(topk: TopK, request: int, row: int) -> torch.Tensor | None:
    if row < 0:
        return None
    page, offset = divmod(row, topk.cache.shape[1])
    return dequantise(topk.cache, int(topk.block_table[request, page]), offset)


def dequantise(cache: torch.Tensor, page: int, offset: int) -> torch.Tensor:
    """One cached token as 512 BF16 values."""
    record = record_of(cache)
    flat = cache.as_strided((cache.stride(0),), (1,), cache.storage_offset() + page * cache.stride(0))
    data = flat[offset * record.token_stride:][: record.data_bytes]
    scales = flat[record.scale_base(cache.shape[1]) + offset * record.scale_stride:][: record.fp8_dim // record.group]
    values = data[: record.fp8_dim].view(torch.float8_e4m3fn).float().view(-1, record.group)
    head = (values * torch.exp2(scales.float() - 127.0)[:, None]).to(torch.bfloat16).flatten()
    return torch.cat([head, data[record.fp8_dim:].clone().view(torch.bfloat16)])
