"""Runs inside a process of `prove cost`: the aligned actor, or the same model as PyTorch runs it, and no engine.

A process each, since an aligned one sets PyTorch's GEMMs and reductions as an engine does, for the whole process. Both
models stand in Megatron's buffers with its distributed optimizer.
"""
from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import time
import types

import numpy as np

from prove.engine import pack as pack_array
from prove.scripts import load
from prove.steps import on_device
from prove.trainer_backend import MODELS, megatron_path

PAGE = 1152  # tokens of a KV page of Nemotron-H's private cache, as vLLM picks it for the checkpoint's sizes


@dataclasses.dataclass
class Arm:
    name: str
    actor: object
    recompute: bool
    cache: object = None  # OperandCache; None: weights are quantised in every forward

    def __enter__(self):
        self.actor.model.recompute = self.recompute
        _keeper(self.actor.model).cache = self.cache
        return self

    def __exit__(self, *exc):
        self.actor.ddp.zero_grad_buffer()


class Backend:
    def __init__(self, *, model: str, flags: dict, weights_script: str, emit=None):
        import torch

        started = time.monotonic()
        self.config = json.loads((pathlib.Path(model) / "config.json").read_text())
        self.kind, self.script, self.arms = flags["kind"], load(weights_script), []
        if self.kind == "aligned":
            self._invariant()
        for part in ("distributed", "optimizer", "transformer"):  # 20 s, here in both processes at the same time
            importlib.import_module(f"megatron.core.{part}")
        torch.distributed.init_process_group(self._transport(), rank=0, world_size=1,
                                             store=torch.distributed.HashStore())
        self.start_seconds = time.monotonic() - started

    def info(self) -> dict:
        import torch
        import triton
        import vllm

        return {"versions": {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__,
                             "cuda": torch.version.cuda},
                "gpu": torch.cuda.get_device_name(0), "vllm_path": str(pathlib.Path(vllm.__file__).parent),
                "start_seconds": round(self.start_seconds, 1)} | megatron_path()

    # ---- ops

    def op_build(self) -> dict:
        """The arms of this process, and what the model holds: weights, gradients, optimizer."""
        import torch
        from megatron.zero_mismatch.linear_fp8 import OperandCache

        before = torch.cuda.memory_allocated()
        self.actor = self._actor()
        self.actor.update()  # makes the optimizer's states
        torch.cuda.synchronize()
        held = round((torch.cuda.memory_allocated() - before) / 2**20)
        model = self.actor.model
        quantised = self.kind == "aligned" and (hasattr(model, "run") or bool(model.shape.formats))
        cache = OperandCache(self.actor.guard) if quantised else None
        _keeper(model).guard = self.actor.guard if quantised else None
        self.arms = [Arm(self.kind, self.actor, False, cache),
                     Arm(f"{self.kind}, recomputed", self.actor, True, cache)]
        if quantised:
            self.arms.append(Arm("aligned, recomputed, no cache", self.actor, True))
        return {"held_mib": held, "parameters": sum(p.numel() for p in model.parameters()), "quantised": quantised}

    def op_round(self, *, lengths: list[int]) -> dict:
        """One run of every arm: milliseconds by the clock, and peak memory above what is held."""
        import torch

        batch, found = self._batch(lengths), {}
        for arm in self.arms:
            with arm:
                with torch.no_grad():
                    forward = _ms(self._logprobs, batch)
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                both = _ms(self._both, batch)
                peak = round((torch.cuda.max_memory_allocated() - held) / 2**20)
                found[arm.name] = {"forward_ms": forward, "both_ms": both, "peak_mib": peak}
        return found

    def op_profile(self, *, lengths: list[int]) -> dict:
        """One forward and backward of every arm: what its kernels take, their number, and the longest by name."""
        batch, found = self._batch(lengths), {}
        for arm in self.arms:
            with arm:
                found[arm.name] = self._profiled(batch)
        return found

    def op_logprobs(self, *, lengths: list[int]) -> dict:
        import torch

        with torch.no_grad():
            return pack_array(self._logprobs(self._batch(lengths)).float().cpu().numpy().astype(np.float32))

    def op_step(self) -> float:
        """Milliseconds of an optimizer step; an aligned actor digests its new weights too."""
        return _ms(self.actor.update if self.kind == "aligned" else self._plain_step)

    def op_quantise(self) -> float:
        """Milliseconds of quantising every weight once, as an export does and as a forward without the cache does."""
        _keeper(self.actor.model).cache = None  # an export takes what a cache keeps
        return _ms(lambda: [None for _ in self.actor.model.exported()])

    # ---- inside

    def _logprobs(self, batch):
        return (self.actor.logprobs if self.kind == "aligned" else self.actor.ddp)(*batch)

    def _both(self, batch) -> None:
        self._logprobs(batch).sum().backward()

    def _plain_step(self) -> None:
        actor = self.actor
        actor.ddp.finish_grad_sync()
        type(actor.optimizer).step(actor.optimizer)  # not the guarded one
        actor.ddp.zero_grad_buffer()

    def _invariant(self) -> None:
        """As an engine's worker does in its process: no aligned forward has the rollout's bits without it."""
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

        init_batch_invariance()

    def _transport(self) -> str:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("found no GPU, expected one: times on a CPU say nothing of it")
        return "cpu:gloo,cuda:nccl"

    def _actor(self):
        from megatron.zero_mismatch.actor import Actor

        (architecture,) = self.config["architectures"]
        if architecture not in MODELS:
            raise ValueError(f"no aligned trainer for {architecture}; there is one for {', '.join(MODELS)}")
        where, name = MODELS[architecture]
        aligned = importlib.import_module(f"megatron.zero_mismatch.models.{where}")
        ordinary = importlib.import_module(f"prove.ordinary_{where}")
        shape = aligned.Shape.from_hf(self.config)
        made = getattr(aligned, name) if self.kind == "aligned" else ordinary.Ordinary
        model = self._fill(made(shape, *self._tables(where)))
        return Actor(model, heads=shape.heads, layers=len(shape.pattern), hidden=shape.hidden, lr=0.0)

    def _tables(self, where: str) -> tuple:
        from megatron.zero_mismatch import kernels, kernels_dsv4

        if where == "deepseek_v4":
            table = kernels_dsv4.from_vllm() if self.kind == "aligned" else kernels_dsv4.exact()
            return table, kernels_dsv4.rotary_tables(self.config)
        return (kernels.from_vllm(page=PAGE) if self.kind == "aligned" else kernels.reference(),)

    def _fill(self, model):
        """By the recipe's rules, which know the engine's names."""
        import torch

        model = model.cuda()
        if hasattr(self.script, "fill_masters"):
            self.script.fill_masters(model)
        elif hasattr(self.script, "fill"):
            weights = {n: torch.nn.Parameter(torch.empty_like(t), requires_grad=False) for n, t in model.exported()}
            self.script.fill(types.SimpleNamespace(named_parameters=weights.items))
            model.take(weights)
        else:
            raise ValueError("found a weights script that writes a checkpoint, expected one that fills a model; "
                             "measure the small model that has one")
        return model

    def _batch(self, lengths: list[int]):
        import torch
        from megatron.zero_mismatch.packing import pack

        generator = torch.Generator().manual_seed(1)
        return pack([torch.randint(0, self.config["vocab_size"], (n,), generator=generator).cuda() for n in lengths])

    def _profiled(self, batch) -> dict:
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self._both(batch)
            torch.cuda.synchronize()
        return summary(on_device(seen.key_averages()))


def summary(ran: list[dict]) -> dict:
    return {"kernels_ms": round(sum(one["us"] for one in ran) / 1e3, 2),
            "launches": sum(one["count"] for one in ran),
            "longest": [{"kernel": one["name"][:120], "ms": round(one["us"] / 1e3, 3), "count": one["count"]}
                        for one in ran[:12]]}


def _keeper(model):
    """What has `guard` and `cache` of the model's operators."""
    return getattr(model, "run", model)


def _ms(call, *arguments) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    call(*arguments)
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - started), 3)
