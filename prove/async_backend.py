"""Runs inside the learner's process: the asynchronous loop of the Megatron overlay around the aligned actor.

Two processes share the GPU. This one is `trainer_backend.Backend`: the actor, and an engine of its own that serves the
synchronous steps only. A worker of `rollout_workers.WorkerPool` holds the other engine; it generates while this process
trains. The two never share a tensor: each version crosses through host memory, 46 MB for the small model, and
`weight_sync` digests it on both sides.

A task is one batch of prompts, so that the engine decodes all its answers together and every answer of an update has
the same version. Before each update the answers are scored again at the version that sampled them, by a second model
without gradients, the shadow. Its weights are the masters as they were then, kept on the host for as long as the lag
allows (max_lag + 1 versions): a stopped loop's state has to hold them anyway, and on the device they would cost as many
models. The masters and not what the engine was sent: the engine holds A, the masters log(-A), and a way back through
the logarithm changes last bits. The shadow must then export the digest that the answers were tagged with.
"""
from __future__ import annotations

import dataclasses
import multiprocessing.forkserver
import multiprocessing.util
import os
import pathlib
import shutil
import signal
import time

import numpy as np

from prove import trainer_backend, workload
from prove.engine import backend_class, pack, unpack
from prove.train import requests, reward
from prove.trainer_backend import _training


@dataclasses.dataclass(frozen=True)
class Work:
    """What the tasks are: `prove train`'s steps, by their number."""

    groups: int
    answers: int
    tokens: int
    vocab: int
    micro: int
    share: float      # of `micro`, in the trained forward

    def requests(self, task: int) -> list[workload.Request]:
        return requests(task, self.groups, self.answers, self.tokens, self.vocab)

    def sequences(self, group) -> list[dict]:
        """A finished task as the trainer takes it."""
        from megatron.zero_mismatch.reinforce_zero import group_advantages

        asked = self.requests(group.task)
        advantages = group_advantages(group.rewards, [r.id.partition("a")[0] for r in asked]).tolist()
        return [{"id": r.id, "prompt": list(r.prompt), "tokens": pack(tokens.numpy()),
                 "words": pack(logprobs.numpy().view(np.uint32)), "advantage": advantage}
                for r, tokens, logprobs, advantage in
                zip(asked, group.tokens, group.logprobs, advantages, strict=True)]

    def answered(self, task: int, answers: dict) -> tuple[list, list, list[float]]:
        """An engine's answers as `rollout_workers.Rollout.generate` returns them. A token too few is an error."""
        import torch

        tokens, logprobs, rewards = [], [], []
        for request in self.requests(task):
            if request.id not in answers or len(unpack(answers[request.id]["tokens"])) != request.max_tokens:
                raise RuntimeError(f"task {task}: the answer to {request.id} is missing or short")
            tokens.append(torch.from_numpy(unpack(answers[request.id]["tokens"]).copy()))
            logprobs.append(torch.from_numpy(unpack(answers[request.id]["words"]).view(np.float32).copy()))
            rewards.append(reward(unpack(answers[request.id]["tokens"]), self.vocab))
        return tokens, logprobs, rewards


@dataclasses.dataclass(frozen=True)
class MakeRollout:
    """Called in the worker's process: an engine like the learner's, from the same files."""

    backend: str
    start: dict
    work: Work
    vllm_path: str

    def __call__(self) -> Rollout:
        engine = backend_class(self.backend)(emit=lambda event: None, **self.start)
        if (found := engine.info()["vllm_path"]) != self.vllm_path:
            raise RuntimeError(f"the worker runs {found}, expected the learner's {self.vllm_path}")
        # An engine's own shutdown can take long, and there is nothing left to save.
        multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=100)
        return Rollout(engine, self.work)


class Rollout:
    def __init__(self, engine, work: Work):
        import torch

        self.engine, self.work = engine, work
        # For the life of the process: the engine's parameters may be inference tensors, and a sync writes to them.
        self._mode = torch.inference_mode()
        self._mode.__enter__()

    def resident(self):
        return self.engine.resident()

    def generate(self, task: int):
        found = self.engine.op_run(requests=[r.message() for r in self.work.requests(task)])
        return self.work.answered(task, found["answers"])


