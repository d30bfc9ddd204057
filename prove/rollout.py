"""`prove rollout`: starts the engines the chosen cases need, runs their cases side by side, writes the record.

A row's state: equal, differs, vacuous (a requirement of the case did not hold), failed (the engine raised), not run
(out of budget, or its engine is gone). Only a run whose rows are all `equal`, on the locked engine, passes.
"""
from __future__ import annotations

import concurrent.futures
import pathlib
import threading
import time

import numpy as np

from prove import cases, record, workload
from prove.compare import Figures, Sequence
from prove.engine import Engine, EngineError, unpack
from prove.recipe import Recipe
from prove.ui import UI, cell

HEADINGS = ["case", "tokens", "words", "ids", "max |dp|", "mean |dp|", "std |dp|", "k3", "s", "state"]
NOTHING = Sequence(np.zeros(0, np.int64), np.zeros(0, np.uint32))


class Answers:
    """What one run answered, by request id. A missing answer reads as empty, which no comparison forgives."""

    def __init__(self, answers: dict):
        self._answers = answers

    def decoded(self, name: str) -> Sequence:
        answer = self._answers.get(name)
        return Sequence(unpack(answer["tokens"]), unpack(answer["words"])) if answer else NOTHING

    def prompt_words(self, name: str) -> np.ndarray:
        """Words of prompt tokens 1, 2, ...; after a prefix hit only those of the computed tail."""
        answer = self._answers.get(name)
        return unpack(answer["prompt_words"]) if answer and "prompt_words" in answer else NOTHING.words

    def cached(self, name: str) -> int:
        return self._answers.get(name, {}).get("cached", 0)


class Base:
    """The base run's answers, which every engine's cases compare with. `over`: it answered, or never will."""

    def __init__(self):
        self.answers: Answers | None = None
        self.over = threading.Event()


class Context:
    """What an engine's cases work with. `base`, `scored`: answers of earlier cases that later ones compare with."""

    def __init__(self, work: workload.Workload, shared: Base | None = None):
        self.work = work
        self.shared = shared or Base()
        self.scored: Answers | None = None

    @property
    def base(self) -> Answers | None:
        return self.shared.answers

    @base.setter
    def base(self, answers: Answers) -> None:
        self.shared.answers = answers

    def begin(self, engine, block: int, timeout: float) -> None:
        self.engine, self.block = engine, block
        self.figures, self.unmet, self.runs, self.last = Figures(), [], [], {}
        self.lengths: set[int] = set()
        self.deadline = time.monotonic() + timeout

    def run(self, requests: list[dict], **how) -> Answers:
        left = self.deadline - time.monotonic()
        result = self.engine.call("run", timeout=max(1.0, left), requests=requests, **how)
        answers = Answers(result.pop("answers"))
        self.last = result
        self.lengths |= {len(r["prompt"]) for r in requests if not r.get("prompt_logprobs")}
        self.runs.append({**{k: v for k, v in how.items() if v}, **result})
        return answers

    def compare(self, name: str, left: Sequence, right: Sequence) -> None:
        self.figures.add(name, left, right)

    def compare_decoded(self, answers: Answers, requests=None, head: int | None = None) -> None:
        for request in self.work.requests if requests is None else requests:
            self.compare(request.id, self.base.decoded(request.id).head(head), answers.decoded(request.id).head(head))

    def compare_scored(self, answers: Answers, requests=None) -> None:
        """The decode's words against the prefill's words of the same tokens."""
        for request in self.work.requests if requests is None else requests:
            decoded, scored = self.base.decoded(request.id), answers.prompt_words(request.id)
            expected = len(request.prompt) + len(decoded.words) - 1
            if len(scored) != expected:
                self.unmet.append(f"{request.id}: {len(scored)} prompt logprobs, expected {expected}")
            self.compare_words(request.id, decoded.words, scored[len(request.prompt) - 1:])

    def compare_words(self, name: str, left: np.ndarray, right: np.ndarray, tail: bool = False) -> None:
        """Words of the same, forced tokens. tail: align at the end and compare what both have."""
        if tail:
            shared = min(len(left), len(right))
            left, right = left[len(left) - shared:], right[len(right) - shared:]
        self.compare(name, *(Sequence(np.zeros(len(words), np.int64), words) for words in (left, right)))

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.unmet.append(what)

    def require_hits(self, answers: Answers, requests) -> None:
        hits = sum(answers.cached(r.id) > 0 for r in requests)
        self.runs[-1]["requests_with_hits"] = hits
        self.require(hits * 2 >= len(requests) > 0, f"half of {len(requests)} requests hit the cache ({hits} did)")


