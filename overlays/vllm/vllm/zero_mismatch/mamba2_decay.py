"""Mamba-2 time steps: dt = softplus(raw + bias), and the decay from the chunk's start to each row.

Invariant: dt and decay of row r are functions of rows 0..r of the chunk alone, whatever step brought each of them.

Why it holds: the decay is *defined* as a sum from left to right, decay[r] = fma(dt[r], A * log2(e), decay[r - 1]), so a
later step goes on from the stored decay[first - 1] and adds what one long step would have added. A tree-shaped scan
(upstream's tl.cumsum) has other bits for another tile and needs every row again. The units are log2, so that the scan
takes exp2 without a rounding in between. softplus is Kahan's log1p, good to an ulp for small steps too.

One binary serves every step: no launch parameter depends on the number of tokens, requests or rows.
With KEEP the rows also enter the ring (x, B, dt, decay); nothing reads a request's new rows from the ring before.
"""
import torch
import triton
import triton.language as tl
from vllm.zero_mismatch.mamba2_pieces import BEGIN, END, FIRST, KEEP, NULL_SLOT, REQUEST, TOKEN, WIDTH

# Heads of one program, all of one group: they are independent, so their number changes no bit.
HEADS = 8
# Rows whose inputs are fetched together, ahead of the sum that must go one by one. Changes no bit either.
AHEAD = 8
WARPS = 2  # 8 heads copy 1 KiB of an x row at once, 16 bytes a thread
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LINEAR_FROM = tl.constexpr(20.0)  # softplus(v) - v < 2**-28 v from here on: v itself, as upstream


@triton.jit
def softplus(v):
    e = tl.exp2(tl.minimum(v, LINEAR_FROM) * LOG2_E)
    u = 1.0 + e
    d = u - 1.0
    log1p = tl.where(d == 0.0, e, tl.log2(u) * LN_2 * (e / tl.where(d == 0.0, 1.0, d)))
    return tl.where(v > LINEAR_FROM, v, log1p)


@triton.jit(do_not_specialize=["stride_slots", "first_group"],
            do_not_specialize_on_alignment=["slots_ptr", "piece_ptr"])
def _decay_kernel(
    piece_ptr, slots_ptr, stride_slots, first_group,
    dt_ptr, x_ptr, b_ptr, a_ptr, bias_ptr,  # the step
    ring_x_ptr, ring_b_ptr, ring_steps_ptr, scratch_ptr,
    stride_dt, stride_xbc, page_x, page_b, page_steps,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BX: tl.constexpr, BB: tl.constexpr, ROWS: tl.constexpr,
):
    index, group, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    piece = piece_ptr + (index * C + (first_group + group) % C) * WIDTH
    slot = tl.load(slots_ptr + tl.load(piece + REQUEST) * stride_slots).to(tl.int64)
    if slot == NULL_SLOT:
        return
    first, end, token = tl.load(piece + FIRST), tl.load(piece + END), tl.load(piece + TOKEN).to(tl.int64)
    begin, keep = tl.load(piece + BEGIN), tl.load(piece + KEEP)
    # A group's heads, and its columns of x and B, are the same share of all.
    h = group * (H // G) + block * BH + tl.arange(0, BH)
    h_end = (group + 1) * (H // G)
    h_ok = h < h_end
    ring_steps = ring_steps_ptr + slot * page_steps + h * Q
    scratch = scratch_ptr + index.to(tl.int64) * (2 * H * Q) + h * Q
    rate = tl.load(a_ptr + h, mask=h_ok, other=0.0).to(tl.float32) * LOG2_E
    bias = tl.load(bias_ptr + h, mask=h_ok, other=0.0).to(tl.float32)
    decay = tl.load(ring_steps + H * Q + first - 1, mask=h < tl.where(first > begin, h_end, 0), other=0.0)
    cols_x = group * (H // G * P) + block * BX + tl.arange(0, BX)
    cols_b = group * N + block * BB + tl.arange(0, BB)
    x_end, b_end = (group + 1) * (H // G * P), (group + 1) * N
    for row0 in range(first, end, ROWS):
        for i in tl.static_range(ROWS):
            row = row0 + i
            ok = h < tl.where(row < end, h_end, 0)
            at = token + row - first
            raw = tl.load(dt_ptr + at * stride_dt + h, mask=ok, other=0.0).to(tl.float32)
            dt = softplus(raw + bias)
            decay = tl.fma(dt, rate, decay)
            if keep == 0:
                tl.store(scratch + row, dt, mask=ok)
                tl.store(scratch + H * Q + row, decay, mask=ok)
            else:
                tl.store(ring_steps + row, dt, mask=ok)
                tl.store(ring_steps + H * Q + row, decay, mask=ok)
                x_ok = cols_x < tl.where(row < end, x_end, 0)
                x = tl.load(x_ptr + at * stride_xbc + cols_x, mask=x_ok)
                tl.store(ring_x_ptr + slot * page_x + row * (H * P) + cols_x, x, mask=x_ok)
                b_ok = cols_b < tl.where(row < end, b_end, 0)
                b = tl.load(b_ptr + at * stride_xbc + cols_b, mask=b_ok)
                tl.store(ring_b_ptr + slot * page_b + row * (G * N) + cols_b, b, mask=b_ok)


def decay(step, cache, table: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> None:
    """dt and decay of the new rows of every piece: to `scratch` [pieces, 2, H, Q] fp32, or to the ring with the rows.

    step: mamba2_replay.Step; cache: mamba2_replay.Cache; table: [pieces, C, 8]; slots: [requests] int32.
    """
    heads, head_dim, groups, state, chunk = step.sizes
    pieces, cohorts, _ = table.shape
    blocks = triton.cdiv(heads // groups, HEADS)

    def share(of_group: int) -> int:
        return triton.next_power_of_2(triton.cdiv(of_group, blocks))

    _decay_kernel[(pieces, groups, blocks)](
        table, slots, slots.stride(0), step.first_group, step.dt, step.x, step.b, step.a, step.dt_bias,
        cache.x, cache.b, cache.steps, scratch,
        step.dt.stride(0), step.x.stride(0), cache.x.stride(0), cache.b.stride(0), cache.steps.stride(0),
        H=heads, P=head_dim, G=groups, N=state, Q=chunk, C=cohorts, BH=share(heads // groups),
        BX=share(heads // groups * head_dim), BB=share(state), ROWS=AHEAD, num_warps=WARPS,
    )  # fmt: skip


def reference(raw: torch.Tensor, bias: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """raw: [rows, H] of one chunk from its start -> (dt, decay in log2 units), both [rows, H] fp64."""
    dt = torch.nn.functional.softplus(raw.double() + bias.double(), threshold=700)
    return dt, (dt * a.double()).cumsum(0) / LN_2.value


# Relative bound on both: softplus is a few ulp of fp32 (exp2 and log2 approximate to two), and 128 additions of terms
# of one sign each round by half an ulp of the sum.
TOLERANCE = 2.0**-24 * (8 + 128)
