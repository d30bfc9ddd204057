"""verl's weight sync, guarded: a version is bound to one digest, in the engine and in the trainer.

Invariant: a sync returns only if every engine worker received, tensor by tensor, exactly the bytes that its trainer
rank put on the wire, under a version that never falls and never names two digests; and a rollout is trained on only if
its versions are confirmed ones. It holds because both ends digest each tensor as it passes, the engine's worker
compares the two lists before the sync returns, and the driver knows the versions that all ranks confirmed. verl streams
tensors, so the manifest comes after them; the engine does not serve meanwhile.

    trainer rank (ServerAdapter)              engine worker
    outgoing = Outgoing(...)        ------>   begin(worker)
    outgoing.stream()               ------>   note(weights), then upstream writes them
    outgoing.manifest()             ------>   commit(worker, manifest)    raises, and so does the sync
    outgoing.tag()   -> driver: CONFIRMED.add(tags), later CONFIRMED.check(rollouts)

What a checkpoint engine (NCCL, not colocated) does before the rank that feeds the engine is not digested.
"""
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import torch
from megatron.zero_mismatch.digest import TensorDigest, tensor_digests, total_digest
from megatron.zero_mismatch.weight_sync import Manifest, SyncRefused, Tag

ATTRIBUTE = "_zero_mismatch_incoming"


class Outgoing:
    """One sync as its trainer rank sends it."""

    def __init__(self, weights, version: int | None, wire_format: str, peft_config: Any):
        if version is None:
            raise SyncRefused("found a weight sync without a version; pass global_steps to update_weights")
        if wire_format != "named_tensors" or peft_config:
            what = "a LoRA adapter" if peft_config else f"wire_format {wire_format!r}"
            raise SyncRefused(f"found {what}, expected whole tensors: what it makes of the engine's weights has no "
                              "digest on the trainer's side; merge adapters (model.lora.merge), send named_tensors")
        self._weights, self._version = weights, version
        self._digests: dict[str, TensorDigest] | None = None  # None until the last tensor has passed

    async def stream(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        from verl.workers.rollout.utils import ensure_async_iterator

        digests: dict[str, TensorDigest] = {}
        async for name, tensor in ensure_async_iterator(self._weights):
            if name in digests:
                raise SyncRefused(f"found {name!r} twice in one export; send each tensor once")
            digests.update(tensor_digests([(name, tensor)]))
            yield name, tensor
        self._digests = digests

    def manifest(self) -> Manifest:
        if not self._digests:
            raise SyncRefused("found no complete stream of weights, expected every tensor once; send them first")
        return Manifest(self._version, total_digest(self._digests), self._digests)

    def tag(self) -> Tag:
        return Tag(self._version, self.manifest().digest)


class Incoming:
    """The same sync as an engine worker receives it."""

    def __init__(self):
        self._last: Tag | None = None
        self._arrived: dict[str, TensorDigest] | None = None  # None: no sync is open
        self._twice: set[str] = set()

    def begin(self) -> None:
        self._arrived, self._twice = {}, set()

    def note(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Before upstream writes them. Never raises for what it finds: the sender waits for an acknowledgement."""
        new = tensor_digests(weights)
        self._twice |= self._arrived.keys() & new.keys()
        self._arrived.update(new)

    def commit(self, manifest: Manifest) -> None:
        if self._arrived is None:
            raise SyncRefused("found a manifest with no weights before it; the engine restarted, or this sync was "
                              "refused: sync again")
        arrived, self._arrived = self._arrived, None
        if self._twice:
            raise SyncRefused(f"found {min(self._twice)!r} twice in one sync; send each tensor once")
        _compare(manifest.tensors, arrived)
        tag = Tag(manifest.version, manifest.digest)
        _advance(self._last, tag, "this engine holds")
        self._last = tag


def begin(worker) -> Incoming:
    """Open a sync on an engine worker (verl's vLLMColocateWorkerExtension); its state stays with the worker."""
    if ATTRIBUTE not in vars(worker):
        setattr(worker, ATTRIBUTE, Incoming())
    incoming = getattr(worker, ATTRIBUTE)
    incoming.begin()
    return incoming


def commit(worker, manifest: str) -> None:
    vars(worker).get(ATTRIBUTE, Incoming()).commit(Manifest.from_json(manifest))


class Confirmed:
    """The driver's record: which digest each version has that every rank confirmed."""

    def __init__(self):
        self.digests: dict[int, str] = {}
        self._last: Tag | None = None

    def add(self, tags: Iterable[Tag | None]) -> None:
        """What each rank's update_weights returned for one sync."""
        found = {None if tag is None else Tag(*tag) for tag in tags}
        if len(found) != 1 or None in found:
            raise SyncRefused(
                f"found {len(found)} answers to one weight sync ({sorted(map(str, found))}), expected one version and "
                "digest from every rank; a rollout engine without the guard gives none, ranks that disagree have "
                "diverged: restore the last checkpoint"
            )
        [tag] = found
        _advance(self._last, tag, "the trainer sent before")
        self._last, self.digests[tag.version] = tag, tag.digest

    def check(self, rollouts: Iterable[Mapping[str, Any]]) -> None:
        """Each has min_global_steps and max_global_steps, as the engine said them, and is no padding."""
        for row, rollout in enumerate(rollouts):
            if rollout.get("is_padding"):
                continue
            for key in ("min_global_steps", "max_global_steps"):
                if rollout.get(key) not in self.digests:
                    raise SyncRefused(
                        f"found rollout {row} with {key} {rollout.get(key)}, expected one of the confirmed versions "
                        f"(the last is {max(self.digests, default=None)}); it was answered with other weights than "
                        "the trainer's: drop it, and sync that engine"
                    )


CONFIRMED = Confirmed()  # of this process; the driver is the one that both syncs and trains


def refuse_mixed(begun: int | None, ended: int | None) -> None:
    """A server's answer whose version when it was admitted is not that when it ended."""
    raise SyncRefused(
        f"found an answer begun with weights of version {begun} and ended with version {ended}, expected one; abort or "
        "drain requests before update_weights, and resume them after it"
    )


def _compare(sent: Mapping[str, TensorDigest], arrived: Mapping[str, TensorDigest]) -> None:
    wrong = sorted(name for name in sent.keys() | arrived.keys() if sent.get(name) != arrived.get(name))
    if wrong:
        raise SyncRefused(
            f"{len(wrong)} tensors did not arrive as they were sent, first {wrong[0]!r}: found "
            f"{arrived.get(wrong[0])}, expected {sent.get(wrong[0])}; the engine's weights are no version's now: sync "
            "again"
        )


def _advance(last: Tag | None, tag: Tag, whose: str) -> None:
    """Versions only grow. The same one may come again, with the same digest: after a sleep that dropped the weights."""
    if last and (tag.version < last.version or (tag.version == last.version and tag.digest != last.digest)):
        raise SyncRefused(
            f"found weights of version {tag.version} with digest {tag.digest[:16]}..., expected a newer version than "
            f"{last.version} ({last.digest[:16]}...), which {whose}; the sender is behind or changed weights without "
            "a step: restart it from the last checkpoint"
        )