class Learner:
    """`async_loop.Learner` over the actor."""

    def __init__(self, backend: Asynchronous, work: Work, max_lag: int, folder: pathlib.Path):
        self.backend, self.work, self.max_lag, self.folder = backend, work, max_lag, folder
        self.guard, self.model = backend.actor.guard, backend.actor.model
        self.shadow, self.shadow_version = backend._model(recompute=False)[2], None
        self.masters: dict[int, dict] = {}
        self._keep()

    def weights(self) -> list:
        return list(self.model.exported())

    def update(self, groups: list) -> dict:
        started = time.perf_counter()
        scored: dict = {}
        for group in groups:
            self._show(group.tag)
            scored |= self.backend._score(self.shadow, self.work.sequences(group), self.work.micro)["words"]
        row = train_on(self.backend, self.work, groups, scored, started)
        self._keep()
        return row

    def state(self) -> dict:
        folder = self.folder / f"version-{self.guard.version}"
        shutil.rmtree(folder, ignore_errors=True)
        self.backend.actor.save(folder)
        return {"folder": str(folder), "masters": self.masters}

    def restore(self, state: dict) -> None:
        self.backend.actor.load(pathlib.Path(state["folder"]))
        self.masters = state["masters"]

    def _keep(self) -> None:
        version = self.guard.version
        self.masters[version] = {k: p.detach().to("cpu", copy=True) for k, p in self.model.named_parameters()}
        self.masters = {v: kept for v, kept in self.masters.items() if v >= version - self.max_lag}

    def _show(self, tag) -> None:
        """The weights of `tag` into the shadow; raises unless they are the ones the rollout was made with."""
        import torch
        from megatron.zero_mismatch.digest import tensor_digests, total_digest

        if self.shadow_version == tag.version:
            return
        self.shadow_version = None
        with torch.no_grad():
            for name, parameter in self.shadow.named_parameters():
                parameter.copy_(self.masters[tag.version][name])
        if (found := total_digest(tensor_digests(self.shadow.exported()))) != tag.digest:
            raise RuntimeError(f"the weights kept of version {tag.version} have digest {found[:16]}..., the rollout's "
                               f"had {tag.digest[:16]}...")
        self.shadow_version = tag.version


def train_on(backend: Asynchronous, work: Work, groups: list, scored: dict, started: float) -> dict:
    """One update on `groups`, and its row; `scored` has each answer's words at its own version."""
    import torch
    from megatron.zero_mismatch.mismatch_metrics import split

    scoring = time.perf_counter() - started
    sequences = [s for group in groups for s in work.sequences(group)]
    learned = backend._learn(sequences[::-1], int(work.micro * work.share))

    def logprobs(words: dict):
        return torch.from_numpy(np.concatenate([unpack(words[s["id"]]).view(np.float32) for s in sequences]))[None]

    recorded = logprobs({s["id"]: s["words"] for s in sequences})
    parts = split(logprobs(learned["words"]), logprobs(scored), recorded, torch.ones_like(recorded, dtype=torch.bool))
    rewards = [r for group in groups for r in group.rewards]
    return {"version": learned["version"] - 1, "reward": sum(rewards) / recorded.numel(), "loss": learned["loss"],
            "norm": learned["norm"], "weights": learned["weights"], "score_seconds": scoring,
            "update_seconds": learned["seconds"], "words": dataclasses.asdict(parts.words),
            "d3": parts.total.k3, "lag_k3": parts.lag.k3, "kernel_k3": parts.kernel.k3,
            "max_weight": parts.total.max_weight, "mean_weight": parts.total.mean_weight}


