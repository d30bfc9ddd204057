"""The speed that was promised, measured by bench_apply.py: apply, plan, status and memory on both real upstreams.

The bounds are those of the promise. On two busy cores apply took 1.7 to 2.1 times `tar x` + `git apply`, 2.7 to 5.5 s,
and 27 MiB; a plan with nothing there, the longest, 1.0 to 1.5 s of CPU. Other work on the machine can only slow a run
down, so the best of three rounds counts, and a failure is measured twice more. CPU seconds depend less on it.
"""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from delivery import Store, sdist

LOOKS = ("plan_absent", "plan_pristine", "plan", "status_pristine", "status")
BOUNDS = {"apply_s": 10, "ratio": 3, "memory_mib": 500} | {
    f"{look}_{seconds}": 2 for look in LOOKS for seconds in ("s", "cpu_s")}


def measured(folder: Path) -> dict:
    """By a process of its own: a child's memory would count from its parent's, and this one may hold torch."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("bench_apply.py")), "--dir", str(folder)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return json.loads(done.stdout)


@pytest.mark.alone
def test_apply_plan_and_status_keep_their_bounds(tmp_path):
    for upstream in Store(tmp_path).pins.standard():
        sdist(upstream, upstream.release())  # into the cache, or skip: offline
    for _ in range(3):
        found = measured(tmp_path)
        over = {key: found[key] for key, bound in BOUNDS.items() if found[key] > bound}
        if not over:
            return
    pytest.fail(f"over the bounds {BOUNDS}: {over}; all: {found}")
