"""What a timing needs of the machine: a turn on it, the same cores for both sides, and nobody else at work."""
from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time

from prove.engine import EngineError

CORES = 8  # an engine's main thread and those that wait with it; both engines get the same ones
SHARE = 16  # idle: others use no more than one of so many cores, or than one core
GLANCE = 0.1  # seconds, ten ticks of a core
STAT = pathlib.Path("/proc/stat")


@contextlib.contextmanager
def turn(file: pathlib.Path | None, say, deadline: float):
    """The body runs while this process alone holds the file's lock: commands that name the same file start their
    engines side by side and time one after another. Whoever does other work first holds it with flock(1)."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as held:  # whatever it is, its content stays
        began = time.monotonic()
        while not _locked(held):
            if time.monotonic() > deadline:
                raise EngineError("timeout", f"no turn on the machine: {file} stayed locked to the end of the budget")
            time.sleep(0.2)
        say(f"got its turn after {time.monotonic() - began:.0f} s")
        yield


def require_turn(file: pathlib.Path | None) -> None:
    """Refuses a file that `turn` could not wait for, before minutes have gone into starting engines."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as held:
            _locked(held)  # whether it is free does not matter yet
    except OSError as error:
        raise ValueError(f"--turn {file}: it cannot be opened and locked ({error.strerror}); name a file in a folder "
                         "that can be written to") from None


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cores() -> list[int]:
    """The last of the cores this process may use, away from those that serve interrupts."""
    return sorted(os.sched_getaffinity(0))[-CORES:]


@contextlib.contextmanager
def pinned(processes: list[int], to: list[int]):
    """Within the body the main thread of each process, which decides how long a step takes, has the last core to itself
    and its other threads the rest; a thread started meanwhile inherits its starter's. The same cores for all of them,
    of which one works at a time: a core that a neighbour of the host slows down slows them alike. Afterwards every
    thread has what it had, and one that was started meanwhile what its process's main thread has."""
    before: dict[int, set[int]] = {}
    for process in processes:
        for task in _tasks(process):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                before[task] = os.sched_getaffinity(task)
                os.sched_setaffinity(task, to[-1:] if task == process else to[:-1] or to)
    try:
        yield
    finally:
        for process in processes:
            _allow(process, before)


def _tasks(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended; whoever asks it next says so
        return [int(path.name) for path in pathlib.Path(f"/proc/{process}/task").iterdir()]
    return []


def _allow(process: int, before: dict[int, set[int]]) -> None:
    """Gives every thread of the process its cores back; looks again, as one that had not got them may have started
    another meanwhile."""
    done: set[int] = set()
    while new := [task for task in _tasks(process) if task not in done]:
        for task in new:
            if own := before.get(task, before.get(process)):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(task, own)
        done.update(new)


def allowed() -> float:
    """How many cores others may use of a machine that is called idle."""
    return max(1.0, os.cpu_count() / SHARE)


def quiet(patience: float) -> tuple[float, float]:
    """Waits, with both engines asleep, until the machine is idle: (cores that are still busy, seconds it took). More
    than `allowed` of them: it was not idle within `patience` seconds."""
    began = time.monotonic()
    while True:
        busy = Busy()
        time.sleep(GLANCE)
        others = busy.mean()
        waited = time.monotonic() - began
        if others <= allowed() or waited >= patience:
            return round(others, 2), waited


class Busy:
    """Counts the machine's busy cores between its start and `mean()`, by everything that runs on it; `stolen()`: those
    of them that the host of a virtual machine gave to others meanwhile, where it says so."""

    def __init__(self):
        self.began, self.ticks = time.monotonic(), _ticks()

    def mean(self) -> float:
        return self._cores(sum)

    def stolen(self) -> float:
        return self._cores(lambda ticks: ticks[-1])

    def _cores(self, of) -> float:
        ticks = of(_ticks()) - of(self.ticks)
        return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self.began)


def _ticks() -> list[int]:
    """user, nice, system, interrupts of two kinds, stolen: neither idle nor waiting for a disk."""
    fields = STAT.read_text().split("\n", 1)[0].split()[1:9]
    return [int(ticks) for ticks in fields[:3] + fields[5:]]
