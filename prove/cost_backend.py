"""Runs inside the process of `prove cost`: the aligned actor and the same model as PyTorch runs it, and no engine.

Both stand in Megatron's buffers with its distributed optimizer. All arms live at once and take turns, run by run, so
that whatever the machine does meanwhile meets all of them.
"""
from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import statistics
import time
import types

from prove.scripts import load
from prove.trainer_backend import MODELS

WARM = 1       # runs of every arm before the first that counts: it compiles
LEAST = 3      # runs that count, however long they take
SECONDS = 20   # no further run of a batch begins after so long
PAGE = 1152  # tokens of a KV page of Nemotron-H's private cache, as vLLM picks it for the checkpoint's sizes


@dataclasses.dataclass
class Arm:
    name: str
    actor: object
    aligned: bool
    recompute: bool
    cache: object = None  # OperandCache; None: weights are quantised in every forward

    def __enter__(self):
        self.actor.model.recompute = self.recompute
        _keeper(self.actor.model).cache = self.cache
        return self

    def __exit__(self, *exc):
        self.actor.ddp.zero_grad_buffer()

    def logprobs(self, batch):
        return self.actor.logprobs(*batch) if self.aligned else self.actor.ddp(*batch)

    def both(self, batch) -> None:
        self.logprobs(batch).sum().backward()

    def step(self) -> None:
        """The optimizer's; the aligned actor's digests the new weights too."""
        if self.aligned:
            self.actor.update()
        else:
            self.actor.ddp.finish_grad_sync()
            type(self.actor.optimizer).step(self.actor.optimizer)  # not the guarded one
            self.actor.ddp.zero_grad_buffer()


