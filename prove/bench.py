"""`prove bench`: decode throughput with batch invariance on against off, paired, and where the loss goes.

Both engines start at once on one GPU and take turns on the same few cores: the one that waits sleeps in a read. A pair
is one run of each, and the ratio is the median over pairs. The baseline is the recipe with VLLM_BATCH_INVARIANT=0; what
its [bench] lays over the engine's flags holds for both. Each run samples what fits `--seconds` on the slower engine,
the same on both, and says how many of the machine's cores were busy meanwhile: on an idle machine about one.
The table by operator comes from one profiled run of each engine, after the pairs, since a profiler can leave traces:
device time a step by kernel, summed into the recipe's operators. Beside it stands what a step takes by the clock: what
its kernels do not fill is the host's, and a profile of the host says where the two engines differ there.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import re
import statistics
import threading
import time

from prove import machine, precompile, record, workload
from prove.engine import Engine
from prove.host import differences
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.steps import SETTLED
from prove.ui import UI, table

PAIRS = 3           # a record needs so many; more are run while there is time
PROFILE_STEPS = 20  # on the device, and as many on the host
PROFILE_TOKENS = SETTLED + 2 * PROFILE_STEPS + 40  # the rest: requests that join one after another
PROFILE_SECONDS = 20
MOST_SPREAD = 0.25  # of the baseline's runs, by their median: more, and the machine decides instead of the engines
WARM_TOKENS = 60    # enough steps to compile everything and to see the speed


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


def summary(runs: dict[str, list[dict]], key: str = "decode_tokens_per_second") -> dict:
    """Medians of both sides and of the ratios of the pairs; `spread`: how far the baseline's runs lie apart."""
    off, on = ([run[key] for run in runs[side]] for side in ("off", "on"))
    pairs = [b / a for a, b in zip(off, on, strict=False) if a]
    return {"off": statistics.median(off), "on": statistics.median(on), "ratio": statistics.median(pairs),
            "pairs": pairs, "spread": (max(off) - min(off)) / statistics.median(off)}


def enough(found: dict, runs: int) -> bool:
    """Whether the pairs of a summary bear a verdict: the least that a record needs, or all that were asked for, from a
    machine on which the baseline's own runs agree. Where they do not, a median above the floor is luck."""
    return len(found["pairs"]) >= min(PAIRS, runs) and found["spread"] <= MOST_SPREAD


def step_us(found: dict, rows: int) -> dict[str, float]:
    """What a decode step takes by the clock, in microseconds, by a summary; 0 where no decode step was timed."""
    return {name: rows / found[name] * 1e6 if found[name] else 0.0 for name in ("off", "on")}


class Pair:
    """Two engines that take turns. `sides`: name -> (start message, environment)."""

    def __init__(self, sides: dict[str, tuple[dict, dict]], kept: record.Record, ui: UI, *, env: dict[str, str],
                 logs: pathlib.Path, deadline: float, backend: str, at_once: int = 2):
        self.kept, self.ui, self.deadline = kept, ui, deadline
        self.engines: dict[str, Engine] = {}

        def begin(name: str) -> Engine:
            start, environment = sides[name]
            return Engine(start, backend=backend, env=environment | env, log=logs / f"{kept.data['verb']}-{name}.log",
                          on_event=lambda event: _event(ui, event, f"{name}: "), timeout=deadline - time.monotonic())

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            starting = {name: pool.submit(begin, name) for name in sides}
        self.engines = {name: future.result() for name, future in starting.items() if not future.exception()}
        if failed := next((f.exception() for f in starting.values() if f.exception()), None):
            self.close()
            raise failed
        for name, engine in self.engines.items():
            lock = kept.engine(name, engine.info, sides[name][0]["flags"], sides[name][1])
            ui.note(f"{name} started in {engine.info['start_seconds']} s; lock: {lock['state']}")

    def call(self, name: str, op: str, **arguments):
        return self.engines[name].call(op, timeout=max(1.0, self.deadline - time.monotonic()), **arguments)

    def alternate(self, messages: list[dict], runs: int, order: tuple[str, str],
                  reserve: float = 0.0) -> dict[str, list[dict]]:
        """Timed runs in turns, each row kept as it comes; fewer than `runs` when the time less `reserve` is short."""
        cores = self.kept.data["host"]["cores"] = machine.cores()
        for engine in self.engines.values():
            machine.pin(engine.process.pid, cores)
        done: dict[str, list[dict]] = {name: [] for name in order}
        longest = 0.0
        for index in range(runs):
            if self.deadline - time.monotonic() < 2 * longest + 5 + reserve and index:
                self.ui.say(f"out of budget after {index} of {runs} pairs")
                break
            for name in order if index % 2 == 0 else order[::-1]:  # neither side always goes first
                busy = machine.Busy()
                result = self.call(name, "bench", requests=messages)
                result["busy_cores"] = round(busy.mean(), 2)
                del result["kernels"], result["host"]
                longest = max(longest, result["seconds"])
                done[name].append(result)
                self.kept.row({"side": name, "run": index, **result})
                self.ui.note(f"{name}: {result['decode_tokens_per_second']:,.0f} tok/s decoding, "
                             f"{result['tokens'] / result['seconds']:,.0f} tok/s end to end, "
                             f"{result['busy_cores']:.1f} cores busy")
        return done

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


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


