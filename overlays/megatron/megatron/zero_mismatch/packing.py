"""Packed sequences: whole sequences one after another in one [tokens, ...] tensor, as an inference prefill sees them.

Every sequence starts at its position 0, so a kernel that cuts by absolute position cuts here as it does in the engine.
"""
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Packed:
    """lengths: tokens of each sequence, all positive; device: where the index tensors go."""

    lengths: tuple[int, ...]
    device: torch.device

    def __post_init__(self):
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"packing: found lengths {self.lengths[:8]}, expected positive ones; drop empty sequences")

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


def pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, Packed]:
    """Token ids of sequences -> ([tokens] int64, their Packed)."""
    return torch.cat(sequences), Packed(tuple(map(len, sequences)), sequences[0].device)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The type in which references and derivatives compute: fp32, or fp64 where a test asks for it."""
    return x if x.dtype == torch.float64 else x.float()
