"""`prove cost`: the aligned trainer's time and memory beside the same model in ordinary BF16.

Forward alone (a scoring pass), forward and backward, and the optimizer's step, on packed batches, with and without
recomputation; and for a model whose weights are quantised the share of that, with and without the cache that keeps them
for one version. What `ordinary` is, the module of that model says (ordinary_nemotron_h.py, ordinary_deepseek_v4.py).
Two processes on one GPU, run by run in turns. Times are medians by the clock of synchronised runs; what their kernels
alone take stands beside, for a small model's step is the host's. Claims no bound on the cost: the record passes if
everything was measured and both models give about the same logprobs, so that it was one model twice.
"""
from __future__ import annotations

import pathlib
import statistics
import time

import numpy as np

from prove import record
from prove.engine import unpack
from prove.recipe import Recipe
from prove.rollout import engine_start
from prove.together import Part, started
from prove.ui import UI, table

BATCHES = ((256,) * 16, (4096,))  # 4,096 tokens each: many answers, and one long
KINDS = ("ordinary", "aligned")
WARM = 1       # rounds before the first that counts: they compile
LEAST = 3      # rounds that count, however long they take
SECONDS = 20   # no further round of a batch begins after so long
APART = 0.5    # mean distance of logprobs: BF16 and FP8 leave 0.01 to 0.2, models that share nothing are 3 apart


def cost(recipe: Recipe, ui: UI, *, runs: int, out: pathlib.Path, logs: pathlib.Path, budget: float,
         env: dict[str, str], backend: str = "cost") -> dict:
    if recipe.weights_script is None:
        raise ValueError("prove cost makes a small model's weights itself, and a checkpoint's size does not fit: "
                         "add --tiny")
    kept = record.Record("cost", recipe.subject, {"batches": [[len(b), b[0]] for b in BATCHES], "runs": runs}, out)
    deadline = time.monotonic() + budget

    def part(kind: str) -> Part:
        start, environment = engine_start(recipe, kind == "aligned")
        return Part({**start, "flags": {"kind": kind}}, environment, backend)

    with started({kind: part(kind) for kind in KINDS}, kept, ui, env=env, logs=logs, deadline=deadline) as workers:
        kept.actor(workers["aligned"].info)

        def ask(op: str, kinds: tuple[str, ...] = KINDS, **arguments) -> dict:
            """The processes, one after the other."""
            return {kind: workers[kind].call_by(deadline, op, **arguments) for kind in kinds}

        built = kept.data["built"] = ask("build")
        ui.note(f"{built['aligned']['parameters']:,} parameters; weights, gradients and optimizer: "
                + ", ".join(f"{kind} {one['held_mib']:,} MiB" for kind, one in built.items()))
        rows, apart = [], []
        for lengths in BATCHES:
            found = _measure(ask, lengths, runs)
            apart.append(_distance(ask("logprobs", lengths=lengths)))
            for row in found:
                kept.row(row)
            ui.say(_table(found))
            rows += found
        kept.data["optimizer_ms"] = steps = _median_of(ask, "step", KINDS)
        ui.say("an optimizer step: " + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in steps.items())
               + f"; mean distance of the two models' logprobs: {max(apart):.3f}")
        if built["aligned"]["quantised"]:
            kept.data["requantisation"] = _requantisation(
                rows, _median_of(ask, "quantise", ("aligned",))["aligned"], ui)
    kept.finish(kept.locked, all(distance < APART for distance in apart), distance=apart)
    return kept.data


def _measure(ask, lengths: tuple[int, ...], runs: int) -> list[dict]:
    """A row an arm, the medians of its runs."""
    started, seen = time.monotonic(), []
    while len(seen) < WARM + runs:
        if len(seen) >= WARM + LEAST and time.monotonic() - started > SECONDS:
            break
        seen.append(_flat(ask("round", lengths=lengths)))
    profiled = _flat(ask("profile", lengths=lengths))
    rows = []
    for arm in seen[0]:
        times = {key: [run[arm][key] for run in seen[WARM:]] for key in ("forward_ms", "both_ms")}
        rows.append({"batch": f"{len(lengths)} x {lengths[0]}", "arm": arm,
                     **{key: round(statistics.median(found), 3) for key, found in times.items()}, "runs": times,
                     "peak_mib": max(run[arm]["peak_mib"] for run in seen[WARM:]), **profiled[arm]})
    return [{**row, **against(row, rows)} for row in rows]


def _flat(found: dict[str, dict]) -> dict:
    return {arm: one for arms in found.values() for arm, one in arms.items()}


def _median_of(ask, op: str, kinds: tuple[str, ...]) -> dict[str, float]:
    seen = [ask(op, kinds) for _ in range(WARM + LEAST)][WARM:]
    return {kind: round(statistics.median(one[kind] for one in seen), 3) for kind in kinds}


def _distance(logprobs: dict[str, dict]) -> float:
    left, right = (unpack(logprobs[kind]) for kind in KINDS)
    return float(np.abs(left - right).mean())


def against(row: dict, arms: list[dict]) -> dict:
    """The row's times and memory over those of the ordinary arm that recomputes as it does."""
    name = "ordinary, recomputed" if "recomputed" in row["arm"] else "ordinary"
    (other,) = [arm for arm in arms if arm["arm"] == name]
    return {f"{what}_ratio": round(row[key] / other[key], 3) if other[key] else None
            for what, key in (("forward", "forward_ms"), ("both", "both_ms"), ("kernels", "kernels_ms"),
                              ("peak", "peak_mib"))}


def _requantisation(rows: list[dict], once: float, ui: UI) -> dict:
    """What quantising takes of a forward and backward; without the cache the recomputation does it a second time."""
    found = {"once_ms": once, "share": {}}
    for row in rows:
        if row["arm"] == "aligned, recomputed, no cache":
            (cached,) = [r for r in rows if r["batch"] == row["batch"] and r["arm"] == "aligned, recomputed"]
            share, least = 1 - cached["both_ms"] / row["both_ms"], once / (once + cached["both_ms"])
            found["share"][row["batch"]] = {"without_cache": round(share, 3), "with_cache": round(least, 3)}
            ui.say(f"{row['batch']}: quantising takes {share:.1%} of forward and backward without the cache; with it "
                   f"{once:.1f} ms once a version, {least:.1%} where a version is one such batch")
    return found


def _table(rows: list[dict]) -> str:
    return table([rows[0]["batch"], "forward ms", "x", "with backward", "x", "kernels ms", "x", "launches", "peak MiB",
                  "x"],
                 [[r["arm"], f"{r['forward_ms']:.1f}", r["forward_ratio"], f"{r['both_ms']:.1f}", r["both_ratio"],
                   f"{r['kernels_ms']:.1f}", r["kernels_ratio"], r["launches"], r["peak_mib"], r["peak_ratio"]]
                  for r in rows])
