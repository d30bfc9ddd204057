"""`prove bisect`: the first layer and operator where two ways of running the same request part.

Two arms are run on one eager engine. First untraced, to find a request whose logprobs differ, then with every watched
call hashed, to find the first call, in order of execution, whose output row differs; then once more keeping that call's
arguments, which prove/repro.py turns into a file of its own.
"""
from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from prove import record, workload
from prove.compare import Figures, Sequence
from prove.engine import Engine, EngineError, unpack
from prove.recipe import Recipe
from prove.rollout import Answers, Context, _event, engine_start
from prove.trace import first_difference
from prove.ui import UI


def _all(work, base) -> list[dict]:
    return [r.message() for r in work.requests]


def _forced(work, base) -> list[dict]:
    return [r.forced(base.decoded(r.id).tokens) for r in work.requests]


ARMS: dict[str, tuple[Callable, dict]] = {  # name: (requests from the workload and the base answers, how to run them)
    "decode": (_all, {}),
    "decode-alone": (_all, {"one_by_one": True}),
    "decode-reversed": (lambda work, base: _all(work, base)[::-1], {}),
    "prefill": (_forced, {}),
    "prefill-alone": (_forced, {"one_by_one": True}),
    **{f"chunked-{size}": (_forced, {"chunk": size}) for size in (100, 512, 2048)},
}


def differing(work, base: Answers, left: Answers, right: Answers) -> tuple[workload.Request, int] | None:
    """The request that parts at the earliest position, and that position (of the row that predicted the token)."""
    found = []
    for request in work.requests:
        one, two = _answer_words(request, left), _answer_words(request, right)
        shared = min(len(one.tokens), len(two.tokens))
        figures = Figures()
        figures.add(request.id, one.head(shared), two.head(shared))
        if figures.first:
            found.append((len(request.prompt) - 1 + figures.first["index"], request))
    if not found:
        return None
    position, request = min(found, key=lambda pair: pair[0])
    return request, position


def _answer_words(request, answers: Answers) -> Sequence:
    """What an arm said about the request's answer: sampled in a decode arm, scored in a prefill arm."""
    scored = answers.prompt_words(request.id)
    if len(scored):
        words = scored[len(request.prompt) - 1:]
        return Sequence(words.astype("int64") * 0, words)  # forced: the tokens are the same by construction
    decoded = answers.decoded(request.id)
    return Sequence(decoded.tokens * 0, decoded.words)


def read_sites(result: dict, watch: str) -> dict[str, dict]:
    return {site["name"]: {"keys": [(watch, int(p)) for p in unpack(site["positions"])],
                           "in": unpack(site["in"]).tolist(), "out": unpack(site["out"]).tolist()}
            for site in result["sites"]}


def bisect(recipe: Recipe, ui: UI, *, arms: tuple[str, str], tokens: int, invariant: bool, out: pathlib.Path,
           logs: pathlib.Path, budget: float, env: dict[str, str], backend: str = "vllm") -> dict:
    if unknown := [a for a in arms if a not in ARMS]:
        raise ValueError(f"no such arm: {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    subject = recipe.subject
    work = workload.build(tokens, recipe.vocab)
    kept = record.Record("bisect", subject, {"arms": list(arms), "tokens": tokens, "invariant": invariant}, out)
    functions = recipe.section("bisect").get("functions", [])
    deadline = time.monotonic() + budget
    start, environment = engine_start(recipe, invariant, {"enforce_eager": True})
    with Engine(start, backend=backend, env=environment | env, log=logs / "bisect.log",
                on_event=lambda event: _event(ui, event), timeout=budget) as engine:
        kept.engine("eager", engine.info, start["flags"], environment)

        def call(op: str, **arguments):
            return engine.call(op, timeout=max(1.0, deadline - time.monotonic()), **arguments)

        context = Context(work)
        context.begin(engine, engine.info["cache_block"], budget)
        base = context.run(_all(work, None), graphs="off")
        answers = [context.run(ARMS[arm][0](work, base), graphs="off", **ARMS[arm][1]) for arm in arms]
        found = differing(work, base, *answers)
        if found is None:
            ui.say(f"{arms[0]} and {arms[1]} agree on every word in eager mode: nothing to bisect")
            kept.finish(True, True, finding=None)
            return kept.data
        request, position = found
        ui.note(f"{request.id} (prompt of {len(request.prompt)}) parts at position {position}; tracing")

        def runs(arm: str, side: str, **more):
            build, how = ARMS[arm]
            messages = build(work, base)
            if how.get("one_by_one"):
                messages = [m for m in messages if m["id"] == request.id]
            return call("trace", requests=messages, watch=request.id, limit=position, functions=functions, arm=side,
                        **how, **more)

        traces = [runs(arm, side) for arm, side in zip(arms, ("left", "right"), strict=True)]
        for text in traces[0]["missing"]:
            ui.say(f"not watched: {text}")
        finding = first_difference(*(read_sites(t, request.id) for t in traces))
        if finding is None:
            finding = {"site": None, "why": "every watched call agrees on every row: the logits or the sampler differ"}
        else:
            try:
                finding |= _repro(call, runs, arms, finding, request.id, logs, subject)
            except EngineError as error:
                finding["repro"] = {"form": None, "why": str(error)}
    finding |= {"request": request.id, "position": position, "missing": traces[0]["missing"]}
    kept.finish(True, False, finding=finding)
    for key, value in finding.items():
        ui.say(f"  {key}: {value}")
    return kept.data


def _repro(call, runs, arms, finding: dict, watch: str, logs: pathlib.Path, subject: str) -> dict:
    """Runs both arms again up to the row that differs, keeping the call's arguments."""
    position = finding["key"][1]
    for arm, side in zip(arms, ("left", "right"), strict=True):
        runs(arm, side, keep=finding["site"], keep_position=position)
    name = f"repro-{subject}-" + "".join(c if c.isalnum() else "-" for c in finding["site"])
    return {"repro": call("repro", watch=watch, position=position, folder=str((logs / "repro").resolve()), name=name)}
