"""Mamba-2's selective scan over packed sequences, and its gradient.

    S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T,    y[t] = S[t] C[t] + D x[t],    dt = softplus(raw + bias)

Values: the rollout's own chunk replay (vllm/zero_mismatch/mamba2_replay.py), the same three kernels as a prefill from
position 0: decode has the same bits by that operator's contract, and the chunk grid (its CHUNK, not the model's) is
that of absolute positions and of a group's place in the model: neither packing nor a rank's share of the groups moves
it. Nothing is read from the cache, so all sequences share one slot and no ring is written.

Backward: by re-running the scan by chunks in fp32 (`reference`) and differentiating that: the BF16 roundings inside the
kernels (the carried state, the weights of x, the scaled B) are passed straight through. Gradients: x, B, C, raw dt, A,
D and the bias.
"""
from dataclasses import dataclass
from functools import lru_cache

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
    first_group: int = 0  # which of the model's groups the first one here is: the kernels cut a group's chunks by it

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


@dataclass(frozen=True)
class _Grid:
    """Where the tokens of packed sequences lie in chunks of Q rows, every sequence from a chunk's first row on.

    place: [tokens] the row of a token, all chunks laid end to end; follow: for the second, third, ... chunks of the
    sequences, (which of the chunks one earlier they follow, the numbers of those); order: [chunks] a chunk's rank when
    first chunks are listed, then second ones, and so on. Every index occurs once in its tensor, so that derivatives
    are gathers without collisions.
    """

    chunks: int
    firsts: int
    place: torch.Tensor
    follow: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    order: torch.Tensor


@lru_cache(maxsize=4)
def _grid(packed: Packed, chunk: int) -> _Grid:
    counts = [-(-length // chunk) for length in packed.lengths]
    first = [sum(counts[:i]) for i in range(len(counts))]
    place = torch.cat([torch.arange(length) + chunk * at for length, at in zip(packed.lengths, first, strict=True)])
    alive, follow, listed = list(range(len(counts))), [], list(first)
    for step in range(1, max(counts)):
        within = [i for i, sequence in enumerate(alive) if counts[sequence] > step]
        alive = [alive[i] for i in within]
        before = [first[sequence] + step - 1 for sequence in alive]
        follow.append((torch.tensor(within).to(packed.device), torch.tensor(before).to(packed.device)))
        listed += [chunk_before + 1 for chunk_before in before]
    order = torch.tensor(listed).argsort().to(packed.device)
    return _Grid(sum(counts), len(counts), place.to(packed.device), tuple(follow), order)


def reference(xbc, dt, a, d, dt_bias, packed: Packed, sizes: Sizes) -> torch.Tensor:
    """Chunk by chunk in the wide type, every chunk of the batch at once; only the carried state is sequential."""
    grid = _grid(packed, sizes.chunk)

    def laid(t: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> [chunks, Q, width], zero where there is no token."""
        t = wide(t)
        rows = t.new_zeros(grid.chunks * sizes.chunk, t.shape[1]).index_copy(0, grid.place, t)
        return rows.unflatten(0, (grid.chunks, sizes.chunk))

    ok = laid(torch.ones_like(dt[:, :1])) > 0
    x, b, c = laid(xbc).split([sizes.x_width, sizes.bc_width, sizes.bc_width], dim=-1)
    x = x.unflatten(-1, (sizes.heads, sizes.head_dim)).transpose(1, 2)                   # [chunks, H, Q, P]
    share = sizes.heads // sizes.groups
    b, c = (t.unflatten(-1, (sizes.groups, sizes.state)).transpose(1, 2) for t in (b, c))  # [chunks, G, Q, N]
    step = torch.where(ok, torch.nn.functional.softplus(laid(dt) + wide(dt_bias)), 0.0)  # [chunks, Q, H]
    decay = (step * wide(a)).cumsum(1).transpose(1, 2)                                   # [chunks, H, Q]
    scaled = x * step.transpose(1, 2)[..., None]
    states = _carried(b, decay, scaled, share, grid)                                     # [chunks, H, P, N]
    carried = matmul(c.repeat_interleave(share, 1), states.mT) * decay.exp()[..., None]
    y = _within(b, c, decay, scaled, share) + carried + x * wide(d)[:, None, None]
    return y.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, grid.place).to(xbc.dtype)


def _within(b, c, decay, scaled, share) -> torch.Tensor:
    """Contributions of the chunk's own rows: [chunks, H, Q, P]."""
    causal = torch.ones(b.shape[2], b.shape[2], dtype=torch.bool, device=b.device).tril()
    # Above the diagonal the exponent is positive and may overflow: masked before the exponential.
    between = torch.where(causal, decay[..., None] - decay[..., None, :], float("-inf")).exp()  # [chunks, H, row, k]
    return matmul(matmul(c, b.mT).repeat_interleave(share, 1) * between, scaled)


def _carried(b, decay, scaled, share, grid: _Grid) -> torch.Tensor:
    """The state at each chunk's start: zero at a sequence's first."""
    last = decay[..., -1]
    added = matmul((scaled * (last[..., None] - decay).exp()[..., None]).mT, b.repeat_interleave(share, 1))
    now = torch.zeros_like(added[: grid.firsts])
    states = [now]
    for within, before in grid.follow:
        kept = now.index_select(0, within) * last.index_select(0, before).exp()[..., None, None]
        now = kept + added.index_select(0, before)
        states.append(now)
    return torch.cat(states).index_select(0, grid.order)
