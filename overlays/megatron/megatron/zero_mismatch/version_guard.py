"""A backward runs on the weights of its forward, and a version names one set of bits.

Invariant: a version number is bound to one full digest, and numbers only grow. A forward takes a stamp (`stamp`, or
`seal` on its output); it is given only while the weights are those of the accepted version. The backward of a sealed
tensor checks the stamp before anything upstream of it runs, and raises if the version has moved, a tensor lies at
another address, or a tensor was written to.

Two forms. Cheap, at every stamp and every backward: the version, and for each tensor its address and autograd's write
counter. Full, after every optimizer step, at export and at reload: the digest of every bit (see `digest`).

What the cheap form cannot see: a write through `.data`, or through another view of the storage that has its own
counter, such as a distributed optimizer's flat buffer. Megatron's optimizers write the model's weights that way
(megatron/core/optimizer/optimizer.py:1088, distrib_optimizer.py:2876 of 0.19.2), so `watch` advances the version when
their step returns; for a write nobody announces there is `check(stamp, full=True)`.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .digest import TensorDigest, tensor_digests, total_digest


class WeightsChanged(RuntimeError):
    """The weights are not those the caller's version names."""


class Mark(NamedTuple):
    address: int
    writes: int | None  # None for inference tensors, which do not count writes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Stamp:
    version: int
    digest: str
    marks: dict[str, Mark]


def _mark(tensor: torch.Tensor) -> Mark:
    writes = None if tensor.is_inference() else tensor._version
    return Mark(tensor.data_ptr(), writes, tensor.dtype, tuple(tensor.shape), tensor.stride())


def first_difference(expected: dict[str, Mark], found: dict[str, Mark]) -> str | None:
    """What differs first, in words, or None."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name!r} is gone"
        if name not in expected:
            return f"{name!r} is new"
        for field, was, now in zip(Mark._fields, expected[name], found[name], strict=True):
            if was != now:
                return f"{name!r} has {field} {now}, expected {was}"
    return None


class WeightGuard:
    """Guards the tensors that `tensors()` lists: name and tensor, asked for anew at each check.

    Asking anew is what finds a parameter that was replaced. Usually `model.named_parameters`.
    """

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]], version: int = 0):
        self._tensors = tensors
        self._accepted = self._measure(version)

    @property
    def version(self) -> int:
        return self._accepted.version

    @property
    def digest(self) -> str:
        return self._accepted.digest

    def marks(self) -> dict[str, Mark]:
        return {name: _mark(tensor) for name, tensor in self._tensors()}

    def stamp(self) -> Stamp:
        """For a forward that starts now. Raises if the weights are no longer those of the accepted version."""
        self.check(self._accepted)
        return self._accepted

    def check(self, stamp: Stamp, full: bool = False) -> None:
        """Raise unless the weights are those of `stamp`; `full` reads every bit."""
        if stamp.version != self.version:
            raise WeightsChanged(
                f"found weights of version {self.version}, expected version {stamp.version}, that of the forward; run "
                "every backward before the optimizer's step, or run its forward again"
            )
        difference = first_difference(stamp.marks, self.marks())
        if difference:
            raise WeightsChanged(
                f"weights of version {stamp.version} were changed: {difference}; write weights in place and call "
                "advance() after it, with no forward or backward in flight"
            )
        if full:
            self._check_digest(stamp.digest, f"version {stamp.version}")

    def advance(self) -> Stamp:
        """After an optimizer step or a reload in place: the next version, with the digest of what is there now."""
        found = self._measure(self.version + 1)
        self._check_addresses(found)
        self._accepted = found
        return found

    def export(self) -> tuple[Stamp, dict[str, TensorDigest]]:
        """For an export: every bit is checked against the accepted digest first."""
        self.check(self._accepted)
        digests = tensor_digests(self._tensors())
        if total_digest(digests) != self.digest:
            self._refuse_digest(total_digest(digests), self.digest, f"version {self.version}")
        return self._accepted, digests

    def reload(self, version: int, digest: str) -> Stamp:
        """After a checkpoint was read into the weights: take over its version if every bit is the saved one."""
        if version < self.version:
            raise WeightsChanged(
                f"found a checkpoint of version {version}, expected at least {self.version}: versions only grow, and "
                "engines may hold later ones; restore in a fresh process and sync every engine from it"
            )
        self._check_digest(digest, f"the checkpoint of version {version}")
        self._accepted = self._measure(version)
        return self._accepted

    def relocate(self) -> Stamp:
        """After the same bits moved (offload and back): accept the new addresses if the digest is unchanged."""
        self._check_digest(self.digest, f"version {self.version}")
        self._accepted = self._measure(self.version)
        return self._accepted

    def seal(self, output: torch.Tensor) -> torch.Tensor:
        """`output` itself; its backward first checks that the weights are still those of now.

        One seal on a model's output is enough, and cheap: nothing upstream of it runs before the check.
        """
        return _Seal.apply(output, self)

    def watch(self, optimizer) -> None:
        """Make `optimizer.step` check the weights first and advance the version after, whatever way it writes them."""
        step = optimizer.step

        def guarded_step(*args, **kwargs):
            self.stamp()
            result = step(*args, **kwargs)
            self.advance()
            return result

        optimizer.step = guarded_step

    def _measure(self, version: int) -> Stamp:
        return Stamp(version, total_digest(tensor_digests(self._tensors())), self.marks())

    def _check_addresses(self, found: Stamp) -> None:
        still = {name: mark._replace(writes=None) for name, mark in self._accepted.marks.items()}
        difference = first_difference(still, {name: mark._replace(writes=None) for name, mark in found.marks.items()})
        if difference:
            raise WeightsChanged(
                f"an update moved weights: {difference}; copy into the existing tensors (CUDA graphs and engines keep "
                "their addresses), or call relocate() after an offload"
            )

    def _check_digest(self, expected: str, whose: str) -> None:
        found = total_digest(tensor_digests(self._tensors()))
        if found != expected:
            self._refuse_digest(found, expected, whose)

    @staticmethod
    def _refuse_digest(found: str, expected: str, whose: str) -> None:
        raise WeightsChanged(
            f"found weights with digest {found[:16]}..., expected {expected[:16]}..., that of {whose}; something wrote "
            "to them without advance(): restore the last checkpoint"
        )


class _Seal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, guard: WeightGuard):
        ctx.guard, ctx.stamp = guard, guard.stamp()
        return output

    @staticmethod
    def backward(ctx, grad):
        ctx.guard.check(ctx.stamp)
        return grad, None
