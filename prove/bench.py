"""`prove bench`: decode throughput with batch invariance on against off, paired, and where the loss goes.

Both engines run on one GPU in one process tree, idle while the other works, and take turns; a pair is one run of each,
and the ratio is the median over pairs. The baseline is the recipe with VLLM_BATCH_INVARIANT=0 and nothing else changed.
The table by operator comes from one profiled run of each engine: device time a step by kernel, summed into the
recipe's operators.
"""
from __future__ import annotations

import pathlib
import re
import statistics
import time

from prove import record, workload
from prove.engine import Engine, EngineError
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.ui import UI, table

PROFILE_STEPS = 20


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


class Pair:
    """Two engines that take turns. `sides`: name -> (start message, environment)."""

    def __init__(self, sides: dict[str, tuple[dict, dict]], kept: record.Record, ui: UI, *, env: dict[str, str],
                 logs: pathlib.Path, deadline: float, backend: str):
        self.kept, self.ui, self.deadline = kept, ui, deadline
        self.engines: dict[str, Engine] = {}
        try:
            for name, (start, environment) in sides.items():
                self.engines[name] = engine = Engine(
                    start, backend=backend, env=environment | env, log=logs / f"{kept.data['verb']}-{name}.log",
                    on_event=lambda event: _event(ui, event), timeout=deadline - time.monotonic())
                lock = record.bind(pathlib.Path(engine.info["vllm_path"]).parent)
                kept.engine(name, engine.info, start["flags"], environment, lock)
                ui.note(f"{name} started in {engine.info['start_seconds']} s; lock: {lock['state']}")
        except EngineError:
            self.close()
            raise

    def call(self, name: str, op: str, **arguments):
        return self.engines[name].call(op, timeout=max(1.0, self.deadline - time.monotonic()), **arguments)

    def alternate(self, messages: list[dict], runs: int, order: tuple[str, str]) -> dict[str, list[dict]]:
        """Timed runs in turns, each row kept as it comes; fewer than `runs` when the time is short."""
        done: dict[str, list[dict]] = {name: [] for name in order}
        longest = 0.0
        for index in range(runs):
            if self.deadline - time.monotonic() < 2 * longest + 30 and index:
                self.ui.say(f"out of budget after {index} of {runs} pairs")
                break
            for name in order if index % 2 == 0 else order[::-1]:  # neither side always goes first
                result = self.call(name, "bench", requests=messages)
                result.pop("kernels")
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


def bench(recipe: Recipe, ui: UI, *, concurrent: int, prompt_tokens: int, out_tokens: int, runs: int,
          out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str], backend: str = "vllm") -> dict:
    settings = recipe.section("bench")
    subject = recipe.name + ("-tiny" if recipe.tiny else "")
    kept = record.Record("bench", subject, {"concurrent": concurrent, "prompt_tokens": prompt_tokens,
                                            "out_tokens": out_tokens, "runs": runs}, out)
    deadline = time.monotonic() + budget
    sides = {"off": engine_start(recipe, False), "on": engine_start(recipe, True)}
    messages = requests(concurrent, prompt_tokens, out_tokens, recipe.vocab)
    short = requests(concurrent, prompt_tokens, 40 + PROFILE_STEPS, recipe.vocab)
    with Pair(sides, kept, ui, env=env, logs=logs, deadline=deadline, backend=backend) as pair:
        profiles = {}
        for name in sides:
            pair.call(name, "bench", requests=short)  # compiles and warms what the measured runs need
            profiled = pair.call(name, "bench", requests=short, profile_steps=PROFILE_STEPS)
            profiles[name] = by_operator(profiled["kernels"], max(1, profiled["profiled_steps"]),
                                         settings.get("operators", {}))
            kept.data["engines"][name]["kernels"] = sorted(profiled["kernels"], key=lambda k: -k["us"])[:60]
        operators = shares(profiles["off"], profiles["on"])
        ui.say(table(["operator", "off us", "on us", "share of loss"],
                     [[r["operator"], r["off_us"], r["on_us"], f"{r['share']:.1%}"] for r in operators]))
        done = pair.alternate(messages, runs, ("off", "on"))
    result = summary(done)
    floor = settings.get("floor", 0.88)
    ui.say(f"off {result['off']:,.0f} tok/s, on {result['on']:,.0f} tok/s: ratio {result['ratio']:.3f} "
           f"(pairs {', '.join(f'{p:.3f}' for p in result['pairs'])}; at least {floor} wanted)")
    locked = all(e["lock"]["state"] == "locked" for e in kept.data["engines"].values())
    kept.finish(locked and len(result["pairs"]) == runs, result["ratio"] >= floor, locked=locked, **result, floor=floor,
                operators=operators)
    return kept.data
