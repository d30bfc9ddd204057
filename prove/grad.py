"""`prove grad`: every parameter's gradient against a second model, written from the equations, in fp64.

Bound on a parameter: TIMES the relative error of the usual BF16 model (the same reference text run in BF16, its own
derivative by autograd), at least FLOOR. The actor rounds in other places than that model, not more often; a wrong
derivative is off by tens of percent. Each planted fault keeps every value and breaks one derivative: it must exceed
some bound, or the comparison would have been blind to it.

Of a quantised model FP8 alone is 20 to 30 %: each parameter has a second row, against the reference at the actor's own
operands (prove/gradients.py), and a fault is caught by either.

Compared in steps: of Nemotron-H the comparison and then each fault, of DeepSeek-V4 loss by loss. Where the time ends or
the engine does, the record has what the steps before showed and names what is missing; it does not pass.
"""
from __future__ import annotations

import pathlib
import time

from prove import record, workload
from prove.engine import Engine, EngineError, pack
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
    with Engine(start, backend=backend, env=environment | env, log=logs / "grad.log", timeout=budget,
                on_event=lambda event: _event(ui, event)) as engine:
        kept.engine("only", engine.info, start["flags"], environment)
        kept.actor(engine.info)
        kept.data["missing"] = ["every comparison"]
        try:
            _compare(engine, recipe.vocab, kept, ui, deadline)
        except EngineError as error:  # what was reached is kept; it does not pass
            kept.data["error"] = str(error)
            ui.say(f"{error}\nmissing: {', '.join(kept.data['missing'])}")
    rows, caught = kept.data["rows"], kept.data.get("caught", {})
    if rows:
        _say(rows, kept.data, ui)
    kept.finish(kept.locked and not kept.data["missing"],
                all(row["within"] for row in rows) and bool(caught) and all(caught.values()))
    return kept.data


def _compare(engine: Engine, vocab: int, kept: record.Record, ui: UI, deadline: float) -> None:
    """Steps until nothing is missing, each in the record as it comes."""
    actor = kept.data["actor"] = engine.call_by(deadline, "actor", lr=0.0)
    found = engine.call_by(deadline, "gradients", sequences=sequences(vocab), micro=MICRO,
                           faults=actor["faults"] or FAULTS)
    while True:
        over = {fault: exceeding(rows) for fault, rows in found["faults"].items()}
        kept.data |= {"rows": [{**row, "bound": bound(row), "within": row["error"] <= bound(row)}
                               for row in found["rows"]],
                      "caught": {fault: len(rows) for fault, rows in over.items()},
                      "caught_at_operands": {fault: sum("operands" in row for row in rows)
                                             for fault, rows in over.items()},
                      "missing": found["missing"]}
        kept.write()
        if not found["missing"]:
            return
        ui.note(f"{len(found['rows'])} comparisons; still missing: {', '.join(found['missing'])}")
        found = engine.call_by(deadline, "more_gradients")


def _say(rows: list[dict], found: dict, ui: UI) -> None:
    worst = sorted(rows, key=lambda row: -row["error"] / row["bound"])
    ui.say(table(["parameter", "operands", "error", "usual BF16", "bound", "cosine"], [
        [r["parameter"], r.get("operands", "unrounded"), r["error"], r["usual_error"], r["bound"], r["cosine"]]
        for r in worst[:12]]))
    ui.say(f"{len(rows)} comparisons of the logprobs and of each parameter, {len(exceeding(rows))} over their bound")
    for fault, count in found["caught"].items():
        ui.say(f"planted {fault}: " + (f"{count} comparisons over their bound" if count else "NOT caught"))
