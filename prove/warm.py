"""`prove warm`: fills the JIT caches, so that a later command spends its minutes on proofs.

TileLang, Triton, CuTe DSL and DeepGEMM compile at first use, and some of their kernels differ with the number of
tokens. So: compile what the recipe's script names, in parallel; start an eager engine (no capture to wait for); prefill
at sizes that cross the kernels' tile limits, decode at several batch sizes; then start an engine with graphs. What each
second went into is printed and recorded.
"""
from __future__ import annotations

import pathlib
import time

from prove import precompile, record, workload
from prove.engine import Engine, EngineError
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.ui import UI

PREFILLS = (1, 4, 5, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 511, 512, 513, 1024, 2048, 2049, 4096, 8000)
DECODES = (1, 4, 5, 16, 17, 32, 33, 64, 65, 128, 129, 256)


def warm(recipe: Recipe, ui: UI, *, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
         modes: list[bool], backend: str = "vllm") -> dict:
    kept = record.Record("warm", recipe.subject, {"modes": modes}, out)
    deadline, complete = time.monotonic() + budget, True
    for invariant in modes:
        if script := recipe.section("precompile").get("script"):
            ui.note(f"precompiling for VLLM_BATCH_INVARIANT={invariant:d}")
            for row in precompile.run(recipe.folder / script, recipe.environment(invariant) | env, logs,
                                      0.5 * (deadline - time.monotonic()), ui.note):
                kept.row(row)
        for name, flags in (("eager", {"enforce_eager": True}), ("graph", {})):
            row = {"engine": f"{name}, VLLM_BATCH_INVARIANT={invariant:d}"}
            ui.note(f"starting {row['engine']}")
            start, environment = engine_start(recipe, invariant, flags)
            started = time.monotonic()
            try:
                with Engine(start, backend=backend, env=environment | env, log=logs / f"warm-{name}-{invariant:d}.log",
                            on_event=lambda event: _event(ui, event), timeout=deadline - time.monotonic()) as engine:
                    row["start_seconds"] = round(time.monotonic() - started, 1)
                    ui.note(f"started in {row['start_seconds']} s")
                    row["shapes"] = _shapes(engine, recipe, ui, deadline)
                    row["where"] = engine.call("where", timeout=10)
                complete &= not any(shape.get("error") for shape in row["shapes"])
            except EngineError as error:
                row["error"], complete = str(error), False
                ui.say(str(error))
            kept.row(row)
            for place, seconds in list(row.get("where", {}).items())[:15]:
                ui.say(f"  {seconds:6.0f} s  {place}")
    kept.finish(complete, complete)
    return kept.data


def _shapes(engine: Engine, recipe: Recipe, ui: UI, deadline: float) -> list[dict]:
    """Runs every size and returns what each took; the second visit of a size is free."""
    rows = []
    limit = engine.info["max_model_len"] - 8
    jobs = [("prefill", n, [(min(n, limit), 1)]) for n in PREFILLS]
    jobs += [("decode", n, [(150, 4)] * n) for n in DECODES if n <= engine.info["max_num_seqs"]]
    for kind, size, sizes in jobs:
        left = deadline - time.monotonic()
        if left < 10:
            rows.append({"kind": kind, "size": size, "error": "out of budget"})
            continue
        requests = [workload.Request(f"w{i}", workload.prompt(length, recipe.vocab, seed=i), count, seed=i).message()
                    for i, (length, count) in enumerate(sizes)]
        started = time.monotonic()
        try:
            engine.call("run", timeout=left, requests=requests)
        except EngineError as error:
            if error.kind != "failed":
                raise
            rows.append({"kind": kind, "size": size, "error": str(error)})
            ui.note(f"{kind} {size}: {error}")
            continue
        rows.append({"kind": kind, "size": size, "seconds": round(time.monotonic() - started, 2)})
        if rows[-1]["seconds"] > 2:
            ui.note(f"{kind} {size}: {rows[-1]['seconds']} s")
    return rows
