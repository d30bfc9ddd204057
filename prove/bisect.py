"""`prove bisect`: the first layer and operator where two ways of running the same requests part.

Two arms are run on one eager engine. First untraced, to find requests whose logprobs differ, then with every watched
call hashed, to find the first call, in order of execution, with an output row that differs; then once more keeping the
arguments of that call, and of the next ones in which a row with equal inputs comes out different: prove/leaf.py names
the operators inside the first that can be replayed without the engine, and prove/repro.py turns it into a file of its
own, which is then run in a process of its own.
Where all of them agree the logits and the sampler are watched (prove/tail.py).
"""
from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable

from prove import record, repro, workload
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


ROWS = 1024   # rows that are followed: enough for a difference of one bit in few rows, little enough for the pipe
QUICK = 10.0  # seconds for the file, by the clock, with the start of its process and its imports


ARMS: dict[str, tuple[Callable, dict]] = {  # name: (requests from the workload and the base answers, how to run them)
    "decode": (_all, {}),
    "decode-alone": (_all, {"one_by_one": True}),
    "decode-reversed": (lambda work, base: _all(work, base)[::-1], {}),
    "prefill": (_forced, {}),
    "prefill-alone": (_forced, {"one_by_one": True}),
    **{f"chunked-{size}": (_forced, {"chunk": size}) for size in (100, 512, 2048)},
}


def differing(work, left: Answers, right: Answers) -> tuple[Figures, dict[str, int]]:
    """The comparison of all answers; and of the requests that part, the earliest first, the position at which they do:
    that of the row that predicted the token. As many as have ROWS rows up to there together, and at least one."""
    total, found = Figures(), {}
    for request in work.requests:
        one, two = _answer_words(request, left), _answer_words(request, right)
        total.add(request.id, one, two)
        shared, figures = min(len(one.tokens), len(two.tokens)), Figures()
        figures.add(request.id, one.head(shared), two.head(shared))
        if figures.first:
            found[request.id] = len(request.prompt) - 1 + figures.first["index"]
    if not total.equal and not found:
        raise EngineError("failed", f"{total.missing} of {total.tokens} words are missing in one arm")
    watch, rows = {}, 0
    for name, position in sorted(found.items(), key=lambda pair: pair[1]):
        rows += position + 1
        if not watch or rows <= ROWS:
            watch[name] = position
    return total, watch


def _answer_words(request, answers: Answers) -> Sequence:
    """What an arm said about the request's answer: sampled in a decode arm, scored in a prefill arm."""
    scored = answers.prompt_words(request.id)
    if len(scored):
        words = scored[len(request.prompt) - 1:]
        return Sequence(words.astype("int64") * 0, words)  # forced: the tokens are the same by construction
    decoded = answers.decoded(request.id)
    return Sequence(decoded.tokens * 0, decoded.words)


def read_sites(result: dict, watch: dict[str, int]) -> dict[str, dict]:
    names = list(watch)

    def read(side: dict) -> dict[str, dict]:
        return {tensor: {(names[name], position): hashed for name, position, hashed in zip(
                    *(unpack(column).tolist() for column in columns), strict=True)} for tensor, columns in side.items()}
    return {site["name"]: {"in": read(site["in"]), "out": read(site["out"]), "written": set(site["written"])}
            for site in result["sites"]}


