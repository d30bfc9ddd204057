"""Asynchronous RL, small enough to read: workers generate while the learner trains, within a bounded version lag.

    learner thread:  take the next update's groups -> check their tags -> update -> publish the weights -> trained
    pool thread:     hand out tasks the queue admits, with the newest weights -> put finished groups into the queue

Each group keeps the version and digest of the weights that made it and the logprob the sampler recorded; `ledger`
refuses one that is too old or that other weights made. `sample_queue` says why no task is lost or trained twice.

Stopping: `stop` lets running tasks finish and returns a state that holds them. `save` may also be called between
updates with the workers running; what they are generating is then not in the state, and is generated anew. Either way
a loop built from the state trains the same tasks, in the same order, each once. A response is generated with one
version of the weights from its first token to its last: weights do not change under a running task.
"""
import os
import pathlib
from collections.abc import Callable
from typing import Protocol

import torch

from .rollout_workers import Rollout, Snapshot, WorkerPool
from .sample_queue import Group, SampleQueue
from .version_guard import WeightGuard
from .weight_sync import Manifest, SyncLedger


class Learner(Protocol):
    guard: WeightGuard

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """What the workers' engines get, under their names."""

    def update(self, groups: list[Group]) -> dict:
        """One optimizer step, which advances the guard by one version. Returns metrics."""

    def state(self) -> dict: ...

    def restore(self, state: dict) -> None:
        """Put the saved bytes back into the existing tensors."""


class AsyncLoop:
    """`with AsyncLoop(...) as loop: loop.run(100); loop.save(path)`; leaving the block kills the workers."""

    def __init__(
        self,
        learner: Learner,
        make_rollout: Callable[[], Rollout],
        *,
        workers: int,
        groups_per_update: int,
        max_lag: int,
        state: dict | None = None,
    ):
        self.learner = learner
        self.ledger = SyncLedger(max_lag)
        arrived: list[Group] = []
        if state is not None:
            learner.restore(state["learner"])
            learner.guard.reload(state["version"], state["digest"])
            self.ledger.digests.update({v: d for v, d in state["published"].items() if v < state["version"]})
            arrived = SampleQueue.restore(state["arrived"])
        self.queue = SampleQueue(groups_per_update, max_lag, learner.guard.version, arrived)
        self.pool = WorkerPool(make_rollout, workers, self.queue, self._snapshot())
        self.pool.start()

    def run(self, updates: int) -> list[dict]:
        """The metrics of `updates` further updates, each with its tasks and their lags."""
        return [self._update() for _ in range(updates)]

    def save(self, path: str | os.PathLike) -> None:
        """Replace `path` by the state as of the last update, or leave it as it was."""
        _write_whole(self.state(), pathlib.Path(path))

    def stop(self) -> dict:
        """Finish what is being generated, stop the workers, and return the state."""
        self.pool.finish()
        return self.state()

    def state(self) -> dict:
        guard = self.learner.guard
        return {
            "version": guard.version,
            "digest": guard.digest,
            "published": dict(self.ledger.digests),
            "learner": self.learner.state(),
            "arrived": self.queue.state(),
        }

    def __enter__(self) -> "AsyncLoop":
        return self

    def __exit__(self, *_) -> None:
        self.pool.abort()

    def _update(self) -> dict:
        version = self.learner.guard.version
        groups = self.queue.take()
        lags = [self.ledger.check(group.tag, version) for group in groups]
        metrics = self.learner.update(groups)
        if self.learner.guard.version != version + 1:
            raise RuntimeError(
                f"found version {self.learner.guard.version} after the update of version {version}, expected one more; "
                "let guard.watch(optimizer) advance it, and step once an update"
            )
        self.pool.publish(self._snapshot())  # before `trained`, which admits tasks that need at least these weights
        self.queue.trained()
        self.pool.wake()
        return {**metrics, "tasks": [group.task for group in groups], "lags": lags}

    def _snapshot(self) -> Snapshot:
        """A copy: the learner goes on writing to the weights while workers are still being sent these. What is copied
        is digested, where it lies, and not the copy: a worker's check then covers the way to the host as well."""
        exported = list(self.learner.weights())
        manifest = Manifest.of(self.learner.guard, exported)
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in exported}
        self.ledger.publish(manifest)
        return Snapshot(manifest.to_json(), tensors, manifest.version)


def _write_whole(state: dict, path: pathlib.Path) -> None:
    """Through a temporary file: a kill at any moment leaves the old state or the new one."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
