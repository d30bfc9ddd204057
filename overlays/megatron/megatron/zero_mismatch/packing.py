"""Packed sequences: whole sequences one after another in one [tokens, ...] tensor, as an inference prefill sees them.

Every sequence starts at its position 0, so a kernel that cuts by absolute position cuts here as it does in the engine.
Under context parallelism the same batch is described on every rank, and `own` gives the rows that are this rank's.
"""
from dataclasses import dataclass
from functools import cached_property

import torch

from .context_parallel import ALONE, Ranks


@dataclass(frozen=True)
class Packed:
    """lengths: tokens of each sequence, all positive; device: where the index tensors go; ranks: which processes hold
    the rows."""

    lengths: tuple[int, ...]
    device: torch.device
    ranks: Ranks = ALONE

    def __post_init__(self):
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"packing: found lengths {self.lengths[:8]}, expected positive ones; drop empty sequences")
        if self.tokens < self.ranks.size:
            raise ValueError(f"packing: found {self.tokens} tokens for {self.ranks.size} context-parallel ranks, "
                             "expected at least one each; use longer micro-batches")

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of each sequence, on the host."""
        ends, total = [], 0
        for length in self.lengths:
            ends.append((total, total + length))
            total += length
        return tuple(ends)

    @cached_property
    def starts(self) -> torch.Tensor:
        """[sequences + 1] int32: cumulative lengths."""
        return torch.tensor([0, *(end for _, end in self.bounds)], dtype=torch.int32).to(self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[tokens] int64: each token's position in its own sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.device)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, ...] -> this rank's rows of it, a view."""
        begin, end = self.ranks.bounds(self.tokens)[self.ranks.rank]
        return x[begin:end]


def pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, Packed]:
    """Token ids of sequences -> ([tokens] int64, their Packed)."""
    return torch.cat(sequences), Packed(tuple(map(len, sequences)), sequences[0].device)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The type in which references and derivatives compute: fp32, or fp64 where a test asks for it."""
    return x if x.dtype == torch.float64 else x.float()


def divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by with the same bits on every device: on CUDA PyTorch multiplies by the reciprocal of a Python number."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)
