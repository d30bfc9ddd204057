"""`prove unchanged`: with batch invariance off, the patched engine against the wheel as it came, in values and speed.

The untouched wheel is not deterministic everywhere, so it is asked several times, and what it answers alike every time
is what the patched engine must answer too: at least half of the requests, or nothing is shown. Speed: blocks of decode
steps in turns (blocks.py), the ratio as near to 1 as the wheel mostly is to itself, or within 2 %.
The wheel starts first: kernels that Triton tunes are tuned once, by it, and the patched engine reads its choice from
the cache. Tuned twice, they may differ in tiles, and so in bits, though nothing in them was patched.
"""
from __future__ import annotations

import os
import pathlib
import statistics
import time

from prove import blocks, machine, record, workload
from prove.bench import TIMED, Pair, require_tokens, requests
from prove.compare import Figures
from prove.recipe import Recipe
from prove.rollout import Answers, engine_start
from prove.together import Part, started
from prove.ui import UI

ASKED = 3          # times the untouched wheel answers before an answer counts as its own
NOISE = 0.02
LENGTHS = (150, 600)  # few: stock vLLM compiles its mHC kernels anew for every number of prefilled tokens, 12 s each


def stable(asked: list[workload.Request], answers: list[Answers]) -> list[workload.Request]:
    """The requests that got the same tokens and words every time."""
    def same(request) -> bool:
        figures = Figures()
        for other in answers[1:]:
            figures.add(request.id, answers[0].decoded(request.id), other.decoded(request.id))
        return figures.equal
    return [r for r in asked if same(r)]


def unchanged(recipe: Recipe, ui: UI, *, pristine: pathlib.Path, tokens: int, concurrent: int, out_tokens: int,
              turn: pathlib.Path | None, out: pathlib.Path, logs: pathlib.Path, budget: float,
              env: dict[str, str], backend: str = "vllm") -> dict:
    require_tokens(out_tokens)
    kept = record.Record("unchanged", recipe.subject, {
        "tokens": tokens, "concurrent": concurrent, "out_tokens": out_tokens, **TIMED}, out)
    deadline = time.monotonic() + budget
    # One request and all of them: what is compared and what is timed, and no other graph to capture.
    start, environment = engine_start(recipe, False, {"cudagraph_capture_sizes": sorted({1, concurrent})})
    path = os.pathsep.join(filter(None, [str(pristine.resolve()), os.environ.get("PYTHONPATH")]))
    parts = {"off": Part(start, environment | {"PYTHONPATH": path}, backend),  # as it came
             "on": Part(start, environment, backend)}
    asked = workload.build(tokens, recipe.vocab, LENGTHS).requests
    messages = [r.message() for r in asked]
    with started(parts, kept, ui, env=env, logs=logs, deadline=deadline, at_once=1) as engines:
        pair = Pair(engines, kept, ui, deadline)

        def ask(name: str) -> Answers:
            return Answers(pair.call(name, "run", requests=messages, one_by_one=True)["answers"])
        wheel = [ask("off") for _ in range(ASKED)]
        patched, chosen, figures = ask("on"), stable(asked, wheel), Figures()
        for request in chosen:
            figures.add(request.id, wheel[0].decoded(request.id), patched.decoded(request.id))
        kept.row({"case": "values", "requests": len(asked), "stable_requests": len(chosen),
                  **figures.summary()})
        ui.say(f"values: {len(chosen)} of {len(asked)} requests are stable in the wheel; "
               f"{figures.differing_words} of their {figures.tokens:,} words differ")
        pair.compiled(requests(concurrent, 150, 32, recipe.vocab))
        with machine.turn(turn, ui.note, deadline), pair.pinned():
            speed = pair.alternate(requests(concurrent, 150, out_tokens, recipe.vocab), blocks.quads_in(out_tokens),
                                   deadline)
    noise = max(NOISE, statistics.median(abs(1 - one) for one in speed["itself"] or [0]))
    states = {name: engine["lock"]["state"] for name, engine in kept.data["engines"].items()}
    ui.say(f"speed, on the patched engine, off the wheel: {blocks.said(speed)}; trees: {states}")
    kept.finish(states == {"off": "pristine", "on": "locked"} and blocks.enough(speed),
                figures.equal and 2 * len(chosen) >= len(asked) and abs(1 - speed["ratio"]) <= noise,
                speed=speed, noise=noise)
    return kept.data