class Backend:
    def __init__(self, *, model: str, flags: dict, weights_script: str, emit=None):
        import torch

        started = time.monotonic()
        self.config = json.loads((pathlib.Path(model) / "config.json").read_text())
        self.script, self.arms = load(weights_script), []
        if not torch.distributed.is_initialized():
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
                "start_seconds": round(self.start_seconds, 1)}

    # ---- ops

    def op_build(self) -> dict:
        """Every arm's name, and what each of the two models holds: weights, gradients, optimizer."""
        import torch
        from megatron.zero_mismatch.linear_fp8 import OperandCache

        held = {}
        for kind in ("ordinary", "aligned"):
            before = torch.cuda.memory_allocated()
            actor = self._actor(kind)
            actor.update()  # makes the optimizer's states
            torch.cuda.synchronize()
            held[kind] = round((torch.cuda.memory_allocated() - before) / 2**20)
            quantised = kind == "aligned" and self._quantised(actor.model)
            cache = OperandCache(actor.guard) if quantised else None
            _keeper(actor.model).guard = actor.guard if quantised else None
            self.arms += [Arm(kind, actor, kind == "aligned", False, cache),
                          Arm(f"{kind}, recomputed", actor, kind == "aligned", True, cache)]
            if quantised:
                self.arms.append(Arm("aligned, recomputed, no cache", actor, True, True, None))
        return {"arms": [arm.name for arm in self.arms], "held_mib": held,
                "parameters": sum(p.numel() for p in actor.model.parameters()), "quantised": quantised}

    def op_measure(self, *, lengths: list[int], runs: int) -> list[dict]:
        """A row an arm: medians in milliseconds by the clock, the kernels' own time, peak memory above what is held."""
        import torch

        batch, started = self._batch(lengths), time.monotonic()
        times = {arm.name: {"forward": [], "both": []} for arm in self.arms}
        peaks = {}
        for run in range(WARM + runs):
            if run >= WARM + LEAST and time.monotonic() - started > SECONDS:
                break
            for arm in self.arms:
                with arm:
                    times[arm.name]["forward"].append(self._no_grad_ms(arm, batch))
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    times[arm.name]["both"].append(_ms(arm.both, batch))
                    peaks[arm.name] = round((torch.cuda.max_memory_allocated() - held) / 2**20)
        return [{"batch": f"{len(lengths)} x {lengths[0]}", "arm": arm.name, "peak_mib": peaks[arm.name],
                 **{f"{what}_ms": _median(found) for what, found in times[arm.name].items()},
                 **{f"{what}_runs": found[WARM:] for what, found in times[arm.name].items()},
                 **self._profiled(arm, batch)} for arm in self.arms]

    def op_distance(self, *, lengths: list[int]) -> float:
        """Mean distance between the two models' logprobs."""
        import torch

        batch = self._batch(lengths)
        with torch.no_grad():
            sides = {arm.aligned: arm.logprobs(batch) for arm in self.arms if not arm.recompute}
        return float((sides[True] - sides[False])[batch[1].positions > 0].abs().mean())

    def op_optimizer(self, *, runs: int) -> dict:
        """Milliseconds of a step, by model: AdamW, and for the aligned one the digest of every weight."""
        found = {}
        for arm in self.arms:
            if not arm.recompute:
                found[arm.name] = _median([_ms(arm.step) for _ in range(WARM + runs)])
        return found

    def op_quantise(self, *, runs: int) -> dict:
        """Milliseconds of quantising every weight once, as an export does and as a forward without the cache does."""
        model = self.arms[-1].actor.model
        return {"quantise_ms": _median([_ms(lambda: [None for _ in model.exported()]) for _ in range(WARM + runs)])}

    # ---- inside

    def _quantised(self, model) -> bool:
        return hasattr(model, "run") or bool(model.shape.formats)

    def _transport(self) -> str:
        return "cpu:gloo,cuda:nccl"

    def _actor(self, kind: str):
        from megatron.zero_mismatch.actor import Actor

        (architecture,) = self.config["architectures"]
        if architecture not in MODELS:
            raise ValueError(f"no aligned trainer for {architecture}; there is one for {', '.join(MODELS)}")
        where, name = MODELS[architecture]
        aligned = importlib.import_module(f"megatron.zero_mismatch.models.{where}")
        made = getattr(aligned, name) if kind == "aligned" else self._ordinary(where)
        shape = aligned.Shape.from_hf(self.config)
        model = self._fill(made(shape, *self._tables(where)))
        return Actor(model, heads=shape.heads, layers=len(shape.pattern), hidden=shape.hidden, lr=0.0)

    def _ordinary(self, where: str):
        return importlib.import_module(f"prove.ordinary_{where}").Ordinary

    def _tables(self, where: str) -> tuple:
        if where == "deepseek_v4":
            from megatron.zero_mismatch import kernels_dsv4

            return kernels_dsv4.from_vllm(), kernels_dsv4.rotary_tables(self.config)
        from megatron.zero_mismatch import kernels

        return (kernels.from_vllm(page=PAGE),)

    def _fill(self, model):
        """By the recipe's rules, which know the engine's names."""
        import torch

        model = model.cuda()
        if hasattr(self.script, "fill_masters"):
            self.script.fill_masters(model)
            return model
        weights = {n: torch.nn.Parameter(torch.empty_like(t), requires_grad=False) for n, t in model.exported()}
        self.script.fill(types.SimpleNamespace(named_parameters=weights.items))
        model.take(weights)
        return model

    def _batch(self, lengths: list[int]):
        import torch
        from megatron.zero_mismatch.packing import pack

        generator = torch.Generator().manual_seed(1)
        return pack([torch.randint(0, self.config["vocab_size"], (n,), generator=generator).cuda() for n in lengths])

    def _no_grad_ms(self, arm: Arm, batch) -> float:
        import torch

        with torch.no_grad():
            return _ms(arm.logprobs, batch)

    def _profiled(self, arm: Arm, batch) -> dict:
        """One forward and backward: what its kernels take, their number, and the longest by name."""
        import torch

        with arm, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            arm.both(batch)
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        return {"kernels_ms": round(sum(e.self_device_time_total for e in events) / 1e3, 2),
                "launches": sum(e.count for e in events),
                "longest": [{"kernel": e.key[:120], "ms": round(e.self_device_time_total / 1e3, 3), "count": e.count}
                            for e in events[:12]]}


def _keeper(model):
    """What has `guard` and `cache` of the aligned model's operators."""
    return getattr(model, "run", model)


def _ms(call, *arguments) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    call(*arguments)
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - started), 3)


def _median(times: list[float]) -> float:
    return round(statistics.median(times[WARM:]), 3)
