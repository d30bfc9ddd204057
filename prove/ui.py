"""What is shown: progress bars and rows on a terminal, rows alone in a pipe, nothing but JSON with --json."""
from __future__ import annotations

import contextlib
import sys
import time


class UI:
    def __init__(self, json_only: bool = False, stream=None):
        self.json_only = json_only
        self.stream = stream or sys.stdout
        self.terminal = not json_only and self.stream.isatty()
        self.started = time.monotonic()
        self.progress = None

    def say(self, text: str = "") -> None:
        if self.json_only:
            return
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def note(self, text: str) -> None:
        """A line about time, wanted in a log and on a terminal alike."""
        self.say(f"[{time.monotonic() - self.started:7.1f} s] {text}")

    @contextlib.contextmanager
    def bar(self, title: str, total: int):
        """Yields a function that advances the bar and renames it."""
        progress = _rich_progress() if self.terminal else None
        if progress is None:
            yield lambda text="": None
            return
        with progress.Progress(progress.TextColumn("{task.description}"), progress.BarColumn(),
                               progress.MofNCompleteColumn(), progress.TimeElapsedColumn()) as bars:
            self.progress = bars
            task = bars.add_task(title, total=total)
            try:
                yield lambda text="": bars.update(task, advance=1, description=text or title)
            finally:
                self.progress = None


def _rich_progress():
    """rich.progress, or None where rich is not installed: then the rows alone are the progress."""
    try:
        from rich import progress
    except ImportError:
        return None
    return progress


def table(headings: list[str], rows: list[list]) -> str:
    cells = [headings, *[[cell(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    def line(row: list[str]) -> str:
        padded = zip(row, widths, strict=True)
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(padded)).rstrip()
    return "\n".join(map(line, cells))


def cell(value) -> str:
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
