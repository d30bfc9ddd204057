"""An engine's weights stay where they were when its CUDA graphs were captured, whatever the reload does.

Invariant: after `settle` every tensor that `begin` saw lies at the address it had then and holds the reload's bits. It
holds because a tensor that the reload rebound is copied into its old storage, which is still referenced here, and is
then pointed at that storage: whoever holds the parameter object sees the same address. Addresses are compared at the
end, and between syncs with those of the first one.

Seen: parameters, buffers, and plain tensor attributes of modules (MLA's absorbed projections are such) except caches.
Not seen: a tensor that only another object holds. Its graph would read the old bits: such a layer needs a patch.
"""
from collections.abc import Callable, Iterable, Iterator

import torch
from megatron.zero_mismatch.digest import tensor_digests
from megatron.zero_mismatch.weight_sync import SyncRefused

ATTRIBUTE = "_zero_mismatch_resident"
CACHES = {"kv_cache"}  # rebound by the engine, written by every forward
Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def _owned(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, bool, torch.Tensor]]:
    """name, whether it is a parameter or buffer, tensor."""
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            registered = [*module._parameters.items(), *module._buffers.items()]
            plain = [(key, value) for key, value in vars(module).items() if key not in CACHES]
            for is_weight, items in ((True, registered), (False, plain)):
                for key, tensor in items:
                    if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.is_meta:
                        yield f"{number}:{path}.{key}", is_weight, tensor


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class Resident:
    """`models()` lists the modules that a sync writes to, asked for anew at each step."""

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]]):
        self._models = models
        self._first: dict[str, Place] | None = None
        self._since: dict[str, Place] = {}
        self._before: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Before the first byte of a sync is written. What it finds is raised by settle: the sender waits meanwhile."""
        now = {name: _place(tensor) for name, is_weight, tensor in _owned(self._models()) if is_weight}
        if self._first is None:
            self._first = now
        self._since = now
        self._before = {name: tensor.detach() for name, _, tensor in _owned(self._models())}

    @torch.no_grad()
    def settle(self) -> int:
        """After the last byte and all post-processing. The number of tensors that had to be brought back."""
        self._compare(self._first, self._since, "since the first sync")
        now = {name: tensor for name, _, tensor in _owned(self._models())}
        self._compare({name: _place(was)[1:] for name, was in self._before.items()},
                      {name: _place(tensor)[1:] for name, tensor in now.items()}, "in this reload")
        moved = {name: now[name] for name, was in self._before.items() if now[name].data_ptr() != was.data_ptr()}
        wanted = tensor_digests(moved.items())
        for name, tensor in moved.items():
            self._before[name].copy_(tensor)
        for name, tensor in moved.items():
            tensor.data = self._before[name]
        found = tensor_digests(moved.items())
        if found != wanted:
            name = next(name for name in wanted if found[name] != wanted[name])
            raise SyncRefused(f"found {name!r} as {found[name]} after it was copied back, expected {wanted[name]}; the "
                              "reload exchanged storages between tensors: make its post-processing write in place")
        back = {name: _place(tensor) for name, _, tensor in _owned(self._models()) if name in self._before}
        self._compare({name: _place(was) for name, was in self._before.items()}, back, "in this reload")
        self._before = {}
        return len(moved)

    @staticmethod
    def _compare(expected: dict, found: dict, when: str) -> None:
        """A tensor that is new is nobody's: no captured graph reads it."""
        wrong = sorted(name for name, place in expected.items() if found.get(name) != place)
        if wrong:
            raise SyncRefused(
                f"{len(wrong)} resident tensors changed {when}, first {wrong[0]!r}: found {found.get(wrong[0])}, "
                f"expected {expected[wrong[0]]}; captured graphs read the old one: restart the engine, and load the "
                "weights in the layout they were started with"
            )


def begin(worker) -> Resident:
    """Of an engine worker (verl's vLLMColocateWorkerExtension); the addresses stay with the worker."""
    if ATTRIBUTE not in vars(worker):
        setattr(worker, ATTRIBUTE, Resident(worker._iter_all_models))
    resident = getattr(worker, ATTRIBUTE)
    resident.begin()
    return resident
