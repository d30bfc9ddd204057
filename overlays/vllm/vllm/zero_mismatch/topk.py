"""Deterministic, exact Top-K for the sparse-attention indexer, in prefill and in decode.

Invariant: the output row is a pure function of the row's own scores and length. It holds because the answer is
unique: positions are ordered by the key (score, position in the request), no two keys are equal, and the K largest are
written by descending position, -1 after them. Whatever finds them (how many CTAs, which pivots, in which order
integer counts arrive) cannot change one bit. Nothing here adds floating-point numbers.

Order of scores: -inf < finite < +inf < NaN, as in torch.sort. -0.0 equals +0.0, because sums of signed zeros make the
sign an accident. Every NaN equals every other, whatever its sign or payload, and ranks first, so that a broken score
is selected and seen instead of vanishing. Ties go to the larger position.

How, for a row of n scores:
  n <= K        every position, descending.
  n <= CAP      one CTA holds all keys and narrows a bracket around the K-th by counting.
  longer        a sample gives a score that about 1.3 to 4 K scores reach; one pass marks those in a bit mask (a bit
                for "above", a bit for "equal"); their positions become a list, which is decided as above. At most K
                equal ones enter the list (the last K), so plateaus cannot overflow it.
  unlucky       the list holds fewer than K or more than CAP: the same search, counting over the row in memory.
"""
import torch
import triton
import triton.language as tl

# LIST           entries of a longer row's list of candidates, and the most scores one CTA decides in registers.
# SLOTS          rows in flight in `scratch`; more rows run in turns.
# SPLIT          the most scores one CTA marks; up to four CTAs share a shorter row.
# TILE           scores marked at a time, 16 a mask word.
# WORDS          mask words read at a time; 16 * WORDS must fit in 16 bits, `_list_marked` packs two counts.
# SAMPLE_LIMITS  widest row: scores its sample holds; 16384 beyond.
# MARK_WARPS     warps of the marking kernel.
# REGISTERS      a thread of the selecting kernel has, so that two CTAs share an SM.
# None of these, nor the sizes chosen by K and width below, can change a result; they are for speed on an H200.
LIST = 8192
SLOTS = 512
SPLIT = 32768
TILE = 4096
WORDS = 2048
SAMPLE_LIMITS = {1 << 16: 2048, 1 << 17: 4096}
MARK_WARPS = 8
REGISTERS = 128

INVALID = tl.constexpr(-0x80000000)  # below the key of -inf
NAN_KEY = tl.constexpr(0x7FFFFFFF)
INF_KEY = tl.constexpr(0x7F800000)
INF = tl.constexpr(float("inf"))


@triton.jit
def _order(x):
    """fp32 -> int32 keys that compare as the scores do."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)
    return tl.where(x != x, NAN_KEY, key)  # noqa: PLR0124  the one test for NaN in Triton


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _popcount16(word):
    word = word - ((word >> 1) & 0x5555)
    word = (word & 0x3333) + ((word >> 2) & 0x3333)
    word = (word + (word >> 4)) & 0x0F0F
    return (word + (word >> 8)) & 0x1F


@triton.jit
def _log2(x):
    """log2 within 0.01; the library's costs more than the rest of a pivot."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return (bits >> 23).to(tl.float32) + fraction * (1.3465 - 0.3465 * fraction)


@triton.jit
def _log_odds(count, population):
    return _log2(count + 0.5) - _log2(population - count + 0.5)


@triton.jit
def _pivots(lo, hi, c_lo, c_hi, wanted, population, step):
    """Two keys in (lo, hi] that bracket the wanted rank: interpolated, with scores taken as linear in the log-odds of
    their rank (exact for a logistic, close for a normal population); every other time by thirds of the key range.
    """
    third = hi // 3 - lo // 3
    a = lo + third
    b = hi - third
    bottom = _value(lo)
    span = _value(hi) - bottom
    if (step % 2 == 0) & (span > 0) & (span < INF):
        slack = 0.8 * tl.sqrt(tl.minimum(c_lo - wanted, wanted - c_hi)) + 0.5
        top_odds = _log_odds(c_lo, population)
        scale = span / (top_odds - _log_odds(c_hi, population))
        a = _order(bottom + scale * (top_odds - _log_odds(tl.minimum(wanted + slack, c_lo), population)))
        b = _order(bottom + scale * (top_odds - _log_odds(tl.maximum(wanted - slack, c_hi), population)))
    a = tl.minimum(tl.maximum(a, lo + 1), hi)
    return a, tl.minimum(tl.maximum(b, a), hi)


