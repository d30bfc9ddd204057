"""`prove unchanged`: with batch invariance off, the patched engine against the wheel as it came, in values and speed.

The untouched wheel is not deterministic everywhere, so it is asked several times, and what it answers alike every time
is what the patched engine must answer too: at least half of the requests, or nothing is shown. Speed: runs in turns,
the ratio within the wheel's own spread (or 2%).
The wheel starts first: kernels that Triton tunes are tuned once, by it, and the patched engine reads its choice from
the cache. Tuned twice, they may differ in tiles, and so in bits, though nothing in them was patched.
"""
from __future__ import annotations

import os
import pathlib
import time

from prove import machine, record, workload
from prove.bench import Pair, enough, requests, summary
from prove.compare import Figures
from prove.recipe import Recipe
from prove.rollout import Answers, engine_start
from prove.ui import UI

ASKED = 3          # times the untouched wheel answers before an answer counts as its own
NOISE = 0.02
LENGTHS = (150, 600)  # few: stock vLLM compiles its mHC kernels anew for every number of prefilled tokens, 12 s each


def workload_of(tokens: int, vocab: int) -> list[workload.Request]:
    """About `tokens` sampled tokens over the LENGTHS of prompts."""
    each = workload.TOKENS_A_REQUEST
    return [workload.Request(f"v{i}", workload.prompt(LENGTHS[i % len(LENGTHS)], vocab, seed=i), each, seed=i)
            for i in range(max(len(LENGTHS), tokens // each))]


def stable(asked: list[workload.Request], answers: list[Answers]) -> list[workload.Request]:
    """The requests that got the same tokens and words every time."""
    def same(request) -> bool:
        figures = Figures()
        for other in answers[1:]:
            figures.add(request.id, answers[0].decoded(request.id), other.decoded(request.id))
        return figures.equal
    return [r for r in asked if same(r)]


def unchanged(recipe: Recipe, ui: UI, *, pristine: pathlib.Path, tokens: int, concurrent: int, out_tokens: int,
              runs: int, turn: pathlib.Path | None, out: pathlib.Path, logs: pathlib.Path, budget: float,
              env: dict[str, str], backend: str = "vllm") -> dict:
    kept = record.Record("unchanged", recipe.subject, {
        "tokens": tokens, "concurrent": concurrent, "out_tokens": out_tokens, "runs": runs}, out)
    deadline = time.monotonic() + budget
    # One request and all of them: what is compared and what is timed, and no other graph to capture.
    start, environment = engine_start(recipe, False, {"cudagraph_capture_sizes": sorted({1, concurrent})})
    path = os.pathsep.join(filter(None, [str(pristine.resolve()), os.environ.get("PYTHONPATH")]))
    sides = {"off": (start, environment | {"PYTHONPATH": path}), "on": (start, environment)}  # off: as it came
    asked = workload_of(tokens, recipe.vocab)
    messages = [r.message() for r in asked]
    with Pair(sides, kept, ui, env=env, logs=logs, deadline=deadline, backend=backend, at_once=1) as pair:
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
        bench = requests(concurrent, 150, out_tokens, recipe.vocab)
        for name in sides:
            pair.call(name, "bench", requests=requests(concurrent, 150, 32, recipe.vocab))
        with machine.turn(turn, ui.note, deadline):
            speed = summary(pair.alternate(bench, runs, ("off", "on")))
    noise = max(NOISE, speed["spread"])
    states = {name: engine["lock"]["state"] for name, engine in kept.data["engines"].items()}
    ui.say(f"speed: patched / wheel = {speed['ratio']:.3f}, noise {noise:.3f}; trees: {states}")
    kept.finish(states == {"off": "pristine", "on": "locked"} and enough(speed, runs),
                figures.equal and 2 * len(chosen) >= len(asked) and abs(1 - speed["ratio"]) <= noise,
                speed=speed, noise=noise)
    return kept.data
