"""`prove async`: the engine in one process and the actor in another generate and train at the same time on one GPU.

Four parts, one actor after the other in the learner's process (`async_backend` says what runs where):

    synchronous   steps of rollout, score, update, sync: what the asynchronous ones are timed against
    asynchronous  from the same first weights, with at most `--lag` versions between rollout and update
    stopped       the worker finishes, everything goes to files, worker and actor are dropped
    resumed       a new worker and a new actor go on from the files; halfway through, the worker is killed with SIGKILL
                  while it has a task: another takes its place, and the task is generated anew

Before every update each answer is scored at the version that sampled it, and every word must be the sampler's: what is
left between rollout and learner is then weight lag alone. `d3` splits into `lag_k3` and `kernel_k3`; the latter must be
exactly 0, and at lag 0 so must the whole. Every task must be trained once and in order, across the stop and the death.

The asynchronous part begins with a full queue, so its first updates have lags 0, 1, ... `--lag`. From then on the lag
is what comes of it: samples wait, and grow old, only while training is slower than generation. The summary says how
many updates had which lag.

Throughput is response tokens a second between updates, the first of a part left out (kernels are compiled in them):
those trained or those generated, whichever are fewer, so that emptying the queue is not counted as speed. Both
processes are on one GPU, without MPS: it runs the kernels of one of them at a time, and what overlaps is mostly the
host's work. The task is that of `prove train`.
"""
from __future__ import annotations

import dataclasses
import math
import pathlib
import shutil
import time

from prove import record
from prove.engine import Engine, EngineError
from prove.recipe import Recipe
from prove.rollout import _event, engine_start
from prove.train import MICRO, SHARE, Trainer, _gain
from prove.ui import UI

WARM = 5                    # updates of a part that are not timed; at least as many as it takes to fill the queue
AIM = 2.40                  # the article's ratio, on 16 GPUs with rollout and learner apart: an aim, nothing measured


@dataclasses.dataclass(frozen=True)
class Settings:
    lag: int
    updates: int
    stop_after: int
    synchronous: int
    groups: int
    answers: int
    tokens: int
    lr: float

    def __post_init__(self):
        if self.lag < 1:
            raise ValueError(f"found --lag {self.lag}, expected at least 1: lag 0 is the synchronous part")
        if not self.untimed + 1 < self.stop_after < self.updates - 1:
            raise ValueError(f"found --stop-after {self.stop_after} of {self.updates} updates, expected more than "
                             f"{self.untimed + 1}, of which the first {self.untimed} are not timed, and at least two "
                             "fewer than all")
        if self.synchronous < WARM + 2:
            raise ValueError(f"found {self.synchronous} synchronous updates, expected at least {WARM + 2}: {WARM} are "
                             "not timed")

    @property
    def untimed(self) -> int:
        return max(WARM, self.lag + 1)

    @property
    def kill_after(self) -> int:
        return (self.stop_after + self.updates) // 2

    @property
    def response_tokens(self) -> int:
        return self.groups * self.answers * self.tokens


def async_rl(recipe: Recipe, ui: UI, settings: Settings, *, out: pathlib.Path, logs: pathlib.Path, budget: float,
             env: dict[str, str], backend: str = "async") -> dict:
    subject = f"{recipe.subject}-lag-{settings.lag}"
    kept = record.Record("async", subject, {**dataclasses.asdict(settings), "response_tokens": settings.response_tokens,
                                            "micro": MICRO, "share": SHARE, "workers": 1}, out)
    deadline = time.monotonic() + budget
    folder = logs / f"async-{subject}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start, environment = engine_start(recipe, True)
    engine = Engine(start, backend=backend, env=environment | env, log=logs / f"async-{subject}.log", timeout=budget,
                    on_event=lambda event: _event(ui, event))
    with engine:
        kept.engine("learner and worker", engine.info, start["flags"], environment)
        kept.actor(engine.info)
        parts = _Parts(Trainer(engine, deadline), settings, recipe.vocab, folder, kept, ui)
        try:
            parts.run()
        except EngineError as error:  # what was reached is summed up; it does not pass
            kept.data["error"] = str(error)
            ui.say(str(error))
    summary = summarise(kept.data["rows"], settings)
    if "end" in kept.data:
        summary["stopped_and_resumed"] = same_state(kept.data["stopped"], kept.data["resumed"])
        summary["death_made_good"] = made_good(kept.data["killed"], kept.data["end"])
    for name, value in summary.items():
        ui.say(f"{name}: {value}")
    checks = ("equal", "every_task_once", "lag_reached", "learned", "stopped_and_resumed", "death_made_good")
    kept.finish(kept.locked and summary["updates"] == settings.updates and summary["throughput"] is not None,
                all(summary.get(check) for check in checks), summary=summary)
    return kept.data