@triton.jit
def _narrow(lo, hi, c_lo, c_hi, a, b, c_a, c_b, k):
    """Keep count(>= lo) >= k > count(> hi)."""
    b_reaches = c_b >= k
    a_reaches = c_a >= k
    new_lo = tl.where(b_reaches, b, tl.where(a_reaches, a, lo))
    new_hi = tl.where(b_reaches, hi, tl.where(a_reaches, b, a) - 1)
    new_c_lo = tl.where(b_reaches, c_b, tl.where(a_reaches, c_a, c_lo))
    new_c_hi = tl.where(b_reaches, c_hi, tl.where(a_reaches, c_b, c_a))
    return new_lo, new_hi, new_c_lo, new_c_hi


@triton.jit
def _search(keys, n, population, k, k_most):
    """A bracket with count(>= lo) >= k > count(> hi) that ends when count(>= lo) <= k_most or one key is left.

    keys: the n best of `population` scores, and INVALID.
    """
    lo = tl.min(tl.where(keys == INVALID, NAN_KEY, keys))
    hi = tl.max(keys)
    c_lo = n
    c_hi = n * 0
    step = n * 0
    while (c_lo > k_most) & (lo < hi):
        a, b = _pivots(lo, hi, c_lo, c_hi, (k + k_most) * 0.5, population, step)
        counts = tl.sum((keys >= a).to(tl.int32) + ((keys >= b).to(tl.int32) << 16))
        lo, hi, c_lo, c_hi = _narrow(lo, hi, c_lo, c_hi, a, b, counts & 0xFFFF, counts >> 16, k)
        step += 1
        if step % 4 == 0:  # few distinct keys may be left: shrink the bracket onto them
            inside = (keys >= lo) & (keys <= hi)
            lo, hi = tl.min(tl.where(inside, keys, NAN_KEY)), tl.max(tl.where(inside, keys, INVALID))
    return lo, hi, c_lo, c_hi


@triton.jit
def _emit(out, keys, positions, lo, hi, c_lo, c_hi, K):
    """Write the K largest of keys that lie by ascending position: all above the bracket, the last ones inside it."""
    above = keys > hi
    equal = (keys >= lo) & (keys <= hi)
    seen = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    above_after = c_hi - (seen & 0xFFFF)
    equal_after = c_lo - c_hi - (seen >> 16)
    need = K - c_hi
    keep = above | (equal & (equal_after < need))
    tl.store(out + above_after + tl.minimum(equal_after, need), positions, mask=keep)


@triton.jit
def _load_keys(row, columns, n):
    return tl.where(columns < n, _order(tl.load(row + columns, mask=columns < n, other=0).to(tl.float32)), INVALID)


