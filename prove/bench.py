"""`prove bench`: decode throughput with batch invariance on against off, paired, and where the loss goes.

Both engines start at once on one GPU and take turns on the same cores, a block of decode steps at a time (blocks.py).
The baseline is the recipe with VLLM_BATCH_INVARIANT=0; what its [bench] lays over the engine's flags holds for both.
Each request samples `--out-tokens`, or the most with which the whole command, the engines' start included and waiting
for its turn not, ends within `--seconds`; the record says how many that were, and how long it took.
The table by operator comes from one profiled run of each engine, after the blocks, since a profiler can leave traces:
device time a step by kernel, summed into the recipe's operators. Beside it stands what a step takes by the clock: what
its kernels do not fill is the host's, and a profile of the host says where the two engines differ there.
"""
from __future__ import annotations

import contextlib
import pathlib
import re
import threading
import time

from prove import blocks, machine, precompile, record, workload
from prove.engine import Engine
from prove.host import differences
from prove.recipe import Recipe
from prove.rollout import engine_start
from prove.steps import SETTLED
from prove.together import Part, started
from prove.ui import UI, table

PROFILE_STEPS = 20  # on the device, and as many on the host
PROFILE_TOKENS = SETTLED + 2 * PROFILE_STEPS + 40  # the rest: requests that join one after another
PROFILE_SECONDS = 20
WARM_TOKENS = 60    # enough steps to compile everything and to see the speed
LEAST_QUADS = blocks.PARTS * blocks.LEAST
TIMED = {"block_steps": blocks.STEPS, "untimed_steps": blocks.UNTIMED, "most_noise": blocks.MOST_NOISE,
         "most_spread": blocks.MOST_SPREAD}  # what a record says of the blocks


def require_tokens(out_tokens: int) -> None:
    if out_tokens < (least := blocks.tokens_of(LEAST_QUADS)):
        raise ValueError(f"--out-tokens {out_tokens}: a verdict needs {LEAST_QUADS} quads of blocks, {least} tokens a "
                         "request; ask for as many or more")


def requests(count: int, prompt_tokens: int, out_tokens: int, vocab: int) -> list[dict]:
    return [workload.Request(f"b{i}", workload.prompt(prompt_tokens, vocab, seed=i), out_tokens, seed=i)
            .message(logprobs=False) for i in range(count)]


def by_operator(kernels: list[dict], steps: int, operators: dict[str, str]) -> dict[str, float]:
    """Operator -> microseconds a step. The first pattern that a kernel's name matches decides; the rest is "other"."""
    sums = dict.fromkeys([*operators, "other"], 0.0)
    for kernel in kernels:
        name = next((o for o, pattern in operators.items() if re.search(pattern, kernel["name"])), "other")
        sums[name] += kernel["us"] / steps
    return sums


def shares(off: dict[str, float], on: dict[str, float]) -> list[dict]:
    """Rows of the operator table, the largest loss first. `share`: of the whole loss; negative where time was won."""
    loss = sum(on.values()) - sum(off.values())
    rows = [{"operator": name, "off_us": off.get(name, 0.0), "on_us": on.get(name, 0.0),
             "share": (on.get(name, 0.0) - off.get(name, 0.0)) / loss if loss else 0.0} for name in {**off, **on}]
    return sorted(rows, key=lambda row: row["off_us"] - row["on_us"])


def step_us(found: dict, rows: int) -> dict[str, float]:
    """What a decode step takes by the clock, in microseconds, by a summary; 0 where no decode step was timed."""
    return {name: rows / found[name] * 1e6 if found[name] else 0.0 for name in ("off", "on")}


class Pair:
    """Two started engines, "off" and "on"."""

    def __init__(self, engines: dict[str, Engine], kept: record.Record, ui: UI, deadline: float):
        self.engines, self.kept, self.ui, self.deadline = engines, kept, ui, deadline

    def call(self, name: str, op: str, **arguments):
        return self.engines[name].call_by(self.deadline, op, **arguments)

    def compiled(self, messages: list[dict]) -> dict[str, dict]:
        """What each side says of a short run; what the timed ones need is compiled after it."""
        return {name: self.call(name, "bench", requests=messages) for name in self.engines}

    @contextlib.contextmanager
    def pinned(self):
        cores = self.kept.data["host"]["cores"] = machine.cores()
        with machine.pinned([engine.process.pid for engine in self.engines.values()], cores):
            yield

    def alternate(self, messages: list[dict], quads: int, until: float) -> dict:
        rows = blocks.alternate(self.call, messages, quads, self.kept, self.ui, until=until)
        return blocks.summary(rows, len(messages))


@contextlib.contextmanager
def _precompiling(recipe: Recipe, wanted: list[str], *, env: dict[str, str], logs: pathlib.Path, deadline: float,
                  ui: UI):
    """The recipe's jobs whose names match run beside the body: the baseline's kernels, which nothing else compiles."""
    script = recipe.section("precompile").get("script")
    if not (script and wanted):
        yield
        return
    thread = threading.Thread(daemon=True, target=precompile.run, args=(
        recipe.folder / script, recipe.environment(False) | env, logs, 0.5 * (deadline - time.monotonic()), ui.note),
        kwargs={"wanted": wanted})
    thread.start()
    yield
    thread.join()  # nothing may compile while something is timed


