"""An operator's backward runs on the masters of its forward.

Invariant: a Function that took `Masters` in its forward raises WeightsChanged in its backward if one of its weights was
written to, rebound or moved in between, or if the guard's version advanced.

Under activation checkpointing the forward runs again inside the backward and marks the weights of then; what notices a
change in between is the seal on the model's output, which is checked before anything is recomputed.

`WeightGuard.seal` guards the whole model once, on its output. This is the same check for one operator: it needs no
model around it, costs one comparison a weight, and names the weight. The guard is optional; without it a write through
`.data` goes unseen (see `version_guard`), with it the version tells.
"""
import torch

from .version_guard import WeightGuard, WeightsChanged, _mark, first_difference


class Masters:
    """Taken in a forward, asked in its backward. `weights`: name and tensor of each weight the operator used."""

    def __init__(self, guard: WeightGuard | None, **weights: torch.Tensor):
        self._guard, self._weights = guard, weights
        self._version = guard.version if guard else None
        self._marks = {name: _mark(weight) for name, weight in weights.items()}

    def check(self) -> None:
        if self._guard is not None and self._guard.version != self._version:
            raise WeightsChanged(
                f"found weights of version {self._guard.version}, expected version {self._version}, that of this "
                "operator's forward; run every backward before the optimizer's step, or run its forward again"
            )
        difference = first_difference(self._marks, {name: _mark(weight) for name, weight in self._weights.items()})
        if difference:
            raise WeightsChanged(
                f"weights of this operator changed between its forward and its backward: {difference}; run every "
                "backward before the optimizer's step, or run its forward again"
            )