class Asynchronous:
    """The ops, over a trainer backend. `worker`: the backend of the rollout worker's engine."""

    worker = "vllm"

    def __init__(self, **start):
        # Workers are forked from a server that has imported vLLM and no CUDA, while this process starts: that spares
        # each of them the import. The module is the one that vLLM's own server preloads for its forked workers
        # (entrypoints/launchers/api_server/entry.py:46 of 0.33.0).
        multiprocessing.forkserver.set_forkserver_preload(["torch", "vllm.v1.engine.async_llm"])
        multiprocessing.forkserver.ensure_running()
        super().__init__(**start)
        self.start = {k: v for k, v in start.items() if k != "emit"}

    def op_synchronous(self, *, task: int, work: dict) -> dict:
        """One step of rollout, score, update and sync, one after the other, with this process's own engine."""
        from megatron.zero_mismatch.sample_queue import Group

        work = Work(**work)
        found = self.op_rollout(requests=[r.message() for r in work.requests(task)])
        group = Group(task, self.receiver.tag(), *work.answered(task, found["answers"]))
        started = time.perf_counter()
        scored = self._score(self.actor.model, work.sequences(group), work.micro)["words"]
        with _training():
            row = train_on(self, work, [group], scored, started)
            row["sync_seconds"] = self._sync()
        return {**row, "tasks": [task], "lags": [0], "rollout_seconds": found["seconds"], "waiting": 0,
                "at": time.perf_counter()}

    def op_open(self, *, work: dict, max_lag: int, folder: str, state: str | None = None) -> dict:
        """Starts the loop, from a saved state where there is one. `op_actor` before it has built the actor."""
        import torch
        from megatron.zero_mismatch.async_loop import AsyncLoop

        if (name := self.config["architectures"][0]) != "NemotronHForCausalLM":
            raise ValueError(f"no asynchronous loop for {name}: its engine derives weights after a sync, which the "
                             "rollout workers do not do yet; there is one for NemotronHForCausalLM")
        work = Work(**work)
        make = MakeRollout(self.worker, self.start, work, self.info()["vllm_path"])
        with _training():
            learner = Learner(self, work, max_lag, pathlib.Path(folder))
            self.loop = AsyncLoop(learner, make, workers=1, groups_per_update=1, max_lag=max_lag,
                                  state=torch.load(state) if state else None)
        return {"version": self.actor.guard.version, "digest": self.actor.guard.digest,
                "arrived": sorted(group["task"] for group in self.loop.queue.state())}

    def op_fill(self) -> dict:
        """Waits for the worker's engine, and until it may generate no further ahead."""
        started = time.perf_counter()
        self.loop.queue.fill()
        return {"waiting": self.loop.queue.counts()[0], "seconds": time.perf_counter() - started}

    def op_learn(self) -> dict:
        """The next update, as soon as its samples are there."""
        started = time.perf_counter()
        with _training():
            (row,) = self.loop.run(1)
        ended = time.perf_counter()
        waited = ended - started - row["score_seconds"] - row["update_seconds"]
        return {**row, "other_seconds": waited,  # waiting for samples, publishing, keeping the masters
                "waiting": self.loop.queue.counts()[0], "at": ended}

    def op_kill(self) -> dict:
        """Kills the worker while it has a task. `lost`: that task did not arrive, and is to be generated anew."""
        queue, pool = self.loop.queue, self.loop.pool
        _until(lambda: queue.issued(), "no task was handed out")
        (task,), (pid,) = queue.issued(), pool.pids()
        os.kill(pid, signal.SIGKILL)
        _until(lambda: pool.pids() != [pid], "the killed worker was not replaced")
        return {"task": task, "lost": task not in [group["task"] for group in queue.state()], "deaths": pool.deaths,
                "waiting": queue.counts()[0]}

    def op_stop(self, *, path: str) -> dict:
        """Lets the worker finish, and leaves everything in `path` and the folder given to `op_open`."""
        import torch

        with _training():
            state = self.loop.stop()
            torch.save(state, path)
        return {"version": state["version"], "digest": state["digest"], "deaths": self.loop.pool.deaths,
                "arrived": sorted(group["task"] for group in state["arrived"]), "issued": self.loop.queue.counts()[1]}


def _until(condition, otherwise: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{otherwise} in {seconds} s")
        time.sleep(0.001)


class Backend(Asynchronous, trainer_backend.Backend):
    pass
