"""`prove counter`: each patch is needed. Without it, and with all the others, something must differ.

For every patch a copy of the site is patched anew without it (apply.py apply --without), an engine is started on that
copy and put through a few cases of the rollout. Counted as shown: a case that differs, or an engine that refuses batch
invariance at start-up. Where the engine notices nothing (a patch for other hardware, another layout), the patch's own
Counter-Test must pass: it shows the stock code at fault. The arm with every patch runs the same cases on the site
itself. Several arms run at once; a copy is hard links, and the carrier never writes through one.
"""
from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from prove import cases, record, workload
from prove.engine import Engine, EngineError
from prove.recipe import ROOT, Recipe
from prove.rollout import Context, _event, engine_start, run_case
from prove.ui import UI

CASES = ("base", "prefill-batched", "alone", "eager-steps", "chunked-512", "batch-sizes", "prefix-warm")
FLAGS = {"cudagraph_capture_sizes": [1, 4, 16, 32]}  # quick to capture; enough to tell graph from eager
WITH_ALL = "(all patches)"
REFUSALS = ("batch_invariant", "batch invarian")


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


def read_patches(root: pathlib.Path = ROOT) -> dict[str, list[str]]:
    """Slug -> its counter-tests, in the order of the series."""
    folder = root / "patches" / "vllm"
    slugs = [line.split("#")[0].strip() for line in (folder / "series").read_text().splitlines()]
    return {slug: _trailers((folder / f"{slug}.patch").read_text(), "Counter-Test") for slug in slugs if slug}


def _trailers(text: str, name: str) -> list[str]:
    head = text.partition("\n---\n")[0]
    return [line.partition(":")[2].strip() for line in head.splitlines() if line.startswith(f"{name}:")]


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


def _engine_arm(recipe: Recipe, ui: UI, work, env, logs, deadline: float, name: str, backend: str):
    """Rows of the cases until one differs, and why the engine refused to start, if it did; and what it was bound to."""
    start, environment = engine_start(recipe, True, FLAGS)
    try:
        engine = Engine(start, backend=backend, env=environment | env, log=logs / f"counter-{name}.log",
                        on_event=lambda event: _event(ui, event), timeout=max(1.0, deadline - time.monotonic()))
    except EngineError as error:
        if error.kind == "timeout":
            raise
        return [], str(error).partition("(log: ")[0].strip(), None
    rows, context = [], Context(work)
    with engine:
        bound = record.bind(pathlib.Path(engine.info["vllm_path"]).parent)
        for case in (cases.BY_NAME[c] for c in CASES):
            left = deadline - time.monotonic()
            row = run_case(context, case, engine, engine.info["cache_block"], min(case.timeout, max(1.0, left)))
            rows.append({k: v for k, v in row.items() if k != "runs"})
            if row["state"] != "equal":
                break
    return rows, None, bound


def unit_arm(tests: list[str], env: dict[str, str]) -> tuple[bool, str]:
    """Whether the counter-tests ran and passed; a skipped one shows nothing."""
    if not tests:
        return False, "it names no Counter-Test"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return done.returncode == 0 and "passed" in last and "skipped" not in last, last


def _arm_without(slug: str, counter_tests: list[str], site: pathlib.Path, env: dict[str, str], run) -> dict:
    """The row of one patch: `run(slug, env)` on a copy of the site without it."""
    # Beside the site: hard links need one file system.
    with tempfile.TemporaryDirectory(prefix=f"without-{slug}-", dir=site.parent) as folder:
        copy_without(site, pathlib.Path(folder), slug)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        rows, refused, _ = run(slug, env | {"PYTHONPATH": path})
    state, why = verdict(rows, refused)
    if state == "unseen":
        passed, said = unit_arm(counter_tests, env)
        state, why = ("shown", f"by its Counter-Test: {said}") if passed else ("unseen", f"{why}; {said}")
    return {"patch": slug, "state": state, "why": why, "rows": rows}


def counter(recipe: Recipe, ui: UI, *, site: pathlib.Path, patches: list[str] | None, tokens: int, at_once: int,
            out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str], backend: str = "vllm") -> dict:
    known = read_patches()
    if unknown := sorted(set(patches or ()) - set(known)):
        raise ValueError(f"no such patch: {', '.join(unknown)}; there are: {', '.join(known)}")
    kept = record.Record("counter", recipe.subject, {"tokens": tokens, "cases": list(CASES)}, out)
    earlier = _earlier(kept.path)
    work, deadline = workload.build(tokens, recipe.vocab), time.monotonic() + budget
    chosen = [slug for slug in known if not patches or slug in patches]

    def run(name: str, environment: dict[str, str]):
        return _engine_arm(recipe, ui, work, environment, logs, deadline, name, backend)

    def without(slug: str) -> dict:
        if deadline - time.monotonic() < 60:
            return {"patch": slug, "state": "not run", "why": "out of budget"}
        try:
            return _arm_without(slug, known[slug], site, env, run)
        except EngineError as error:
            return {"patch": slug, "state": "not run", "why": str(error)}

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        whole, arms = pool.submit(run, "with", env), [pool.submit(without, slug) for slug in chosen]
        rows, refused, bound = whole.result()
        equal = not refused and all(r["state"] == "equal" for r in rows)
        kept.data["engines"]["with"] = {"lock": bound or {"state": "refused"}}
        if earlier.get("lock") == bound:  # rows made against the same lock stay; a lease holds only a few patches
            for row in earlier["rows"]:
                if row["patch"] not in [*chosen, WITH_ALL]:
                    kept.row(row)
        kept.row({"patch": WITH_ALL, "state": "equal" if equal else "failed", "why": refused or "", "rows": rows})
        ui.note(f"{WITH_ALL}: {kept.data['rows'][-1]['state']}")
        for arm in concurrent.futures.as_completed(arms):
            row = arm.result()
            kept.row(row)
            ui.note(f"without {row['patch']}: {row['state']}: {row['why']}")
    states = {row["patch"]: row["state"] for row in kept.data["rows"]}
    locked = bool(bound) and bound["state"] == "locked"
    kept.finish(locked and set(states) == {*known, WITH_ALL} and "not run" not in states.values(),
                all(state == ("equal" if patch == WITH_ALL else "shown") for patch, state in states.items()))
    return kept.data


def _earlier(path: pathlib.Path) -> dict:
    """Rows of the record that is about to be replaced, with what its engine was bound to."""
    try:
        data = json.loads(path.read_text())
        return {"rows": data["rows"], "lock": data["engines"]["with"]["lock"]}
    except (FileNotFoundError, KeyError, ValueError):
        return {"rows": []}
