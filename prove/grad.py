"""`prove grad`: every parameter's gradient against a second model, written from the equations, in fp64.

Bound on a parameter: TIMES the relative error of the usual BF16 model (the same reference text run in BF16, its own
derivative by autograd), at least FLOOR. The actor rounds in other places than that model, not more often; a wrong
derivative is off by tens of percent. Each planted fault keeps every value and breaks one derivative: it must exceed
some bound, or the comparison would have been blind to it.

Of a quantised model FP8 alone is 20 to 30 %: each parameter has a second row, against the reference at the actor's own
operands (prove/gradients.py), and a fault is caught by either.
"""
from __future__ import annotations

import pathlib
import time

from prove import record, workload
from prove.engine import Engine, pack
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.ui import UI, table

TIMES = 2.0
FLOOR = 2.0**-6       # four BF16 roundings (2**-8 at most) of values that do not cancel
# Each in the backward alone (prove/gradients.py): a router that learns nothing, chunks that do not see the chunks
# before them, a norm whose length does not depend on its input.
FAULTS = ("routing-weights", "carried-state", "norm-length")
LENGTHS = (1, 2, 5, 63, 128, 129, 260)  # one token alone, inside a chunk, at its edge, over three chunks
MICRO = 300           # several micro-batches: what is added up over them is compared too


def sequences(vocab: int) -> list[dict]:
    """Random tokens; the gradient of a given text needs no rollout."""
    import numpy as np

    return [{"id": f"g{length}", "prompt": list(workload.prompt(length, vocab, seed=40 + length)),
             "tokens": pack(np.zeros(0, np.int64))} for length in LENGTHS]


def bound(row: dict) -> float:
    return max(row.get("times", TIMES) * row["usual_error"], FLOOR)


def exceeding(rows: list[dict]) -> list[dict]:
    """Rows over their bound; a NaN is over any."""
    return [row for row in rows if not row["error"] <= bound(row)]


def grad(recipe: Recipe, ui: UI, *, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
         backend: str = "trainer") -> dict:
    kept = record.Record("grad", recipe.subject, {"lengths": LENGTHS, "micro": MICRO, "times": TIMES,
                                                  "floor": FLOOR}, out)
    deadline = time.monotonic() + budget
    start, environment = engine_start(recipe, True)
    batch = sequences(recipe.vocab)
    with Engine(start, backend=backend, env=environment | env, log=logs / "grad.log", timeout=budget,
                on_event=lambda event: _event(ui, event)) as engine:
        kept.engine("only", engine.info, start["flags"], environment)
        kept.actor(engine.info)

        def call(op: str, **arguments):
            return engine.call_by(deadline, op, **arguments)

        kept.data["actor"] = call("actor", lr=0.0)
        faults = kept.data["actor"]["faults"] or FAULTS
        compared = call("gradients", sequences=batch, micro=MICRO, faults=faults)
        found = compared["rows"]
        for row in found:
            kept.row({**row, "bound": bound(row), "within": row["error"] <= bound(row)})
        bad = exceeding(found)
        worst = sorted(found, key=lambda row: -row["error"] / bound(row))
        ui.say(table(["parameter", "operands", "error", "usual BF16", "bound", "cosine"], [
            [r["parameter"], r.get("operands", "unrounded"), r["error"], r["usual_error"], bound(r), r["cosine"]]
            for r in worst[:12]]))
        ui.say(f"{len(found)} comparisons of the logprobs and of each parameter, {len(bad)} over their bound")
        caught, at_operands = {}, {}
        for fault in faults:
            over = exceeding(compared["faults"][fault])
            caught[fault], at_operands[fault] = len(over), sum("operands" in row for row in over)
            ui.say(f"planted {fault}: {len(over)} comparisons over their bound"
                   + (f", first {over[0]['parameter']}" if over else ": NOT caught"))
    kept.finish(kept.locked, not bad and all(caught.values()), caught=caught, caught_at_operands=at_operands)
    return kept.data