def fitted(tried: dict[str, dict], count: int, seconds: float, most: int) -> int:
    """How many quads fit into `seconds` at the speed of the runs tried; never fewer than a verdict needs."""
    both = sum(count / max(1.0, run["decode_tokens_per_second"]) for run in tried.values())
    fit = int(seconds / (2 * blocks.TOKENS * both + 2 * machine.GLANCE))
    return min(blocks.quads_in(most), max(LEAST_QUADS, fit))


class Profile:
    """One profiled run of each side: the loss by operator, and where the host's time differs."""

    def __init__(self, pair: Pair, messages: list[dict], operators: dict[str, str]):
        self.tables, self.host, self.kernels_us, self.steps = {}, {}, {}, {}
        for name in pair.engines:
            found = pair.call(name, "bench", requests=messages, profile_steps=PROFILE_STEPS)
            self.steps[name] = found["profiled_steps"]
            self.tables[name] = by_operator(found["kernels"], max(1, self.steps[name]), operators)
            self.kernels_us[name] = sum(self.tables[name].values())
            kept = pair.kept.data["engines"][name]
            self.host[name] = kept["host"] = found["host"]
            kept["kernels"] = sorted(found["kernels"], key=lambda k: -k["us"])[:60]
        self.operators = shares(self.tables["off"], self.tables["on"])

    def say(self, ui: UI, steps: dict[str, float]) -> None:
        off, on = self.kernels_us["off"], self.kernels_us["on"]
        ui.say(table(["operator", "off us", "on us", "share of loss"],
                     [[r["operator"], r["off_us"], r["on_us"], f"{r['share']:.1%}"] for r in self.operators]))
        ui.say(f"a step: {steps['off']:,.0f} us off, {steps['on']:,.0f} us on; of these {off:,.0f} and {on:,.0f} us "
               f"of kernels, their ratio {off / on if on else 0.0:.3f}")
        ui.say(table(["host, own time under the profiler", "off us", "on us"],
                     [[r["function"], r["off_us"], r["on_us"]]
                      for r in differences(self.host["off"], self.host["on"])]))


def bench(recipe: Recipe, ui: UI, *, concurrent: int, prompt_tokens: int, out_tokens: int, seconds: float,
          turn: pathlib.Path | None, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
          backend: str = "vllm") -> dict:
    began = time.monotonic()
    settings, deadline = recipe.section("bench"), began + budget
    require_tokens(out_tokens)
    kept = record.Record("bench", recipe.subject, {
        "concurrent": concurrent, "prompt_tokens": prompt_tokens, "most_out_tokens": out_tokens, "seconds": seconds,
        **TIMED}, out)
    parts = {name: Part(*engine_start(recipe, name == "on", settings.get("engine")), backend) for name in ("off", "on")}

    def messages(tokens: int) -> list[dict]:
        return requests(concurrent, prompt_tokens, tokens, recipe.vocab)

    with contextlib.ExitStack() as opened:
        with _precompiling(recipe, settings.get("precompile", []), env=env, logs=logs, deadline=deadline, ui=ui):
            engines = opened.enter_context(started(parts, kept, ui, env=env, logs=logs, deadline=deadline))
        pair = Pair(engines, kept, ui, deadline)
        pair.compiled(messages(WARM_TOKENS))
        ready = time.monotonic() - began
        opened.enter_context(machine.turn(turn, ui.note, deadline))
        turned = time.monotonic()
        end = min(turned + seconds - ready, deadline) - PROFILE_SECONDS
        with pair.pinned():
            quads = fitted(pair.compiled(messages(WARM_TOKENS)), concurrent, end - time.monotonic(), out_tokens)
            tokens = kept.data["arguments"]["out_tokens"] = blocks.tokens_of(quads)
            ui.note(f"{tokens} tokens a request, {quads} quads, fit what is left of {seconds:.0f} s")
            result = pair.alternate(messages(tokens), quads, deadline - PROFILE_SECONDS)
        kept.finish(False, False, **result)
        profile = Profile(pair, messages(PROFILE_TOKENS), settings.get("operators", {}))
        took = ready + time.monotonic() - turned
    steps, floor = step_us(result, concurrent), settings.get("floor", 0.88)
    profile.say(ui, steps)
    ui.say(f"off {result['off']:,.0f} tok/s, on {result['on']:,.0f} tok/s: {blocks.said(result)}; at least {floor} "
           f"wanted; {took:.0f} s, its turn not waited for")
    kept.finish(kept.locked and blocks.enough(result) and all(profile.steps.values()), result["ratio"] >= floor,
                locked=kept.locked, floor=floor, operators=profile.operators, step_us=steps,
                kernels_us=profile.kernels_us, took=round(took, 1))
    return kept.data
