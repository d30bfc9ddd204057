"""Mamba-2's selective scan over packed sequences, and its gradient.

    S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T,    y[t] = S[t] C[t] + D x[t],    dt = softplus(raw + bias)

Values: the rollout's own chunk replay (vllm/zero_mismatch/mamba2_replay.py), the same three kernels as a prefill from
position 0: decode has the same bits by that operator's contract, and the chunk grid (its CHUNK, not the model's) is
that of absolute positions, which packing does not move. Nothing is read from the cache, so all sequences share one slot
and no ring is written.

Backward: by re-running the scan by chunks in fp32 (`reference`) and differentiating that: the BF16 roundings inside the
kernels (the carried state, the weights of x, the scaled B) are passed straight through. Gradients: x, B, C, raw dt, A,
D and the bias.
"""
from dataclasses import dataclass

import torch

from .batched import matmul
from .packing import Packed, wide
from .ste import replayed


@dataclass(frozen=True)
class Sizes:
    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int  # the model's: how the derivative is cut, which any number would do; the kernels have their own

    @property
    def x_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def bc_width(self) -> int:
        return self.groups * self.state


def mamba2(kernel, xbc, dt, a, d, dt_bias, packed: Packed, sizes: Sizes) -> torch.Tensor:
    """xbc: [tokens, H P + 2 G N], the convolution's output; dt: [tokens, H] raw; a: [H] fp32, negative; d, dt_bias: [H]
    -> [tokens, H P]."""
    return replayed(
        lambda *inputs: kernel(*inputs, packed, sizes),
        lambda *inputs: reference(*inputs, packed, sizes),
        xbc, dt, a, d, dt_bias,
    )  # fmt: skip


def _chunks(packed: Packed, chunk: int) -> tuple[torch.Tensor, list[list[int]]]:
    """([chunks, Q] token of each row, -1 where there is none; for each i, the chunks that are i-th in a sequence)."""
    rows, by_step = [], []
    for begin, end in packed.bounds:
        for step, first in enumerate(range(begin, end, chunk)):
            token = torch.arange(first, first + chunk)
            rows.append(torch.where(token < end, token, -1))
            if step == len(by_step):
                by_step.append([])
            by_step[step].append(len(rows) - 1)
    return torch.stack(rows).to(packed.device), by_step


def reference(xbc, dt, a, d, dt_bias, packed: Packed, sizes: Sizes) -> torch.Tensor:
    """Chunk by chunk in the wide type, every chunk of the batch at once; only the carried state is sequential."""
    rows, by_step = _chunks(packed, sizes.chunk)
    ok = (rows >= 0)[..., None]

    def gather(t: torch.Tensor) -> torch.Tensor:
        return torch.where(ok, wide(t)[rows.clamp(min=0)], 0.0)

    x, b, c = gather(xbc).split([sizes.x_width, sizes.bc_width, sizes.bc_width], dim=-1)
    x = x.unflatten(-1, (sizes.heads, sizes.head_dim)).transpose(1, 2)                   # [chunks, H, Q, P]
    share = sizes.heads // sizes.groups
    b, c = (t.unflatten(-1, (sizes.groups, sizes.state)).transpose(1, 2) for t in (b, c))  # [chunks, G, Q, N]
    step = torch.where(ok, torch.nn.functional.softplus(gather(dt) + wide(dt_bias)), 0.0)  # [chunks, Q, H]
    decay = (step * wide(a)).cumsum(1).transpose(1, 2)                                   # [chunks, H, Q]
    scaled = x * step.transpose(1, 2)[..., None]
    states = _carried(b, decay, scaled, share, by_step)                                  # [chunks, H, P, N]
    carried = matmul(c.repeat_interleave(share, 1), states.mT) * decay.exp()[..., None]
    y = _within(b, c, decay, scaled, share) + carried + x * wide(d)[:, None, None]
    y = y.transpose(1, 2).flatten(-2)
    return y[rows >= 0].to(xbc.dtype)  # rows of a sequence are in order, and so are the sequences


def _within(b, c, decay, scaled, share) -> torch.Tensor:
    """Contributions of the chunk's own rows: [chunks, H, Q, P]."""
    causal = torch.ones(b.shape[2], b.shape[2], dtype=torch.bool, device=b.device).tril()
    # Above the diagonal the exponent is positive and may overflow: masked before the exponential.
    between = torch.where(causal, decay[..., None] - decay[..., None, :], float("-inf")).exp()  # [chunks, H, row, k]
    return matmul(matmul(c, b.mT).repeat_interleave(share, 1) * between, scaled)


def _carried(b, decay, scaled, share, by_step) -> torch.Tensor:
    """The state at each chunk's start. Chunk z follows chunk z - 1 unless its sequence begins with it."""
    last = decay[..., -1]
    added = matmul((scaled * (last[..., None] - decay).exp()[..., None]).mT, b.repeat_interleave(share, 1))
    now = torch.zeros_like(added[: len(by_step[0])])
    states = [now]
    for earlier, chunks in zip(by_step, by_step[1:], strict=False):
        place = {chunk: index for index, chunk in enumerate(earlier)}
        before = [chunk - 1 for chunk in chunks]
        now = now[[place[chunk] for chunk in before]] * last[before].exp()[..., None, None] + added[before]
        states.append(now)
    order = torch.tensor([chunk for chunks in by_step for chunk in chunks], device=b.device)
    return torch.cat(states)[order.argsort()]
