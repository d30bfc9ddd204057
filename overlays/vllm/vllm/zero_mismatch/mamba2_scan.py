"""Mamba-2 outputs: y[r] from S at the chunk's start and rows 0..r of the chunk.

    y[r] = exp2(decay[r]) C[r] S + sum over k <= r of (C[r] B[k]) exp2(decay[r] - decay[k]) dt[k] x[k] + D x[r]

A decode step that fills a chunk also moves S to its end, by `mamba2_state.next_state`, in tiles of its own: it reads S
again, from the L2 cache. One load for both would keep S in the layout of the move, which costs every step and every
prefill more than the second read costs the step in which one group of eight ends. For the same reason a program has one
head: two would share the C B products, but the programs that end a chunk are the last to be done, and would take twice
as long.

Invariant: y[r] is a function of S, rows 0..r and C[r]; the same bits when r is one row of a long prefill, of a chunk
that an earlier step began, or a decode step's only row.

Why it holds: a row of a tensor-core tile is an independent dot product, so row r of a 16-row tile takes nothing from
the other 15, which a decode step leaves zero. The sums over k always run over Q columns in one dot of fixed shape;
columns after r, and before the first row of a cohort's short first chunk, are exact zeros. Tiles sit at multiples of 16
of the chunk's rows, so row r has the same place in its tile in every step. One binary serves every step: only tables
and the grid differ.

A NaN or infinity in a *later* row of the same tile would reach r through 0 * x in a prefill; a model that makes one has
failed anyway. Rows the step does not have are never loaded.
"""
import torch
import triton
import triton.language as tl
from vllm.zero_mismatch.mamba2_pieces import BEGIN, END, FIRST, IN_RING, NULL_SLOT, REQUEST, STATE, TOKEN, WIDTH
from vllm.zero_mismatch.mamba2_state import CHANNELS, dot, next_state, rows

# Rows of a tile: the least a tensor core takes. A decode step computes one tile, and its cost is the tile's.
TILE = 16
WARPS = 4
REGISTERS = 128  # a thread: four programs share a multiprocessor, and keep 128 KiB of S on their way

_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _end_chunk(state_at, x_rows, b_rows, steps_at, begin, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
               Q: tl.constexpr, BP: tl.constexpr, WIDEN: tl.constexpr):
    """A head's S to the end of a chunk whose rows, from `begin` on, are all in the ring."""
    n = tl.arange(0, N)
    k = tl.arange(0, Q)
    k_ok = k >= begin
    b = tl.load(b_rows[:, None] + n[None, :], mask=k_ok[:, None], other=0.0)
    dt = tl.load(steps_at + k, mask=k_ok, other=0.0)
    decay = tl.load(steps_at + H * Q + k, mask=k_ok, other=0.0)
    last = tl.load(steps_at + H * Q + Q - 1)
    for p0 in tl.static_range(0, P, BP):
        p = p0 + tl.arange(0, BP)
        s_at = state_at + p[:, None] * N + n[None, :]
        x = tl.load(x_rows[None, :] + p[:, None], mask=k_ok[None, :], other=0.0)
        tl.store(s_at, next_state(tl.load(s_at), x, b, decay, dt, last, WIDEN))


@triton.jit(do_not_specialize=["stride_slots", "first_group"],
            do_not_specialize_on_alignment=["slots_ptr", "piece_ptr"])
