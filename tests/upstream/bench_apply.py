#!/usr/bin/env python3
"""How long apply takes, against the least anyone can do: `tar x` of the sdists and `git apply` of the same patches.

Both from a warm archive cache, each round into new folders, in turns; the best of the rounds counts (other work on the
machine can only slow a run down). Also plan and status, with the seconds of CPU that they and git take, which hold on
a busy machine too, and the largest memory of any process. Prints one JSON object.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from patchset import fetch, pins, series  # noqa: E402

LOOKS = {"plan_absent": "plan with nothing there", "plan_pristine": "plan of pristine trees",
         "plan": "plan of patched trees", "status_pristine": "status of pristine trees",
         "status": "status of patched trees"}
VERBS = (("plan_absent", "plan"), ("apply", "apply"), ("again", "apply"), ("plan", "plan"), ("status", "status"),
         ("verify", "verify"), ("revert", "revert"), ("plan_pristine", "plan"), ("status_pristine", "status"))
CHECKOUT = ["apply.py", "patchset", "patchset.toml", "patchset.lock", "patches", "overlays"]


def copy_checkout(place: Path) -> Path:
    place.mkdir()
    for name in CHECKOUT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name)
        else:
            shutil.copy2(ROOT / name, place / name)
    return place


def timed(command: list, **options) -> tuple[float, float, int]:
    """Wall seconds; CPU seconds, and the largest resident set in MiB, of the process and any child of it."""
    begun = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, **options)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10


def baseline(work: Path, archives: dict[str, Path], patches: dict[str, list[Path]]) -> float:
    """tar and git only: no check of the archive, the target or the result, no overlays, no way back."""
    begun = time.perf_counter()
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(work)}  # else git looks for a repository above, and does nothing
    for name, archive in archives.items():
        tree = work / name
        tree.mkdir(parents=True)
        subprocess.run(["tar", "xzf", archive, "--strip-components=1", "-C", tree], check=True)
        if patches[name]:
            subprocess.run(["git", "apply", "--whitespace=nowarn", *patches[name]], cwd=tree, env=env, check=True)
    return time.perf_counter() - begun


def measure(rounds: int, where: Path | None) -> dict:
    loaded = pins.load(ROOT)
    archives = {up.name: fetch.sdist(up, up.release()) for up in loaded.standard()}
    best: dict[str, float] = {}
    memory = 0
    with tempfile.TemporaryDirectory(prefix="bench-", dir=where) as folder:
        work = Path(folder)
        patches = {up.name: write_patches(work / "patches" / up.name, up.name, up.release().version)
                   for up in loaded.standard()}
        for number in range(rounds):
            checkout = copy_checkout(work / f"checkout-{number}")
            tool = [sys.executable, checkout / "apply.py"]
            found = {"baseline_s": baseline(work / f"baseline-{number}", archives, patches)}
            for key, verb in VERBS:
                found[f"{key}_s"], found[f"{key}_cpu_s"], used = timed([*tool, verb])
                memory = max(memory, used)
            best = {key: min(value, best.get(key, value)) for key, value in found.items()}
    return {**{key: round(value, 3) for key, value in best.items()},
            "ratio": round(best["apply_s"] / best["baseline_s"], 2), "memory_mib": memory, "rounds": rounds,
            "cores": os.cpu_count()}


def write_patches(folder: Path, upstream: str, version: str) -> list[Path]:
    """The series as files for git, in order; a release may have its own form of a patch."""
    folder.mkdir(parents=True)
    made = []
    for patch in series.load(ROOT, upstream, version):
        made.append(folder / f"{len(made):03}.patch")
        made[-1].write_bytes(patch.text)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="on which disk (default: that of temporary files)")
    args = parser.parse_args()
    found = measure(args.rounds, args.dir)
    print(json.dumps(found, indent=1))
    print(f"apply of both upstreams: {found['apply_s']} s, {found['ratio']} times tar x + git apply "
          f"({found['baseline_s']} s); at most {found['memory_mib']} MiB", file=sys.stderr)
    for key, what in LOOKS.items():
        print(f"{what}: {found[f'{key}_s']} s, {found[f'{key}_cpu_s']} s of CPU", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