def run_case(context: Context, case: cases.Case, engine, block: int, timeout: float) -> dict:
    started = time.monotonic()
    context.begin(engine, block, timeout)
    error = None
    try:
        case.run(context)
    except EngineError as raised:
        error = raised
    row = {"case": case.name, "engine": case.engine, "what": case.what, **context.figures.summary(),
           "unmet": context.unmet, "prompt_lengths": sorted(context.lengths), "runs": context.runs,
           "seconds": round(time.monotonic() - started, 1)}
    if error is not None:
        return row | {"state": "failed", "error": str(error), "fatal": error.kind != "failed"}
    if not row["equal"]:
        return row | {"state": "differs"}
    return row | {"state": "vacuous" if context.unmet else "equal"}


def ran(rows: list[dict]) -> dict:
    """The lengths of the prompts that were answered (those that were scored end in an answer and are longer), and how
    many rows decoded at once."""
    runs = [run for row in rows for run in row.get("runs", ())]
    return {"prompt_lengths": sorted({length for row in rows for length in row.get("prompt_lengths", ())}),
            "decode_batches": sorted({count for run in runs for count in run["decode_rows"]})}


def not_run(case: cases.Case, why: str) -> dict:
    return {"case": case.name, "engine": case.engine, "what": case.what, "state": "not run", "why": why}


def render(row: dict) -> list:
    if row["state"] == "not run":
        return [row["case"], *[""] * 8, f"not run: {row['why']}"]
    return [row["case"], row["tokens"], row["differing_words"], row["differing_tokens"], row["max_dp"], row["mean_dp"],
            row["std_dp"], row["k3"], row["seconds"], row["state"]]


def line(cells: list) -> str:
    """One row, at fixed widths: rows are printed as they come."""
    widths = [19, 9, 8, 8, 9, 9, 9, 9, 7, 0]
    return "  ".join(cell(c).ljust(w) if i in (0, 9) else cell(c).rjust(w)
                     for i, (c, w) in enumerate(zip(cells, widths, strict=True))).rstrip()


def engine_start(recipe: Recipe, invariant: bool, flags: dict | None = None) -> tuple[dict, dict]:
    """The start message and the environment of one engine."""
    merged = recipe.engine_flags(invariant) | (flags or {})
    return ({"model": recipe.model, "flags": merged, "weights_script": recipe.weights_script},
            recipe.environment(invariant))


