"""Which tasks are generated, when, and for which update: the bookkeeping of the asynchronous loop.

A task is one prompt with its group of responses. Update u takes the weights from version u to u + 1 and trains on
tasks u b .. u b + b - 1, in that order, whatever order they finish in.

Invariant: every task is trained exactly once, by its own update, and its sample is at most `max_lag` versions old. It
holds by construction. Task n belongs to update n // b, so there is one place it can be trained; it is issued only
while n // b <= version + max_lag, so what a worker generates with is young enough when its turn comes. The same rule
is the backpressure: at most (max_lag + 1) b tasks exist beyond the last update, and a learner that stalls stalls the
workers. A straggler holds the learner up only if it is still running max_lag updates after it was issued.
"""
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from .weight_sync import Tag


@dataclass(frozen=True)
class Group:
    """One finished task. tokens and logprobs (fp32, as the sampler recorded them): one [T_i] tensor a response."""

    task: int
    tag: Tag
    tokens: list[torch.Tensor]
    logprobs: list[torch.Tensor]
    rewards: list[float]


class SampleQueue:
    """Shared by the learner's thread and the pool's."""

    def __init__(self, groups_per_update: int, max_lag: int, version: int = 0, arrived: Iterable[Group] = ()):
        if groups_per_update < 1 or max_lag < 0:
            raise ValueError(
                f"found groups_per_update {groups_per_update} and max_lag {max_lag}, expected at least 1 and 0"
            )
        self._size, self._max_lag, self.version = groups_per_update, max_lag, version
        self._arrived = {group.task: group for group in arrived}
        self._issued: set[int] = set()
        self._open = True
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        outside = [task for task in self._arrived if task not in self._window()]
        if outside:
            raise ValueError(
                f"found saved tasks {outside[:3]} at version {version}, expected only {self._window()}; the checkpoint "
                "was made with another groups_per_update or a larger max_lag: resume with the same"
            )

    def issue(self) -> int | None:
        """The next task to generate, or None while the window is full."""
        with self._changed:
            if not self._open:
                return None
            for task in self._window():
                if task not in self._arrived and task not in self._issued:
                    self._issued.add(task)
                    return task
            return None

    def give_back(self, task: int) -> None:
        """Its worker died: it will be issued again."""
        with self._changed:
            self._issued.discard(task)

    def put(self, group: Group) -> None:
        with self._changed:
            if group.task not in self._issued:
                raise RuntimeError(f"found a result for task {group.task}, which nobody is generating; a worker erred")
            self._issued.discard(group.task)
            self._arrived[group.task] = group
            self._changed.notify_all()

    def take(self) -> list[Group]:
        """Wait for the groups of the next update. They stay in the queue until `trained`."""
        with self._changed:
            tasks = self._tasks_of(self.version)
            self._wait_for(tasks)
            return [self._arrived[task] for task in tasks]

    def fill(self) -> None:
        """Wait until the window is full: its last samples will then be `max_lag` versions old when they are trained."""
        with self._changed:
            self._wait_for(self._window())

    def trained(self) -> None:
        """The update was applied, and its weights published."""
        with self._changed:
            for task in self._tasks_of(self.version):
                del self._arrived[task]
            self.version += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Issue nothing more. What is being generated may still arrive."""
        with self._changed:
            self._open = False

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def counts(self) -> tuple[int, int]:
        """Arrived and being generated."""
        with self._changed:
            return len(self._arrived), len(self._issued)

    def issued(self) -> list[int]:
        """The tasks that are being generated."""
        with self._changed:
            return sorted(self._issued)

    def state(self) -> list[dict]:
        """The arrived groups, as plain values; `restore` reads them."""
        with self._changed:
            return [{**asdict(group), "tag": tuple(group.tag)} for _, group in sorted(self._arrived.items())]

    @staticmethod
    def restore(state: list[dict]) -> list[Group]:
        return [Group(**{**group, "tag": Tag(*group["tag"])}) for group in state]

    def _wait_for(self, tasks: range) -> None:
        self._changed.wait_for(lambda: self._error or all(task in self._arrived for task in tasks))
        if self._error:
            raise self._error

    def _tasks_of(self, update: int) -> range:
        return range(update * self._size, (update + 1) * self._size)

    def _window(self) -> range:
        return range(self.version * self._size, (self.version + self._max_lag + 1) * self._size)
