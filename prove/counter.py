"""`prove counter`: each patch is needed. Without it, and with all the others, something must differ.

For every patch a copy of the site is patched anew without it (apply.py apply --without), an engine is started on that
copy and put through a few cases of the rollout. Counted as shown: a case that differs, or an engine that refuses batch
invariance at start-up. Where the engine notices nothing (a patch for other hardware, another layout) or did not run,
the patch's own Counter-Tests must pass: they show the stock code at fault (counter_tests.py). The arm with every patch
runs the same cases on the site itself. Several arms run at once, over the GPUs that CUDA_VISIBLE_DEVICES names; a copy
is hard links, and the carrier never writes through one.
A record grows from run to run while the lock is the same: `--tests-only` on a CPU, then arms on a GPU. A Counter-Test
that has passed is asked again where its text is another now.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time

from prove import cases, counter_tests, record, workload
from prove.counter_tests import read_patches
from prove.engine import Engine, EngineError
from prove.recipe import ROOT, Recipe
from prove.rollout import Context, _event, engine_start, run_case
from prove.ui import UI

CASES = ("base", "prefill-batched", "alone", "eager-steps", "chunked-512", "batch-sizes", "prefix-warm")
FLAGS = {"cudagraph_capture_sizes": [1, 4, 16, 32],  # quick to capture; enough to tell graph from eager
         "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.1}  # a few requests, many engines
WITH_ALL = "(all patches)"
REFUSALS = ("batch_invariant", "batch invarian")
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")  # of this machine, of no use in a record


def apply(site: pathlib.Path, *arguments: str) -> None:
    """Runs the carrier on the site; its refusal is ours."""
    command = [sys.executable, str(ROOT / "apply.py"), *arguments, "--upstream", "vllm", "--site", str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"apply.py {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")


def copy_without(site: pathlib.Path, folder: pathlib.Path, slug: str) -> None:
    """`folder` becomes a site with the site's vllm, patched with everything but `slug` and what depends on it."""
    for part in (site / "vllm", *site.glob("vllm-*.dist-info")):
        shutil.copytree(part, folder / part.name, copy_function=os.link, symlinks=True)
    apply(folder, "revert")
    apply(folder, "apply", "--without", slug)


def verdict(rows: list[dict], refused: str | None) -> tuple[str, str]:
    """(shown | unseen | failed, why) from what the engine did in the arm without the patch."""
    if refused:
        meant = any(words in refused.lower() for words in REFUSALS)  # not an import error or a lack of memory
        return ("shown", f"refused at start-up: {refused}") if meant else ("failed", refused)
    for row in rows:
        if row["state"] == "differs":
            return "shown", f"{row['case']}: {row['differing_words']} of {row['tokens']} words differ"
        if row["state"] != "equal":
            return "failed", f"{row['case']}: {row.get('error') or row['unmet']}"
    return "unseen", "every case agrees without it"


def portable(error: EngineError | str) -> str:
    """What the engine said, without the places it names on this machine."""
    return FOLDERS.sub("", str(error).partition("(log: ")[0].strip())


def _engine_arm(recipe: Recipe, ui: UI, work, env, logs, deadline: float, name: str, backend: str):
    """Rows of the cases until one differs, and why the engine refused to start, if it did; and what it was bound to."""
    start, environment = engine_start(recipe, True, FLAGS)
    try:
        engine = Engine(start, backend=backend, env=environment | env, log=logs / f"counter-{name}.log",
                        on_event=lambda event: _event(ui, event), timeout=max(1.0, deadline - time.monotonic()))
    except EngineError as error:
        if error.kind == "timeout":
            raise
        return [], portable(error), None
    rows, context = [], Context(work)
    with engine:
        bound = record.bind(pathlib.Path(engine.info["vllm_path"]).parent)
        for case in (cases.BY_NAME[c] for c in CASES):
            left = deadline - time.monotonic()
            row = run_case(context, case, engine, engine.info["cache_block"], min(case.timeout, max(1.0, left)))
            rows.append({k: portable(v) if k == "error" else v for k, v in row.items() if k != "runs"})
            if row["state"] != "equal":
                break
    return rows, None, bound