class _Parts:
    def __init__(self, trainer: Trainer, settings: Settings, vocab: int, folder: pathlib.Path, kept: record.Record,
                 ui: UI):
        self.trainer, self.settings, self.folder, self.kept, self.ui = trainer, settings, folder, kept, ui
        self.work = {"groups": settings.groups, "answers": settings.answers, "tokens": settings.tokens, "vocab": vocab,
                     "micro": MICRO, "share": SHARE}

    def run(self) -> None:
        """Ends at the first row that is not as it must be."""
        call, lr = self.trainer.call, self.settings.lr
        first = str(self.folder / "first-weights")
        self.kept.data["actor"] = call("actor", lr=lr)
        call("save", folder=first)
        if not all(self._row("synchronous", call("synchronous", task=task, work=self.work))
                   for task in range(self.settings.synchronous)):
            return
        call("actor", lr=lr, restore=first)
        self._open()
        self.kept.data["filled"] = call("fill")
        if not self._learn("asynchronous", self.settings.stop_after):
            return
        self.kept.data["stopped"] = call("stop", path=str(self.folder / "state.pt"))
        self.ui.note(f"stopped at version {self.kept.data['stopped']['version']}")
        call("actor", lr=lr)
        self.kept.data["resumed"] = self._open(state=str(self.folder / "state.pt"))
        if not self._learn("resumed", self.settings.kill_after - self.settings.stop_after):
            return
        self.kept.data["killed"] = call("kill")
        self.ui.note(f"killed the worker on task {self.kept.data['killed']['task'] + 1}")
        if self._learn("resumed", self.settings.updates - self.settings.kill_after):
            self.kept.data["end"] = call("stop", path=str(self.folder / "end.pt"))

    def _open(self, state: str | None = None) -> dict:
        self.ui.note("starting the worker's engine")
        return self.trainer.call("open", work=self.work, max_lag=self.settings.lag, folder=str(self.folder),
                                 state=state)

    def _learn(self, part: str, updates: int) -> bool:
        return all(self._row(part, self.trainer.call("learn")) for _ in range(updates))

    def _row(self, part: str, row: dict) -> bool:
        row = {"case": f"{part} {row['tasks'][0] + 1}", "part": part, **row}
        row["equal"] = equal(row, self.settings.response_tokens)
        self.kept.row(row)
        words = row["words"]
        self.ui.note(f"{row['case']}: lag {row['lags'][0]}, words that differ {words['differing_words']} of "
                     f"{words['tokens']:,}, D3 {row['d3']:.3g} (lag {row['lag_k3']:.3g}, kernel {row['kernel_k3']:.3g}"
                     f"), largest w {row['max_weight']:.3g}, reward {row['reward']:.3f}, score "
                     f"{row['score_seconds']:.2f} s, update {row['update_seconds']:.2f} s")
        return row["equal"]


def equal(row: dict, tokens: int) -> bool:
    """Every word at the rollout's version is the rollout's; all of D3 is lag; without lag there is none."""
    words = row["words"]
    return (words["tokens"] == tokens and words["differing_words"] == words["invalid_tokens"] == 0
            and row["kernel_k3"] == 0 and row["d3"] == row["lag_k3"] and (max(row["lags"]) > 0 or row["d3"] == 0))


def same_state(stopped: dict, resumed: dict) -> bool:
    """The resumed loop begins with the version, the weights and the samples of the stopped one; nothing was running."""
    return stopped["issued"] == 0 and all(stopped[key] == resumed[key] for key in ("version", "digest", "arrived"))


def made_good(killed: dict, end: dict) -> bool:
    """The worker died over a task, once, and its successor finished; `every_task_once` sees what became of the task."""
    return killed["lost"] and killed["deaths"] == end["deaths"] == 1 and end["issued"] == 0


def summarise(rows: list[dict], settings: Settings) -> dict:
    """What the rows say together. Parts that were not reached count as not shown."""
    from megatron.zero_mismatch.mismatch_metrics import peak_to_median

    trained = [row for row in rows if row["part"] != "synchronous"]
    lags = [lag for row in trained for lag in row["lags"]]
    curve = [row["reward"] for row in trained]
    d3 = [row["d3"] for row in trained]
    ratio = peak_to_median(d3) if d3 else None
    gain = _gain(curve) if curve else None
    return {
        "updates": len(trained), "equal": all(row["equal"] for row in rows) and bool(trained),
        "every_task_once": [task for row in trained for task in row["tasks"]] == list(range(settings.updates)),
        "lags": {str(lag): lags.count(lag) for lag in sorted(set(lags))},
        "lag_reached": settings.lag in lags and any(row["lag_k3"] > 0 for row in trained),
        "kernel_k3": max((row["kernel_k3"] for row in trained), default=None),
        "d3_peak": max(d3, default=None),
        "d3_peak_to_median": ratio if ratio is None or math.isfinite(ratio) else "the median is 0",
        "largest_weight": max((row["max_weight"] for row in trained), default=None),
        "gain": gain, "learned": gain is not None and gain["last"] > gain["first"],
        "throughput": _throughput(rows, settings),
    }


def _throughput(rows: list[dict], settings: Settings) -> dict | None:
    """The resumed part is not timed: its first samples were made before it began."""
    rates = [_rate([row for row in rows if row["part"] == part], untimed, settings.response_tokens)
             for part, untimed in (("synchronous", WARM), ("asynchronous", settings.untimed))]
    if None in rates:
        return None
    return {"synchronous": rates[0], "asynchronous": rates[1], "ratio": rates[1] / rates[0], "gpus": 1,
            "aim": f"{AIM} on 16 GPUs, not claimed here"}


def _rate(rows: list[dict], untimed: int, tokens: int) -> float | None:
    """Response tokens a second from the end of update `untimed` to the end of the last one: the lower of the trained
    and of the generated."""
    if len(rows) <= untimed:
        return None
    first, last, trained = rows[untimed - 1], rows[-1], len(rows) - untimed
    generated = trained + last["waiting"] - first["waiting"]
    return min(trained, generated) * tokens / (last["at"] - first["at"])