def bisect(recipe: Recipe, ui: UI, *, arms: tuple[str, str], tokens: int, invariant: bool, out: pathlib.Path,
           logs: pathlib.Path, budget: float, env: dict[str, str], backend: str = "vllm") -> dict:
    """Passes if the arms agree; with batch invariance off, where they have to part, if the operator is named and its
    file shows the difference by itself, in under QUICK seconds."""
    if unknown := [a for a in arms if a not in ARMS]:
        raise ValueError(f"no such arm: {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    if arms[0] == arms[1]:
        raise ValueError(f"--left and --right are both {arms[0]}: a run against itself shows nothing; name two arms")
    verb = "bisect" if invariant else "bisect-contrast"
    kept = record.Record(verb, recipe.subject, {"arms": list(arms), "tokens": tokens, "invariant": invariant}, out)
    start, environment = engine_start(recipe, invariant, {"enforce_eager": True})
    with Engine(start, backend=backend, env=environment | env, log=logs / f"{verb}.log",
                on_event=lambda event: _event(ui, event), timeout=budget) as engine:
        kept.engine("eager", engine.info, start["flags"], environment)
        ui.note(f"engine started in {engine.info['start_seconds']} s")
        search = _Search(recipe, ui, engine, arms, workload.build(tokens, recipe.vocab), time.monotonic() + budget)
        row, found = search.compare()
        kept.row(row)
        finding = search.trace(found, environment, logs) if found else None
    if finding and (names := finding.get("repro", {}).pop("scripts", None)):
        run, tried = repro.settle(logs / "repro", names, os.environ | environment | env)
        finding["repro"] |= {"script": run["script"], "run": run, "tried": tried}
    kept.finish(kept.locked, not found if invariant else _shown(finding), finding=finding)
    for key, value in (finding or {}).items():
        ui.say(f"  {key}: {value}")
    return kept.data


def _shown(finding: dict | None) -> bool:
    ran = (finding or {}).get("repro", {}).get("run", {"shown": False})
    return ran["shown"] and ran["seconds"] < QUICK


class _Search:
    """The runs on one engine: which requests part, in which call, and with which arguments."""

    def __init__(self, recipe: Recipe, ui: UI, engine: Engine, arms: tuple[str, str], work, deadline: float):
        self.ui, self.engine, self.arms, self.work, self.deadline = ui, engine, arms, work, deadline
        self.subject, self.functions = recipe.subject, recipe.section("bisect").get("functions", [])
        self.base: Answers | None = None

    def compare(self) -> tuple[dict, dict[str, int]]:
        """The record's row, and which requests to trace, each up to which position."""
        context = Context(self.work)
        context.begin(self.engine, self.engine.info["cache_block"], self.deadline - time.monotonic())
        self.base = context.run(_all(self.work, None), graphs="off")
        answers = [context.run(ARMS[arm][0](self.work, self.base), graphs="off", **ARMS[arm][1]) for arm in self.arms]
        figures, found = differing(self.work, *answers)
        self.ui.note(f"{self.arms[0]} against {self.arms[1]}, eager: {figures.differing_words} of {figures.tokens} "
                     "words differ")
        return {"case": " / ".join(self.arms), **figures.summary(), "runs": context.runs,
                "state": "differs" if found else "equal"}, found

    def trace(self, watch: dict[str, int], environment: dict[str, str], logs: pathlib.Path) -> dict:
        """What is found of those requests' rows up to those positions."""
        self.ui.note("tracing, up to where they part: " + ", ".join(f"{name} at {at}" for name, at in watch.items()))
        left, right = traces = [self._run(arm, side, watch) for arm, side in self._sides()]
        for text in left["missing"]:
            self.ui.say(f"not watched: {text}")
        if not all(each["sites"] for each in traces):
            raise EngineError("failed", "no watched call ran in one of the arms")
        self.ui.note(f"{len(left['sites'])} and {len(right['sites'])} watched calls")
        finding = first_difference(*(read_sites(each, watch) for each in traces))
        if finding is None:
            finding = self._behind(watch)
        else:
            try:
                finding["repro"] = self._repro(finding["made_here"], watch, environment, logs)
            except EngineError as error:
                finding["repro"] = {"form": None, "why": str(error)}
        return finding | {"watched": watch, "missing": left["missing"]}

    def _behind(self, watch: dict[str, int]) -> dict:
        """Where every watched call of the forward agrees on every row: the logits or the sampler."""
        self.ui.note("the forward agrees; tracing the logits and the sampler")
        said = "every watched call of the forward agrees on every row"
        try:
            traces = [self._run(arm, side, watch, op="trace_behind") for arm, side in self._sides()]
        except EngineError as error:
            return {"site": None, "why": f"{said}: the logits or the sampler differ, and could not be watched: {error}"}
        finding = first_difference(*(read_sites(each, watch) for each in traces))
        if finding is None:
            return {"site": None, "why": f"{said}, and so do the logits and the sampler: the difference does not come "
                                         "back when it is watched"}
        return finding | {"repro": {"form": None, "why": "no file is made of what comes behind the forward"}}

    def _sides(self):
        return zip(self.arms, ("left", "right"), strict=True)

    def _call(self, op: str, **arguments):
        return self.engine.call_by(self.deadline, op, **arguments)

    def _run(self, arm: str, side: str, watch: dict[str, int], op: str = "trace", **more) -> dict:
        build, how = ARMS[arm]
        messages = build(self.work, self.base)
        if how.get("one_by_one"):
            messages = [m for m in messages if m["id"] in watch]
        if op == "trace":
            more |= {"functions": self.functions, "arm": side}
        return self._call(op, requests=messages, watch=watch, **how, **more)

    def _repro(self, made_here: list[dict], watch: dict[str, int], environment: dict[str, str],
               logs: pathlib.Path) -> dict:
        """Runs both arms again, keeping the calls' arguments; the first call that differs by itself becomes a file."""
        if not made_here:
            return {"form": None, "why": "no watched call has a row with equal inputs and another output: an operator "
                                         "between the modules made the difference; name it in the recipe's [bisect]"}
        for arm, side in self._sides():
            self._run(arm, side, watch, keep=made_here)
        tried = []
        for site in (each["site"] for each in made_here):
            name = f"repro-{self.subject}-" + "".join(c if c.isalnum() else "-" for c in site)
            tried.append({"site": site} | self._call("repro", site=site, name=name, env=environment,
                                                     folder=str((logs / "repro").resolve())))
            if "scripts" in tried[-1]:
                break
        return tried[-1] | {"before": tried[:-1]} if "scripts" in tried[-1] else tried[0] | {"after": tried[1:]}