@triton.jit
def _select_in_memory(row, out, n, K, STEP: tl.constexpr):
    """The search and the writing of `_search` and `_emit` over a row of any length, one tile at a time."""
    columns = tl.arange(0, STEP)
    lowest = tl.full([STEP], NAN_KEY, tl.int32)
    highest = tl.full([STEP], INVALID, tl.int32)
    for first in range(0, n, STEP):
        keys = _load_keys(row, first + columns, n)
        lowest = tl.minimum(lowest, tl.where(keys == INVALID, NAN_KEY, keys))
        highest = tl.maximum(highest, keys)
    lo = tl.min(lowest)
    hi = tl.max(highest)
    c_lo = n
    c_hi = n * 0
    step = n * 0
    while (c_lo > K) & (lo < hi):
        a, b = _pivots(lo, hi, c_lo, c_hi, K * 1.0, n, step)
        reach_a = tl.zeros([STEP], tl.int32)
        reach_b = tl.zeros([STEP], tl.int32)
        for first in range(0, n, STEP):
            keys = _load_keys(row, first + columns, n)
            reach_a += (keys >= a).to(tl.int32)
            reach_b += (keys >= b).to(tl.int32)
        lo, hi, c_lo, c_hi = _narrow(lo, hi, c_lo, c_hi, a, b, tl.sum(reach_a), tl.sum(reach_b), K)
        step += 1
    above_left = c_hi
    equal_left = c_lo - c_hi
    for first in range(0, n, STEP):
        keys = _load_keys(row, first + columns, n)
        tile_above = tl.sum((keys > hi).to(tl.int32))
        tile_equal = tl.sum((keys >= lo).to(tl.int32)) - tile_above
        above_left -= tile_above
        equal_left -= tile_equal
        # Ranks in this tile, counted from its end; what lies after the tile shifts them and uses up the ties.
        shift = above_left + tl.minimum(equal_left, K - c_hi)
        room = tl.maximum(K - c_hi - equal_left, 0)
        _emit(out + shift, keys, first + columns, lo, hi, tile_above + tile_equal, tile_above, tile_above + room)


