"""Mamba-2 state: S at the end of a chunk from S at its start and the chunk's Q rows.

    S' = exp2(decay[Q-1]) S + sum over k of x[k] (B[k] dt[k] exp2(decay[Q-1] - decay[k]))

Invariant: S' is a function of S and of the chunk's rows. S changes only when a chunk is full, so its bits do not depend
on where steps cut the prompt, nor on whether the rows came by prefill or one by one.

Why it holds: `next_state` is the one place that computes it, a tile of channels at a time, for the prefill's walk over
a request's chunks here and for the decode step that fills a chunk (`mamba2_scan`). Its sum over k is one dot of fixed
shape over all Q rows, on an accumulator that starts at the decayed S: nothing is left for a compiler to order. Rows
that a cohort's short first chunk does not have are exact zeros.
"""
import torch
import triton
import triton.language as tl
from vllm.zero_mismatch.mamba2_pieces import (
    BEGIN, END, FIRST, NULL_SLOT, R_COUNT, R_FRESH, R_PIECE, R_REQUEST, R_WIDTH, TOKEN, WIDTH,
)  # fmt: skip

# Rows of S (head channels) of one tile. 32 keep the dot on the plain tensor-core path on every arch: with 64 rows
# and a loop, Triton takes the asynchronous one, which upstream found miscompiled (ssd_chunk_scan.py:20-29).
CHANNELS = 32
WARPS = 4
STAGES = 3  # a piece takes less time than the way of its rows from memory

_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def rows(ring, step, k, in_ring, first, stride_ring, stride_step):
    """Pointers of rows k: in the ring below in_ring, else in the step, whose pointer is that of row `first`."""
    return tl.where(k < in_ring, ring + k.to(tl.int64) * stride_ring, step + (k - first).to(tl.int64) * stride_step)


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """a @ b in fp32. Triton's interpreter multiplies raw BF16 words, so CPU tests widen, which is exact."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def next_state(s, x, b, decay, dt, last, WIDEN: tl.constexpr):
    """A tile of S' [channels, N] from that of S, x [channels, Q], B [Q, N], decay and dt [Q] and decay[Q - 1]."""
    b = (b.to(tl.float32) * (tl.exp2(last - decay) * dt)[:, None]).to(b.dtype)
    s = s * tl.exp2(last)
    if WIDEN:
        return tl.dot(x.to(tl.float32), b.to(tl.float32), s, input_precision="ieee")
    return tl.dot(x, b, s)


@triton.jit(do_not_specialize=["stride_slots", "first_group"],
            do_not_specialize_on_alignment=["slots_ptr", "piece_ptr", "request_ptr"])
def _state_kernel(
    request_ptr, piece_ptr, slots_ptr, stride_slots, first_group,
    x_ptr, b_ptr, scratch_ptr, ring_x_ptr, ring_b_ptr, ring_steps_ptr, ssm_ptr, states_ptr,
    stride_xbc, page_x, page_b, page_steps, page_ssm,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    BP: tl.constexpr, WIDEN: tl.constexpr,
):
    h = tl.program_id(1)
    g = h // (H // G)
    cohort = (first_group + g) % C
    request = request_ptr + (tl.program_id(0) * C + cohort) * R_WIDTH
    slot = tl.load(slots_ptr + tl.load(request + R_REQUEST) * stride_slots).to(tl.int64)
    if slot == NULL_SLOT:
        return
    begin, count, fresh = tl.load(request + R_PIECE), tl.load(request + R_COUNT), tl.load(request + R_FRESH)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    n = tl.arange(0, N)
    k = tl.arange(0, Q)
    tile = h * (P * N) + p[:, None] * N + n[None, :]
    s = tl.load(ssm_ptr + slot * page_ssm + tile, mask=n[None, :] < tl.where(fresh == 0, N, 0), other=0.0)
    # A request's pieces lie one after another and all but the last end a chunk: their places are known without the
    # table, so that the rows of the next are on their way while this one is added.
    piece = piece_ptr + (begin * C + cohort) * WIDTH
    first, token, oldest = tl.load(piece + FIRST), tl.load(piece + TOKEN), tl.load(piece + BEGIN)
    full = count - tl.where(tl.load(piece + (count - 1) * (C * WIDTH) + END) < Q, 1, 0)
    steps_ring = ring_steps_ptr + slot * page_steps + h * Q
    for i in range(full):
        in_ring = tl.where(i == 0, first, 0)
        at = (token + tl.where(i == 0, 0, i * Q - first)).to(tl.int64) * stride_xbc
        tl.store(states_ptr + (begin + i).to(tl.int64) * (H * P * N) + tile, s)
        steps_new = scratch_ptr + (begin + i).to(tl.int64) * (2 * H * Q) + h * Q
        steps = tl.where(k < in_ring, steps_ring + k, steps_new + k)
        k_ok = k >= tl.where(i == 0, oldest, 0)
        b = tl.load(rows(ring_b_ptr + slot * page_b + g * N, b_ptr + at + g * N, k, in_ring, in_ring, G * N,
                         stride_xbc)[:, None] + n[None, :], mask=k_ok[:, None], other=0.0)
        x = tl.load(rows(ring_x_ptr + slot * page_x + h * P, x_ptr + at + h * P, k, in_ring, in_ring, H * P,
                         stride_xbc)[None, :] + p[:, None], mask=k_ok[None, :], other=0.0)
        decay = tl.load(steps + H * Q, mask=k_ok, other=0.0)
        dt = tl.load(steps, mask=k_ok, other=0.0)
        s = next_state(s, x, b, decay, dt, tl.load(steps_new + H * Q + Q - 1), WIDEN)
    if full < count:
        tl.store(states_ptr + (begin + full).to(tl.int64) * (H * P * N) + tile, s)
    tl.store(ssm_ptr + slot * page_ssm + tile, s)


def advance(step, cache, pieces, slots: torch.Tensor, scratch: torch.Tensor, states: torch.Tensor) -> None:
    """Of a prefill: the state at each piece's start to `states` [pieces, H, P, N] fp32, and the last to the slot."""
    heads, head_dim, groups, state, chunk = step.sizes
    tile = min(CHANNELS, head_dim)
    _state_kernel[(pieces.requests.shape[0], heads, head_dim // tile)](
        pieces.requests, pieces.table, slots, slots.stride(0), step.first_group,
        step.x, step.b, scratch, cache.x, cache.b, cache.steps, cache.ssm, states,
        step.x.stride(0), cache.x.stride(0), cache.b.stride(0), cache.steps.stride(0), cache.ssm.stride(0),
        H=heads, P=head_dim, G=groups, N=state, Q=chunk, C=pieces.table.shape[1], BP=tile, WIDEN=_INTERPRETED,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
