"""Progress of long work on a terminal. In a pipe, a file or a dumb terminal nothing is written."""
from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL = 0.1  # seconds between two drawings
CELLS = 24
CLEAR = "\r\x1b[K"


def on_terminal() -> bool:
    """Whether someone watches stderr (None: the caller closed it)."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def bar(label: str, total: int | None, *, unit: str = "MB") -> Iterator[Callable[[int], None]]:
    """Yield `advance(n)`, called with what was done since the last call: bytes if unit is "MB", else things.

    total: None where it is not known. The line is wiped at the end, also after an error.
    """
    if not on_terminal() or os.environ.get("TERM") == "dumb":
        yield lambda n: None
        return
    done, drawn = 0, 0.0

    def advance(n: int) -> None:
        nonlocal done, drawn
        done += n
        now = time.monotonic()
        if now - drawn >= INTERVAL:
            drawn = now
            _draw(label, done, total, unit)

    try:
        advance(0)
        yield advance
    finally:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()


def _draw(label: str, done: int, total: int | None, unit: str) -> None:
    scale = 1e6 if unit == "MB" else 1
    digits = 1 if unit == "MB" else 0
    if total:
        full = min(CELLS, CELLS * done // total)
        text = f"{label} [{'#' * full:.<{CELLS}}] {done / scale:.{digits}f}/{total / scale:.{digits}f} {unit}"
    else:
        text = f"{label} {done / scale:.{digits}f} {unit}" if done else f"{label} ..."
    sys.stderr.write(CLEAR + text[: shutil.get_terminal_size().columns - 1])
    sys.stderr.flush()