class Runner:
    """The engines of one rollout, a thread each; rows are kept as they come."""

    def __init__(self, recipe: Recipe, invariant: bool, work: workload.Workload, kept: record.Record, ui: UI,
                 deadline: float, how: dict):
        self.recipe, self.invariant, self.work, self.kept, self.ui = recipe, invariant, work, kept, ui
        self.deadline, self.how = deadline, how
        self.shared, self.lock = Base(), threading.Lock()
        self.rows: list[dict] = []
        self.digests: set[str] = set()

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def done(self, row: dict) -> None:
        with self.lock:
            self.rows.append(row)
            self.kept.row(row)
            self.ui.say(line(render(row)))
            for text in [*row.get("unmet", [])[:3], row.get("error"), row.get("first")]:
                if text:
                    self.ui.say(f"    {text}")

    def run(self, name: str, planned: list[cases.Case], advance) -> None:
        try:
            self._run(name, planned, advance)
        finally:
            if planned[0].name == "base":
                self.shared.over.set()  # whatever happened: nobody waits for it any more

    def _run(self, name: str, planned: list[cases.Case], advance) -> None:
        start, environment = engine_start(self.recipe, self.invariant, cases.ENGINES[name])
        log = self.how["logs"] / f"{self.kept.data['verb']}-{self.kept.data['subject']}-{name}.log"
        try:
            engine = Engine(start, backend=self.how["backend"], env=environment | self.how["env"], log=log,
                            on_event=lambda event: _event(self.ui, event, f"{name}: "), timeout=self.left())
        except EngineError as error:
            self.ui.say(f"engine {name}: {error}")
            self._skip(planned, f"its engine did not start: {str(error).splitlines()[0]}")
            return
        with engine:
            with self.lock:
                lock = self.kept.engine(name, engine.info, start["flags"], environment)
                self.digests.add(engine.info["weights"])
            self.ui.note(f"engine {name} started in {engine.info['start_seconds']} s; lock: {lock['state']}")
            self._cases(engine, planned, advance)

    def _cases(self, engine: Engine, planned: list[cases.Case], advance) -> None:
        context = Context(self.work, self.shared)
        for index, case in enumerate(planned):
            if case.name != "base":
                self.shared.over.wait(max(0.0, self.left()))
            advance(case.name)
            left = self.left()
            if left < case.cost * max(0.2, self.work.tokens / 20000):
                self._skip([case], f"out of budget ({left:.0f} s left)")
            elif context.base is None and case.name != "base":
                self._skip([case], "the base run did not answer")
            else:
                row = run_case(context, case, engine, engine.info["cache_block"], min(case.timeout, left))
                if case.name == "base":
                    self.shared.over.set()
                self.done(row)
                if row.get("fatal"):
                    self._skip(planned[index + 1:], f"its engine was gone after {case.name}")
                    break

    def _skip(self, planned: list[cases.Case], why: str) -> None:
        for case in planned:
            self.done(not_run(case, why))


def rollout(recipe: Recipe, ui: UI, *, names: list[str] | None, tokens: int, invariant: bool, out: pathlib.Path,
            logs: pathlib.Path, budget: float, env: dict[str, str], backend: str = "vllm",
            verb: str = "rollout") -> dict:
    """Runs the cases and returns the finished record's data."""
    engines = cases.plan(names)
    work = workload.build(tokens, recipe.vocab)
    kept = record.Record(verb, recipe.subject, {"cases": names, "tokens": tokens, "invariant": invariant}, out)
    kept.data["arguments"] |= {"sampled_tokens": work.tokens, "requests": len(work.requests)}
    ui.say(f"{recipe.subject}: {len(work.requests)} requests, {work.tokens:,} sampled tokens, "
           f"VLLM_BATCH_INVARIANT={invariant:d}")
    ui.say(line(HEADINGS))
    runner = Runner(recipe, invariant, work, kept, ui, time.monotonic() + budget,
                    {"env": env, "logs": logs, "backend": backend})
    with (ui.bar("starting", sum(map(len, engines.values()))) as advance,
          concurrent.futures.ThreadPoolExecutor(len(engines)) as pool):
        for future in [pool.submit(runner.run, name, planned, advance) for name, planned in engines.items()]:
            future.result()
    rows, digests = runner.rows, runner.digests
    complete = kept.locked and len(digests) == 1 and all(r["state"] in ("equal", "differs") for r in rows)
    kept.finish(complete, all(r["state"] == "equal" for r in rows), locked=kept.locked, weights_equal=len(digests) == 1,
                ran=ran(rows))
    return kept.data


def _event(ui: UI, event: dict, who: str = "") -> None:
    if event["event"] == "where":
        ui.note(f"{who}{event['op']}: {event['place']} ({event['seconds']:.0f} s so far)")
    else:
        ui.note(who + event["text"])
