"""`prove cost`: the aligned trainer's time and memory beside the same model in ordinary BF16.

Forward alone (a scoring pass), forward and backward, and the optimizer's step, on packed batches, with and without
recomputation; and for a model whose weights are quantised the share of that, with and without the cache that keeps them
for one version. What `ordinary` is, the module of that model says (ordinary_nemotron_h.py, ordinary_deepseek_v4.py).
Times are medians by the clock of synchronised runs, all arms in turn; what their kernels alone take stands beside, for
a small model's step is the host's. Claims no bound on the cost: the record passes if everything was measured and both
models give about the same logprobs, so that it was one model twice.
"""
from __future__ import annotations

import pathlib
import time

from prove import record
from prove.engine import Engine
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.ui import UI, table

BATCHES = ((256,) * 16, (4096,))  # 4,096 tokens each: many answers, and one long
APART = 0.5  # mean distance of logprobs: BF16 and FP8 leave 0.01 to 0.2, models that share nothing are 3 apart


def cost(recipe: Recipe, ui: UI, *, runs: int, out: pathlib.Path, logs: pathlib.Path, budget: float,
         env: dict[str, str], backend: str = "cost") -> dict:
    kept = record.Record("cost", recipe.subject, {"batches": [[len(b), b[0]] for b in BATCHES], "runs": runs}, out)
    deadline = time.monotonic() + budget
    start, environment = engine_start(recipe, True)
    if recipe.weights_script is None:
        raise ValueError("prove cost builds a small model's weights itself; add --tiny")
    with Engine({**start, "flags": {}}, backend=backend, env=environment | env, log=logs / "cost.log", timeout=budget,
                on_event=lambda event: _event(ui, event)) as worker:
        kept.engine("only", worker.info, {}, environment)
        kept.actor(worker.info)

        def call(op: str, **arguments):
            return worker.call(op, timeout=max(1.0, deadline - time.monotonic()), **arguments)

        built = kept.data["built"] = call("build")
        ui.note(f"{built['parameters']:,} parameters; weights, gradients and optimizer: "
                + ", ".join(f"{name} {mib:,} MiB" for name, mib in built["held_mib"].items()))
        rows, apart = [], []
        for lengths in BATCHES:
            found = call("measure", lengths=lengths, runs=runs)
            apart.append(call("distance", lengths=lengths))
            for row in found:
                rows.append({**row, **against(row, found)})
                kept.row(rows[-1])
            ui.say(_table(rows[-len(found):]))
        kept.data["optimizer_ms"] = steps = call("optimizer", runs=runs)
        ui.say("an optimizer step: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in steps.items()))
        if built["quantised"]:
            kept.data["requantisation"] = _requantisation(rows, call("quantise", runs=runs)["quantise_ms"], ui)
    ui.say(f"mean distance of the two models' logprobs: {max(apart):.3f}")
    kept.finish(kept.locked, all(distance < APART for distance in apart), distance=apart)
    return kept.data


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
            share = 1 - cached["both_ms"] / row["both_ms"]
            found["share"][row["batch"]] = {"without_cache": round(share, 3),
                                            "with_cache": round(once / cached["both_ms"], 3)}
            ui.say(f"{row['batch']}: quantising takes {share:.1%} of forward and backward without the cache; with it "
                   f"once a version, {once:.1f} ms, {once / cached['both_ms']:.1%} of one micro-batch")
    return found


def _table(rows: list[dict]) -> str:
    return table([rows[0]["batch"], "forward ms", "x", "with backward", "x", "kernels ms", "x", "launches", "peak MiB",
                  "x"],
                 [[r["arm"], f"{r['forward_ms']:.1f}", r["forward_ratio"], f"{r['both_ms']:.1f}", r["both_ratio"],
                   f"{r['kernels_ms']:.1f}", r["kernels_ratio"], r["launches"], r["peak_mib"], r["peak_ratio"]]
                  for r in rows])