def _arm_without(slug: str, site: pathlib.Path, env: dict[str, str], run) -> dict:
    """What the engine says of one patch: `run(slug, env)` on a copy of the site without it."""
    # Beside the site: hard links need one file system.
    with tempfile.TemporaryDirectory(prefix=f"without-{slug}-", dir=site.parent) as folder:
        copy_without(site, pathlib.Path(folder), slug)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        rows, refused, bound = run(slug, env | {"PYTHONPATH": path})
    if bound and bound["state"] == "locked":
        raise ValueError(f"without {slug}: the engine imported another vLLM, one with every patch, and not its copy; "
                         "run it from a folder that has no vllm in it")
    state, why = verdict(rows, refused)
    return {"engine": state, "engine_why": why, "rows": rows}


def joined(slug: str, arm: dict, tests: list[str], said: dict[str, str]) -> dict:
    """The row of one patch: the engine's arm decides, and where it shows nothing the Counter-Tests do."""
    row = {"patch": slug, "state": arm["engine"], "why": arm["engine_why"], **arm,
           "counter_tests": {test: said[test] for test in tests}}
    if arm["engine"] == "shown":
        return row
    passed, why = counter_tests.verdict(tests, said)
    return row | {"state": "shown" if passed else arm["engine"],
                  "why": f"Counter-Tests: {why}; engine {arm['engine']}: {arm['engine_why']}"}


class Devices:
    """Hands out the GPUs of CUDA_VISIBLE_DEVICES in turn, to at most `at_once` engines together."""

    def __init__(self, at_once: int):
        names = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        self.free: queue.Queue = queue.Queue()
        for index in range(at_once):
            self.free.put({"CUDA_VISIBLE_DEVICES": names[index % len(names)]} if names else {})

    @contextlib.contextmanager
    def one(self):
        device = self.free.get()
        try:
            yield device
        finally:
            self.free.put(device)


def counter(recipe: Recipe, ui: UI, *, site: pathlib.Path, patches: list[str] | None, tests_only: bool, tokens: int,
            at_once: int, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
            backend: str = "vllm") -> dict:
    known = read_patches()
    if unknown := sorted(set(patches or ()) - set(known)):
        raise ValueError(f"no such patch: {', '.join(unknown)}; there are: {', '.join(known)}")
    deadline, lock = time.monotonic() + budget, record.bind(site)
    kept = record.Record("counter", recipe.subject, {"tokens": tokens, "cases": list(CASES)}, out)
    earlier = _earlier(kept.path, lock)
    chosen = [] if tests_only else [slug for slug in known if not patches or slug in patches]

    def ask() -> dict[str, str]:
        """What the Counter-Tests say; and the rows of the patches that no engine runs without, now or before."""
        kept.data["counter_tests"] = tests = _tests(earlier, lock, known, env, logs, ui)
        for slug in known:
            if slug not in chosen:
                arm = earlier["arms"].get(slug, {"engine": "not run", "engine_why": "not asked for", "rows": []})
                kept.row(joined(slug, arm, known[slug], tests["said"]))
        return tests["said"]

    whole = None
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        asking = beside.submit(ask)

        def row(slug: str, arm: dict) -> None:
            kept.row(joined(slug, arm, known[slug], asking.result()))
            ui.note(f"without {slug}: {kept.data['rows'][-1]['state']}: {kept.data['rows'][-1]['why']}")

        if chosen:
            whole = _arms(recipe, ui, workload.build(tokens, recipe.vocab), kept, row, chosen, site=site,
                          at_once=at_once, logs=logs, deadline=deadline, env=env, backend=backend)
        asking.result()
    states = {each["patch"]: each["state"] for each in kept.data["rows"]}
    locked = bool(whole) and whole["state"] == "locked" and lock["state"] == "locked"
    kept.finish(locked and set(states) == {*known, WITH_ALL} and "not run" not in states.values(),
                all(state == ("equal" if patch == WITH_ALL else "shown") for patch, state in states.items()))
    return kept.data


