"""Context parallelism: one packed batch over several ranks, and the bits of one rank.

A rank holds a contiguous run of the batch's rows. What needs no other row (projections, norms, router, experts,
logprob) works on those: each of these operators computes a row from that row alone, so it gives the row's usual bits.
What reads along a sequence gets the whole batch, in one of two ways:

    to_heads / to_tokens  the heads are dealt out instead of the rows: convolution, scan and attention over all rows of
                          a rank's share of the heads, no head reading another one (Megatron's own way for Mamba,
                          core/ssm/mamba_context_parallel.py of 0.19.2)
    collect               every rank gets every row, for work on its own queries

Invariant: forward values are those of one rank, bit for bit, however many ranks there are and wherever the batch is
cut. Nothing is added up across ranks on the way forward: the one collective is an all-to-all, which moves bits, and the
kernels behind it see the same rows in the same order as on one rank (seeds section 4.5: concatenation, no summation).
A kernel whose bits depend on a head's place in the model is told where the rank's share begins (Mamba's chunks,
mamba2.Sizes.first_group).

Backward: the reverse exchange. Behind `collect` each rank has a part of every row's gradient; the parts are added in
the order of the ranks, in fp32. A parameter's gradient on a rank is that of its rows or heads; Megatron adds them up
over its data-and-context group. The ranks must run the same operators in the same order: an all-to-all waits for all.

Cost: the dealt-out heads are an even share of the work. Behind `collect`, DeepSeek-V4's attention is too, but every
rank pools and indexes the whole batch; and a rank sends its rows to each of the others.
"""
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a batch. group: Megatron's context-parallel group; None: this process alone."""

    group: torch.distributed.ProcessGroup | None = None

    @cached_property
    def size(self) -> int:
        return 1 if self.group is None else torch.distributed.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return 0 if self.group is None else torch.distributed.get_rank(self.group)

    def bounds(self, tokens: int) -> list[tuple[int, int]]:
        """(first row, last row + 1) of each rank, as even as can be."""
        return [(tokens * r // self.size, tokens * (r + 1) // self.size) for r in range(self.size)]

    def share(self, count: int, what: str) -> int:
        """How many of `count` heads or groups a rank has."""
        if count % self.size:
            raise ValueError(f"context parallelism: found {count} {what} for {self.size} ranks, expected a multiple; "
                             f"use a context-parallel size that divides {count}")
        return count // self.size

    def of_heads(self, weight: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """This rank's part of each of the sections of dimension 0, as `to_heads` deals them out."""
        if self.size == 1:
            return weight
        return torch.cat([section.chunk(self.size)[self.rank] for section in weight.split(widths)])


ALONE = Ranks()


class _Exchange(torch.autograd.Function):
    """x: [rows, ...], send[r] of them to rank r, in order -> recv[r] rows of rank r, in the order of the ranks."""

    @staticmethod
    def forward(ctx, x, send, recv, group):
        ctx.counts, ctx.group = (send, recv), group
        return _moved(x.detach(), send, recv, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        send, recv = ctx.counts
        return _moved(grad, recv, send, ctx.group), None, None, None


def _moved(x: torch.Tensor, send: list[int], recv: list[int], group) -> torch.Tensor:
    out = x.new_empty(sum(recv), *x.shape[1:])
    torch.distributed.all_to_all_single(out, x.contiguous(), recv, send, group=group)
    return out


def to_heads(x: torch.Tensor, widths: list[int], packed) -> torch.Tensor:
    """x: [own rows, sum(widths)], each section made of heads -> [all rows, sum(widths) / ranks]: of each section this
    rank's heads, the sections in their order."""
    ranks = packed.ranks
    if ranks.size == 1:
        return x
    dealt = torch.cat([part.unflatten(1, (ranks.size, -1)) for part in x.split(widths, -1)], -1).transpose(0, 1)
    send = [x.shape[0]] * ranks.size
    return _Exchange.apply(dealt.flatten(0, 1), send, _counts(packed), ranks.group)


def to_tokens(y: torch.Tensor, packed) -> torch.Tensor:
    """y: [all rows, width], this rank's heads -> [own rows, width * ranks], every head: `to_heads` of one section,
    undone."""
    ranks = packed.ranks
    if ranks.size == 1:
        return y
    counts = _counts(packed)
    own = _Exchange.apply(y, counts, [counts[ranks.rank]] * ranks.size, ranks.group)
    return own.unflatten(0, (ranks.size, -1)).transpose(0, 1).flatten(1)


class _Collect(torch.autograd.Function):
    """`alike`: what follows is the same on every rank, so its gradient is whole on each; otherwise each has a part."""

    @staticmethod
    def forward(ctx, x, packed, alike):
        ctx.packed, ctx.alike = packed, alike
        size = packed.ranks.size
        copies = x.detach().expand(size, *x.shape).flatten(0, 1)
        return _moved(copies, [x.shape[0]] * size, _counts(packed), packed.ranks.group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        packed, ranks = ctx.packed, ctx.packed.ranks
        if ctx.alike:
            return packed.own(grad), None, None
        counts = _counts(packed)
        parts = _moved(grad, counts, [counts[ranks.rank]] * ranks.size, ranks.group).unflatten(0, (ranks.size, -1))
        wide = torch.promote_types(grad.dtype, torch.float32)
        return sum(part.to(wide) for part in parts).to(grad.dtype), None, None


def collect(x: torch.Tensor, packed, alike: bool = False) -> torch.Tensor:
    """x: [own rows, ...] -> [all rows, ...] on every rank. alike: every rank goes on to compute the same from it."""
    return x if packed.ranks.size == 1 else _Collect.apply(x, packed, alike)


def _counts(packed) -> list[int]:
    return [end - begin for begin, end in packed.ranks.bounds(packed.tokens)]
