"""What a timing needs of the machine: a turn on it, the same cores for both sides, and how busy it was meanwhile."""
from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time

from prove.engine import EngineError

CORES = 8  # an engine's main thread and those that wait with it; both engines get the same ones
STAT = pathlib.Path("/proc/stat")


@contextlib.contextmanager
def turn(file: pathlib.Path | None, say, deadline: float):
    """The body runs while this process alone holds the file's lock: commands that name the same file start their
    engines side by side and time one after another. Whoever does other work first holds it with flock(1)."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as held:
        began = time.monotonic()
        while not _locked(held):
            if time.monotonic() > deadline:
                raise EngineError("timeout", f"no turn on the machine: {file} stayed locked to the end of the budget")
            time.sleep(0.2)
        say(f"got its turn after {time.monotonic() - began:.0f} s")
        yield


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cores() -> list[int]:
    """The last of the cores this process may use, away from those that serve interrupts."""
    return sorted(os.sched_getaffinity(0))[-CORES:]


def pin(process: int, to: list[int]) -> None:
    """Every thread of the process; what it starts later inherits it."""
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), to)


class Busy:
    """Counts the machine's busy cores between its start and `mean()`, by everything that runs on it."""

    def __init__(self):
        self.began, self.ticks = time.monotonic(), _busy_ticks()

    def mean(self) -> float:
        seconds = time.monotonic() - self.began
        return (_busy_ticks() - self.ticks) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    user, nice, system, _, _, *interrupts = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return user + nice + system + sum(interrupts)