def _arms(recipe: Recipe, ui: UI, work: workload.Workload, kept: record.Record, row, chosen: list[str], *,
          site: pathlib.Path, at_once: int, logs: pathlib.Path, deadline: float, env: dict[str, str],
          backend: str) -> dict | None:
    """The engine's arms, with every patch and without each one chosen; what the former was bound to."""
    devices = Devices(at_once)

    def run(name: str, environment: dict[str, str]):
        with devices.one() as device:
            return _engine_arm(recipe, ui, work, environment | device, logs, deadline, name, backend)

    def without(slug: str) -> tuple[str, dict]:
        if deadline - time.monotonic() < 60:
            return slug, {"engine": "not run", "engine_why": "out of budget", "rows": []}
        try:
            return slug, _arm_without(slug, site, env, run)
        except EngineError as error:
            return slug, {"engine": "not run", "engine_why": portable(error), "rows": []}

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        whole, arms = pool.submit(run, "with", env), [pool.submit(without, slug) for slug in chosen]
        for arm in concurrent.futures.as_completed(arms):
            if not arm.exception():  # else it is raised below, when the others have their rows
                row(*arm.result())
        rows, refused, bound = whole.result()
    equal = not refused and all(r["state"] == "equal" for r in rows)
    kept.data["engines"]["with"] = {"lock": bound or {"state": "refused"}}
    kept.row({"patch": WITH_ALL, "state": "equal" if equal else "failed", "why": refused or "", "rows": rows})
    ui.note(f"{WITH_ALL}: {kept.data['rows'][-1]['state']}")
    for arm in arms:
        arm.result()
    return bound


def _tests(earlier: dict, lock: dict, known: dict[str, list[str]], env: dict[str, str], logs: pathlib.Path,
           ui: UI) -> dict:
    """What the Counter-Tests said, under this lock and as they are written today: of an earlier run, and now of those
    that had not passed."""
    every = [test for tests in known.values() for test in tests]
    texts = counter_tests.texts(every)
    said = {test: earlier["said"].get(test, "missing") for test in every}
    asked = [test for test, outcome in said.items()
             if outcome != "passed" or test not in texts or earlier["texts"].get(test) != texts[test]]
    now = counter_tests.run(asked, env, logs)
    ui.note(f"Counter-Tests: {len(said) - len(asked)} had passed; of {len(now)} more "
            f"{sum(outcome == 'passed' for outcome in now.values())} pass")
    versions = list(earlier["versions"]) if len(asked) < len(said) else []
    if asked and (today := counter_tests.versions()) not in versions:
        versions.append(today)
    return {"lock": lock, "said": said | now, "texts": texts, "versions": versions}


def _earlier(path: pathlib.Path, lock: dict) -> dict:
    """What stays of the record that is about to be replaced: all of it if it was made with the same lock. One of before
    the tests' texts were kept has none, so all its tests are asked again."""
    try:
        data = json.loads(path.read_text())
        if data["counter_tests"]["lock"] == lock:
            arms = {row["patch"]: {key: row[key] for key in ("engine", "engine_why", "rows")} for row in data["rows"]
                    if row["patch"] != WITH_ALL and row["engine"] != "not run"}
            tests = data["counter_tests"]
            return {"arms": arms, "said": tests["said"], "texts": tests.get("texts", {}), "versions": tests["versions"]}
    except (FileNotFoundError, KeyError, ValueError):
        pass
    return {"arms": {}, "said": {}, "texts": {}, "versions": []}
