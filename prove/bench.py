"""`prove bench`: decode throughput with batch invariance on against off, paired, and where the loss goes.

Both engines start at once on one GPU, idle while the other works, and take turns; a pair is one run of each, and the
ratio is the median over pairs. The baseline is the recipe with VLLM_BATCH_INVARIANT=0; what its [bench] lays over the
engine's flags holds for both. Each run samples what fits `--seconds` on the slower engine, the same on both.
The table by operator comes from one profiled run of each engine: device time a step by kernel, summed into the
recipe's operators. It is made after the first pair, so that a run cut short has a ratio and, next, its reasons. Beside
it stands what a step takes by the clock: what its kernels do not fill is the host's, and a profile of the host says
where the two engines differ there.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import re
import statistics
import threading
import time

from prove import precompile, record, workload
from prove.engine import Engine
from prove.host import differences
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.ui import UI, table

PROFILE_STEPS = 20
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


def step_us(done: dict[str, list[dict]], rows: int) -> dict[str, float]:
    """What a decode step of the first pair took by the clock, in microseconds; 0 where no decode step was timed."""
    speed = {name: runs[0]["decode_tokens_per_second"] for name, runs in done.items()}
    return {name: rows / each * 1e6 if each else 0.0 for name, each in speed.items()}


class Pair:
    """Two engines that take turns. `sides`: name -> (start message, environment)."""

    def __init__(self, sides: dict[str, tuple[dict, dict]], kept: record.Record, ui: UI, *, env: dict[str, str],
                 logs: pathlib.Path, deadline: float, backend: str):
        self.kept, self.ui, self.deadline = kept, ui, deadline
        self.engines: dict[str, Engine] = {}

        def begin(name: str) -> Engine:
            start, environment = sides[name]
            return Engine(start, backend=backend, env=environment | env, log=logs / f"{kept.data['verb']}-{name}.log",
                          on_event=lambda event: _event(ui, event, f"{name}: "), timeout=deadline - time.monotonic())

        with concurrent.futures.ThreadPoolExecutor(len(sides)) as pool:
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
                  after_first=lambda done: None) -> dict[str, list[dict]]:
        """Timed runs in turns, each row kept as it comes; fewer than `runs` when the time is short."""
        done: dict[str, list[dict]] = {name: [] for name in order}
        longest = 0.0
        for index in range(runs):
            if index == 1:
                after_first(done)
            if self.deadline - time.monotonic() < 2 * longest + 5 and index:
                self.ui.say(f"out of budget after {index} of {runs} pairs")
                break
            for name in order if index % 2 == 0 else order[::-1]:  # neither side always goes first
                result = self.call(name, "bench", requests=messages)
                del result["kernels"], result["host"]
                longest = max(longest, result["seconds"])
                done[name].append(result)
                self.kept.row({"side": name, "run": index, **result})
                self.ui.note(f"{name}: {result['decode_tokens_per_second']:,.0f} tok/s decoding, "
                             f"{result['tokens'] / result['seconds']:,.0f} tok/s end to end")
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


def bench(recipe: Recipe, ui: UI, *, concurrent: int, prompt_tokens: int, out_tokens: int, seconds: float, runs: int,
          out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str], backend: str = "vllm") -> dict:
    settings = recipe.section("bench")
    kept = record.Record("bench", recipe.subject, {
        "concurrent": concurrent, "prompt_tokens": prompt_tokens, "most_out_tokens": out_tokens, "seconds": seconds,
        "runs": runs}, out)
    deadline = time.monotonic() + budget
    sides = {name: engine_start(recipe, name == "on", settings.get("engine")) for name in ("off", "on")}
    short = requests(concurrent, prompt_tokens, WARM_TOKENS, recipe.vocab)
    operators: list[dict] = []
    with _precompiling(recipe, settings.get("precompile", []), env=env, logs=logs, deadline=deadline, ui=ui):
        pair = Pair(sides, kept, ui, env=env, logs=logs, deadline=deadline, backend=backend)
    with pair:
        for name in sides:
            pair.call(name, "bench", requests=short)  # compiles what the timed runs need
        tried = {name: pair.call(name, "bench", requests=short) for name in sides}
        tokens = kept.data["arguments"]["out_tokens"] = fitted(tried, seconds, out_tokens)
        ui.note(f"{tokens} tokens a request fit {seconds:.0f} s")

        def profile(done: dict[str, list[dict]]) -> None:
            kept.finish(False, False, **summary(done))
            profiles, host = {}, {}
            for name in sides:
                profiled = pair.call(name, "bench", requests=short, profile_steps=PROFILE_STEPS)
                profiles[name] = by_operator(profiled["kernels"], max(1, profiled["profiled_steps"]),
                                             settings.get("operators", {}))
                host[name] = kept.data["engines"][name]["host"] = profiled["host"]
                kept.data["engines"][name]["kernels"] = sorted(profiled["kernels"], key=lambda k: -k["us"])[:60]
            operators.extend(shares(profiles["off"], profiles["on"]))
            steps, kernels = step_us(done, concurrent), {name: sum(profiles[name].values()) for name in sides}
            kept.finish(False, False, operators=operators, step_us=steps, kernels_us=kernels)
            ui.say(table(["operator", "off us", "on us", "share of loss"],
                         [[r["operator"], r["off_us"], r["on_us"], f"{r['share']:.1%}"] for r in operators]))
            ui.say(f"a step: {steps['off']:,.0f} us off, {steps['on']:,.0f} us on; of these {kernels['off']:,.0f} and "
                   f"{kernels['on']:,.0f} us of kernels")
            ui.say(table(["host, own time under the profiler", "off us", "on us"],
                         [[r["function"], r["off_us"], r["on_us"]] for r in differences(host["off"], host["on"])]))

        done = pair.alternate(requests(concurrent, prompt_tokens, tokens, recipe.vocab), runs, ("off", "on"), profile)
    result = summary(done)
    floor = settings.get("floor", 0.88)
    ui.say(f"off {result['off']:,.0f} tok/s, on {result['on']:,.0f} tok/s: ratio {result['ratio']:.3f} "
           f"(pairs {', '.join(f'{p:.3f}' for p in result['pairs'])}; at least {floor} wanted)")
    kept.finish(kept.locked and len(result["pairs"]) == runs, result["ratio"] >= floor, locked=kept.locked, **result,
                floor=floor)
    return kept.data
