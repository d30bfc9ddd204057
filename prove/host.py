"""Where the thread that drives the engine spends a step: its own time by function, waits for the GPU included.

cProfile counts every call and so stretches Python by two or three; what is read off is the difference between two
engines, and whether a step waits for the GPU at all (`synchronize`, `result`).
"""
from __future__ import annotations

import cProfile
import pathlib
import pstats

MOST = 60  # functions kept: those with the most own time


class HostProfile:
    """start() and stop() in the thread to be profiled."""

    def __init__(self):
        self.profile = cProfile.Profile()
        self.steps = 0

    def start(self) -> None:
        self.profile.enable()

    def stop(self) -> None:
        self.profile.disable()

    def summary(self) -> list[dict]:
        """Function, calls a step, own microseconds a step; the most own time first."""
        if not self.steps:
            return []
        rows = [{"function": _name(path, line, function), "calls": calls / self.steps, "own_us": own * 1e6 / self.steps}
                for (path, line, function), (_, calls, own, *_) in pstats.Stats(self.profile).stats.items()]
        return sorted(rows, key=lambda row: -row["own_us"])[:MOST]


def _name(path: str, line: int, function: str) -> str:
    return function if path == "~" else f"{'/'.join(pathlib.PurePath(path).parts[-2:])}:{line} {function}"


def differences(off: list[dict], on: list[dict], most: int = 12) -> list[dict]:
    """Functions whose own time differs most between two profiles, the slower side's first."""
    times = [{row["function"]: row["own_us"] for row in side} for side in (off, on)]
    rows = [{"function": name, "off_us": times[0].get(name, 0.0), "on_us": times[1].get(name, 0.0)}
            for name in {**times[0], **times[1]}]
    return sorted(rows, key=lambda row: -abs(row["on_us"] - row["off_us"]))[:most]