def _scan_kernel(
    piece_ptr, slots_ptr, stride_slots, first_group,
    x_ptr, b_ptr, c_ptr, d_ptr, scratch_ptr, ring_x_ptr, ring_b_ptr, ring_steps_ptr, states_ptr, out_ptr,
    stride_xbc, stride_out, page_x, page_b, page_steps, page_state,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr, WIDEN: tl.constexpr,
):
    index = tl.program_id(0)
    h = tl.program_id(1)
    g = h // (H // G)
    piece = piece_ptr + (index * C + (first_group + g) % C) * WIDTH
    slot = tl.load(slots_ptr + tl.load(piece + REQUEST) * stride_slots).to(tl.int64)
    if slot == NULL_SLOT:
        return
    first, end, in_ring = tl.load(piece + FIRST), tl.load(piece + END), tl.load(piece + IN_RING)
    tile = (first // BM + tl.program_id(2)) * BM
    if tile >= end:
        return
    state = tl.load(piece + STATE)
    state_at = states_ptr + tl.where(state < 0, slot, state.to(tl.int64)) * page_state + h * (P * N)
    token = tl.load(piece + TOKEN).to(tl.int64)
    at = token * stride_xbc

    m = tile + tl.arange(0, BM)
    k = tl.arange(0, Q)
    n = tl.arange(0, N)
    p = tl.arange(0, P)
    m_ok = (m >= first) & (m < end)
    begin = tl.load(piece + BEGIN)
    k_ok = (k >= begin) & (k < tl.minimum(end, tile + BM))
    new_m = (m - first).to(tl.int64)

    c = tl.load(c_ptr + at + g * N + new_m[:, None] * stride_xbc + n[None, :], mask=m_ok[:, None], other=0.0)
    s = tl.load(state_at + p[None, :] * N + n[:, None])
    y = dot(c, s.to(c.dtype), WIDEN)
    b_rows = rows(ring_b_ptr + slot * page_b + g * N, b_ptr + at + g * N, k, in_ring, first, G * N, stride_xbc)
    b = tl.load(b_rows[None, :] + n[:, None], mask=k_ok[None, :], other=0.0)
    cb = dot(c, b, WIDEN)
    cb = tl.where(m[:, None] >= k[None, :], cb, 0.0)
    x_ring, x_new = ring_x_ptr + slot * page_x + h * P, x_ptr + at + h * P
    x_rows = rows(x_ring, x_new, k, in_ring, first, H * P, stride_xbc)
    x_rows_m = rows(x_ring, x_new, m, in_ring, first, H * P, stride_xbc)
    steps_ring = ring_steps_ptr + slot * page_steps + h * Q
    steps_new = scratch_ptr + index.to(tl.int64) * (2 * H * Q) + h * Q
    steps_k = tl.where(k < in_ring, steps_ring + k, steps_new + k)
    steps_m = tl.where(m < in_ring, steps_ring + m, steps_new + m) + H * Q
    x = tl.load(x_rows[:, None] + p[None, :], mask=k_ok[:, None], other=0.0)
    dt_k = tl.load(steps_k, mask=k_ok, other=0.0)
    decay_k = tl.load(steps_k + H * Q, mask=k_ok, other=0.0)
    decay_m = tl.load(steps_m, mask=m_ok, other=0.0)
    y *= tl.exp2(decay_m)[:, None]
    # Above the diagonal the exponent is positive and may overflow; cb is zero there, and 0 * inf is no zero.
    w = cb * tl.exp2(tl.minimum(decay_m[:, None] - decay_k[None, :], 0.0)) * dt_k[None, :]
    y += dot(w.to(x.dtype), x, WIDEN)
    x_m = tl.load(x_rows_m[:, None] + p[None, :], mask=m_ok[:, None], other=0.0).to(tl.float32)
    y += x_m * tl.load(d_ptr + h).to(tl.float32)
    out = out_ptr + (token + new_m)[:, None] * stride_out + h * P + p[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=m_ok[:, None])
    if (state < 0) & (end == Q):  # a decode step's chunk is full; this program alone holds this head's S
        tl.debug_barrier()  # every warp has read S
        _end_chunk(state_at, x_rows, b_rows, steps_ring, begin, H, P, N, Q, BP, WIDEN)


def scan(step, cache, pieces, slots: torch.Tensor, scratch: torch.Tensor, states: torch.Tensor,
         out: torch.Tensor) -> None:
    """out: [tokens, H * P] bf16. states: the scratch of `mamba2_state.advance`, or the cache's own for decode, whose
    full chunks it ends."""
    heads, head_dim, groups, state, chunk = step.sizes
    _scan_kernel[(pieces.table.shape[0], heads, pieces.tiles)](
        pieces.table, slots, slots.stride(0), step.first_group,
        step.x, step.b, step.c, step.d, scratch, cache.x, cache.b, cache.steps, states, out,
        step.x.stride(0), out.stride(0), cache.x.stride(0), cache.b.stride(0), cache.steps.stride(0), states.stride(0),
        H=heads, P=head_dim, G=groups, N=state, Q=chunk, C=pieces.table.shape[1], BM=TILE,
        BP=min(CHANNELS, head_dim), WIDEN=_INTERPRETED, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
