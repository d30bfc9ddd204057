"""Compiles a recipe's JIT kernels in parallel, one process a job, before the first engine starts.

A cold engine compiles its kernels one after another, each on one core. A recipe may name a script with JOBS, a dict of
name -> function that makes a kernel compile; what they leave in the disk caches is found by the engines. Jobs are a
head start, never a proof: one that fails is reported and the engine compiles for itself.
"""
from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

from prove.recipe import ROOT


def run(script: pathlib.Path, env: dict[str, str], logs: pathlib.Path, timeout: float, say,
        workers: int | None = None, wanted: list[str] | None = None) -> list[dict]:
    """One row a job: name, seconds, and the end of its log if it failed. `wanted`: patterns of whole names."""
    names = [name for name in _ask(script, env, logs)
             if wanted is None or any(re.fullmatch(pattern, name) for pattern in wanted)]
    workers = workers or max(1, (os.cpu_count() or 2) - 2)
    deadline = time.monotonic() + timeout
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_job, script, name, env, logs, deadline) for name in names]
        rows = []
        for future in concurrent.futures.as_completed(futures):
            rows.append(future.result())
            say(f"compiled {rows[-1]['job']} in {rows[-1]['seconds']} s"
                + (f" FAILED: {rows[-1]['error']}" if "error" in rows[-1] else ""))
    return rows


def _command(script: pathlib.Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "prove.precompile", str(script), *arguments]


def _environment(env: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {**os.environ, **env, "PYTHONPATH": path}


def _ask(script: pathlib.Path, env: dict[str, str], logs: pathlib.Path) -> list[str]:
    logs.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(_command(script), env=_environment(env), capture_output=True, text=True, check=True)
    return done.stdout.split()


def _job(script: pathlib.Path, name: str, env: dict[str, str], logs: pathlib.Path, deadline: float) -> dict:
    started, log = time.monotonic(), logs / f"precompile-{name}.log"
    row = {"job": name}
    try:
        with log.open("w") as output:
            done = subprocess.run(_command(script, name), env=_environment(env),
                                  stdout=output, stderr=subprocess.STDOUT,
                                  timeout=max(1.0, deadline - started), check=False)
        code = done.returncode
    except subprocess.TimeoutExpired:
        code = "time"
    if code:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        row["error"] = f"{code}: {last[0] if last else 'no output'}"
    return row | {"seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    from prove.scripts import load

    jobs = load(sys.argv[1]).JOBS
    if len(sys.argv) == 2:
        print("\n".join(jobs))
    else:
        jobs[sys.argv[2]]()


if __name__ == "__main__":
    main()