def fitted(tried: dict[str, dict], seconds: float, most: int) -> int:
    """How many tokens each request samples in `seconds` on the slower side, at the speed of the runs tried."""
    def fit(run: dict, rows: int) -> float:
        prefill = run["seconds"] - run["tokens"] / max(1.0, run["decode_tokens_per_second"])
        return (seconds - max(0.0, prefill)) * run["decode_tokens_per_second"] / rows
    least = min(fit(run, run["tokens"] // WARM_TOKENS) for run in tried.values())
    return max(WARM_TOKENS, min(most, int(least)))


class Profile:
    """One profiled run of each side: the loss by operator, and where the host's time differs."""

    def __init__(self, pair: Pair, messages: list[dict], operators: dict[str, str]):
        self.tables, self.host, self.kernels_us = {}, {}, {}
        for name in pair.engines:
            found = pair.call(name, "bench", requests=messages, profile_steps=PROFILE_STEPS)
            self.tables[name] = by_operator(found["kernels"], max(1, found["profiled_steps"]), operators)
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


def bench(recipe: Recipe, ui: UI, *, concurrent: int, prompt_tokens: int, out_tokens: int, seconds: float, runs: int,
          turn: pathlib.Path | None, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
          backend: str = "vllm") -> dict:
    settings, deadline = recipe.section("bench"), time.monotonic() + budget
    kept = record.Record("bench", recipe.subject, {
        "concurrent": concurrent, "prompt_tokens": prompt_tokens, "most_out_tokens": out_tokens, "seconds": seconds,
        "runs": runs}, out)
    sides = {name: engine_start(recipe, name == "on", settings.get("engine")) for name in ("off", "on")}

    def messages(tokens: int) -> list[dict]:
        return requests(concurrent, prompt_tokens, tokens, recipe.vocab)

    with _precompiling(recipe, settings.get("precompile", []), env=env, logs=logs, deadline=deadline, ui=ui):
        pair = Pair(sides, kept, ui, env=env, logs=logs, deadline=deadline, backend=backend)
    with pair:
        for name in sides:
            pair.call(name, "bench", requests=messages(WARM_TOKENS))  # compiles what the timed runs need
        with machine.turn(turn, ui.note, deadline):
            tried = {name: pair.call(name, "bench", requests=messages(WARM_TOKENS)) for name in sides}
            tokens = kept.data["arguments"]["out_tokens"] = fitted(tried, seconds, out_tokens)
            ui.note(f"{tokens} tokens a request fit {seconds:.0f} s")
            result = summary(pair.alternate(messages(tokens), runs, ("off", "on"), reserve=PROFILE_SECONDS))
            kept.finish(False, False, **result)
            profile = Profile(pair, messages(PROFILE_TOKENS), settings.get("operators", {}))
    steps, floor = step_us(result, concurrent), settings.get("floor", 0.88)
    profile.say(ui, steps)
    ui.say(f"off {result['off']:,.0f} tok/s, on {result['on']:,.0f} tok/s: ratio {result['ratio']:.3f} "
           f"(pairs {', '.join(f'{p:.3f}' for p in result['pairs'])}; the baseline's spread {result['spread']:.3f}, "
           f"at most {MOST_SPREAD}; at least {floor} wanted)")
    kept.finish(kept.locked and enough(result, runs), result["ratio"] >= floor, locked=kept.locked, floor=floor,
                operators=profile.operators, step_us=steps, kernels_us=profile.kernels_us)
    return kept.data