@triton.jit
def _sampled_score(row, n, K, SAMPLE: tl.constexpr):
    """A score that a little more than K of the row's n scores reach, very probably."""
    index = tl.arange(0, SAMPLE)
    jitter = (index * 40503 >> 4) & 1023  # a place inside each of SAMPLE equal parts of the row
    columns = (index.to(tl.int64) * 1024 + jitter) * n // (SAMPLE * 1024)
    keys = _order(tl.load(row + columns).to(tl.float32))
    expected = K * (SAMPLE * 1.0) / n
    k = tl.minimum(expected + 4.0 * tl.sqrt(expected) + 4.0, SAMPLE * 1.0).to(tl.int32)
    lo, _hi, _c_lo, _c_hi = _search(keys, SAMPLE + n * 0, SAMPLE, k, k + k // 8 + 2)
    return _value(tl.minimum(lo, INF_KEY))


@triton.jit
def _mark(row, words, first, last, n, score, TILE: tl.constexpr):
    """Mask words for scores first..last: 16 bits "above the score, or NaN", 16 bits "equal"."""
    group = tl.arange(0, TILE // 16)
    bit = tl.arange(0, 16)
    for start in range(first, last, TILE):
        columns = start + group[:, None] * 16 + bit[None, :]
        if start + TILE <= n:
            x = tl.load(row + columns).to(tl.float32)
            marks = tl.where(x <= score, tl.where(x == score, 65536, 0), 1)
        else:
            x = tl.load(row + columns, mask=columns < n, other=0).to(tl.float32)
            marks = tl.where(x <= score, tl.where(x == score, 65536, 0), 1)
            marks = tl.where(columns < n, marks, 0)
        tl.store(words + start // 16 + group, tl.sum(marks << bit[None, :], 1), mask=start + group * 16 < n)


@triton.jit
def _list_marked(words, listed, n, K, LIST: tl.constexpr, WORDS: tl.constexpr):
    """Positions of the marked scores, ascending, at the end of `listed[LIST]`; returns how many were marked."""
    above_seen = n * 0
    equal_seen = n * 0
    tiles = tl.cdiv(tl.cdiv(n, 16), WORDS)
    for tile in range(tiles):  # from the last positions to the first
        # One word a lane in turn. With several, every store below would first move its data between threads; the
        # compiler gives accesses of one shape one layout, so nothing else of this shape may look contiguous.
        index = tl.max_contiguous((tiles - 1 - tile) * WORDS + tl.arange(0, WORDS), 1)
        word = tl.load(words + index, mask=index * 16 < n, other=0)
        above = word & 0xFFFF
        equal = (word >> 16) & 0xFFFF
        # A tile may hold 16 * WORDS = 2**15 equal ones: with them in the upper half the sum has all 32 bits.
        both = (_popcount16(above) + (_popcount16(equal) << 16)).to(tl.uint32)
        total = tl.sum(both)
        seen = tl.cumsum(both, 0)
        tile_above = (total & 0xFFFF).to(tl.int32)
        tile_equal = (total >> 16).to(tl.int32)
        above_after = above_seen + tile_above - (seen & 0xFFFF).to(tl.int32)
        equal_after = equal_seen + tile_equal - (seen >> 16).to(tl.int32)
        surplus = tl.maximum(_popcount16(equal) - tl.maximum(K - equal_after, 0), 0)
        for _ in range(tl.max(surplus)):  # only the word where the K-th tie lies drops some of its bits, the lowest
            equal = tl.where(surplus > 0, equal & (equal - 1), equal)
            surplus -= 1
        marked = above | equal
        size = _popcount16(marked)
        slot = LIST - above_after - tl.minimum(equal_after, K) - size
        for _ in range(tl.max(size)):
            lowest = marked & -marked
            place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(listed + slot, index * 16 + place, mask=(marked > 0) & (slot >= 0))
            marked &= marked - 1
            slot += 1
        above_seen += tile_above
        equal_seen += tile_equal
    return above_seen + tl.minimum(equal_seen, K)


@triton.jit
def _decide(row, out, listed, n, count, K, CAP: tl.constexpr, LIST: tl.constexpr, WORDS: tl.constexpr,
            SIZE: tl.constexpr):
    """Choose among `count` <= SIZE candidates held in registers: the whole row, or the end of its list."""
    index = tl.arange(0, SIZE)
    if SIZE == WORDS:
        index = tl.max_contiguous(index, 1)  # see _list_marked
    positions = index - (SIZE - count)
    valid = positions >= 0
    if n > CAP:
        positions = tl.load(listed + LIST - SIZE + index, mask=valid, other=0)
    x = tl.load(row + positions, mask=valid, other=0).to(tl.float32)
    keys = tl.where(valid, _order(x), INVALID)
    lo, hi, c_lo, c_hi = _search(keys, count, n, K, K)
    _emit(out, keys, positions, lo, hi, c_lo, c_hi, K)


@triton.jit
def _bounds(starts, lengths, r, width, NEXT_N: tl.constexpr, HAS_STARTS: tl.constexpr):
    """First column and length of a row; NEXT_N > 1 means one length for NEXT_N draft rows, the last one longest."""
    first = tl.load(starts + r) if HAS_STARTS else 0
    n = tl.load(lengths + r // NEXT_N) - (NEXT_N - 1) + (r % NEXT_N).to(tl.int32)
    if HAS_STARTS:
        n -= first
    return first, tl.maximum(tl.minimum(n, width - first), 0)


@triton.jit(do_not_specialize=["width", "first_row", "K"], do_not_specialize_on_alignment=["lengths"])
def _mark_kernel(logits, lengths, scratch, width, stride, slot_stride, K, first_row, NEXT_N: tl.constexpr,
                 CAP: tl.constexpr, LIST: tl.constexpr, SAMPLE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    r = first_row + slot
    _, n = _bounds(lengths, lengths, r, width, NEXT_N, False)
    first = tl.program_id(1) * SPLIT
    if (n > CAP) & (first < n):
        row = logits + r * stride
        words = scratch + slot * slot_stride + LIST
        _mark(row, words, first, tl.minimum(first + SPLIT, n), n, _sampled_score(row, n, K, SAMPLE), TILE)


@triton.jit(do_not_specialize=["rows", "width", "first_row", "K"],
            do_not_specialize_on_alignment=["starts", "lengths", "out"])
def _select_kernel(logits, starts, lengths, out, scratch, rows, width, stride, out_stride, slot_stride, K, first_row,
                   NEXT_N: tl.constexpr, HAS_STARTS: tl.constexpr, MARK: tl.constexpr,
                   CAP: tl.constexpr, LIST: tl.constexpr, SAMPLE: tl.constexpr, TILE: tl.constexpr,
                   WORDS: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    listed = scratch + slot * slot_stride
    for turn in range(tl.cdiv(rows - first_row - tl.program_id(0), tl.num_programs(0))):
        r = first_row + slot + turn * tl.num_programs(0)
        first, n = _bounds(starts, lengths, r, width, NEXT_N, HAS_STARTS)
        row = logits + r * stride + first
        row_out = out + r * out_stride
        count = n
        if n > CAP:
            if MARK:
                _mark(row, listed + LIST, 0, n, n, _sampled_score(row, n, K, SAMPLE), TILE)
                tl.debug_barrier()
            count = _list_marked(listed + LIST, listed, n, K, LIST, WORDS)
            tl.debug_barrier()
        if n <= K:
            rank = tl.arange(0, LIST // 2)
            tl.store(row_out + rank, tl.where(rank < n, n - 1 - rank, -1), mask=rank < K)
        elif (count < K) | (count > CAP):
            _select_in_memory(row, row_out, n, K, TILE)
        elif count <= 2048:
            _decide(row, row_out, listed, n, count, K, CAP, LIST, WORDS, 2048)
        elif count <= 4096:
            _decide(row, row_out, listed, n, count, K, CAP, LIST, WORDS, 4096)
        else:
            if CAP > 4096:
                _decide(row, row_out, listed, n, count, K, CAP, LIST, WORDS, CAP)
        tl.debug_barrier()  # the next row of this program reuses the slot


@triton.jit
def _fill_all_kernel(out, positions, K, RATIO: tl.constexpr, OUT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = (tl.load(positions + row) + 1) // RATIO
    rank = tl.arange(0, OUT)
    tl.store(out + row * K + rank, tl.where(rank < n, n - 1 - rank, -1), mask=rank < K)


def _cap(k: int) -> int:
    """The most candidates a row is decided from; longer rows are marked first."""
    return 4096 if k <= 1024 else LIST


def _select_options(cap: int) -> dict[str, int]:
    limit = {} if torch.version.hip else {"maxnreg": REGISTERS}
    return {"num_warps": cap // 512, **limit}


def _sample_size(width: int) -> int:
    """Large enough that the list stays between K and _cap(K), very probably, whatever the scores."""
    return next((size for limit, size in SAMPLE_LIMITS.items() if width <= limit), 16384)


def _split_size(width: int) -> int:
    return min(SPLIT, triton.cdiv(width, 4 * TILE) * TILE)


def scratch_shape(width: int) -> tuple[int, int]:
    """int32 shape of the workspace for rows of at most `width` scores: a list and a bit mask for each slot."""
    return SLOTS, LIST + triton.cdiv(width, 256) * 16


def _check(logits, lengths, out, starts, next_n) -> None:
    rows, width = logits.shape
    k = out.shape[1]
    problems = []
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        problems.append(f"logits: found {logits.dtype} with strides {logits.stride()}, expected contiguous rows of "
                        "float32 or bfloat16")
    if out.dtype != torch.int32 or out.shape[0] != rows or out.stride(1) != 1:
        problems.append(f"out: found {out.dtype} {tuple(out.shape)}, expected int32 ({rows}, K)")
    if not 0 < k <= LIST // 4:
        problems.append(f"K: found {k}, expected 1 to {LIST // 4}")
    if lengths.dtype != torch.int32 or lengths.numel() * next_n != rows or not lengths.is_contiguous():
        problems.append(f"lengths: found {lengths.dtype} {tuple(lengths.shape)}, expected {rows // next_n} int32")
    if starts is not None and (starts.dtype != torch.int32 or starts.numel() != rows):
        problems.append(f"starts: found {starts.dtype} {tuple(starts.shape)}, expected {rows} int32")
    if problems:
        raise ValueError("indexer Top-K: " + "; ".join(problems))


def _check_scratch(scratch, width: int) -> None:
    if scratch.dtype != torch.int32 or scratch.dim() != 2 or scratch.shape[1] < scratch_shape(width)[1]:
        raise ValueError(f"indexer Top-K: scratch: found {scratch.dtype} {tuple(scratch.shape)}, expected int32 of at "
                         f"least {scratch_shape(width)[1]} a slot; reserve scratch_shape(largest width)")


def top_k(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor,
          starts: torch.Tensor | None = None, next_n: int = 1, split: bool = False) -> torch.Tensor:
    """Write each row's K best positions, descending, -1 last, into `out: [rows, K] int32`.

    logits: [rows, width] fp32 or bf16; columns outside a row's bounds are never used, whatever they hold.
    lengths: [rows] int32, the row's scores are columns 0..lengths[r]; with `starts: [rows] int32` it is the end column
        and positions count from the start; with next_n > 1 it is [rows / next_n], for the last of next_n draft rows.
    scratch: int32 of scratch_shape(width), any content; unused where the CUDA kernel runs.
    split: several CTAs for a long row (few rows: decode).
    """
    _check(logits, lengths, out, starts, next_n)
    from vllm.zero_mismatch import topk_cuda  # not at the top: this file is also loaded alone, to time its kernels

    if topk_cuda.supports(logits.device):
        return topk_cuda.top_k(logits, lengths, out, starts, next_n, split)
    return triton_top_k(logits, lengths, out, scratch, starts, next_n, split)


def triton_top_k(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor,
                 starts: torch.Tensor | None = None, next_n: int = 1, split: bool = False) -> torch.Tensor:
    """The same by the kernels of this file, on every GPU that Triton knows."""
    _check_scratch(scratch, logits.shape[1])
    (rows, width), k = logits.shape, out.shape[1]
    cap, slots = _cap(k), scratch.shape[0]
    split = split and starts is None and width > cap
    shared = {"NEXT_N": next_n, "CAP": cap, "LIST": LIST, "SAMPLE": _sample_size(width), "TILE": TILE}
    for first in range(0, rows, slots if split else max(rows, 1)):
        last = min(first + slots, rows) if split else rows
        grid = min(last - first, slots)
        if split:
            _mark_kernel[(grid, triton.cdiv(width, _split_size(width)))](
                logits, lengths, scratch, width, logits.stride(0), scratch.stride(0), k, first,
                SPLIT=_split_size(width), num_warps=MARK_WARPS, **shared)
        _select_kernel[(grid,)](
            logits, starts, lengths, out, scratch, last, width, logits.stride(0), out.stride(0), scratch.stride(0), k,
            first, HAS_STARTS=starts is not None, MARK=not split, WORDS=WORDS,
            **_select_options(cap), **shared)
    return out


def fill_all(out: torch.Tensor, positions: torch.Tensor, tokens: int, k: int, ratio: int) -> None:
    """What `top_k` writes where no row can have more than k scores: all (position + 1) // ratio of them, descending.

    out: [>= tokens, k] int32 with contiguous rows. positions: [>= tokens] integers.
    """
    _fill_all_kernel[(tokens,)](out, positions, k, RATIO=ratio, OUT=triton.next_power_of_2(k), num_warps=8)


def top_k_reference(logits: torch.Tensor, lengths: torch.Tensor, k: int, starts: torch.Tensor | None = None,
                    next_n: int = 1) -> torch.Tensor:
    """The contract in plain PyTorch: sort (score, position) keys of 64 bits, keep K, sort the positions."""
    width = logits.shape[1]
    ends = lengths.reshape(-1).long()
    if next_n > 1:
        ends = (ends[:, None] - next_n + 1 + torch.arange(next_n, device=ends.device)).reshape(-1)
    first = torch.zeros_like(ends) if starts is None else starts.long()
    position = torch.arange(width, device=logits.device) - first[:, None]
    valid = (position >= 0) & (position < (ends - first)[:, None])
    bits = logits.float().contiguous().view(torch.int32).long()
    order = torch.where(bits < 0, ~bits + -(1 << 31), bits)
    order = torch.where(order == -1, 0, order)
    order = torch.where(logits.isnan(), 0x7FFFFFFF, order)
    keys = torch.where(valid, (order << 32) + position, torch.iinfo(torch.int64).min)
    best = keys.sort(dim=1, descending=True).values[:, :k]
    chosen = torch.where(best == torch.iinfo(torch.int64).min, -1, best & 0xFFFFFFFF)
    chosen = chosen.sort(dim=1, descending=True).values.to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)
