"""Sleep and wake of the engine in this process, and what vLLM 0.33.0 does not bring back by itself.

vLLM unmaps memory and keeps its addresses (device_allocator/cumem.py), so captured graphs stay valid. What becomes of
the contents goes by the tag of the pool a tensor was made in (CuMemBackend.suspend, v1/worker/gpu_worker.py:301):

  weights     on the host at level 1; dropped at level 2, but for the model's buffers
  kv_cache    dropped: KV pages, Mamba's states and rings; the prefix cache forgets them first (v1/engine/core.py:993)
  workspace   dropped: scratch of a step
  runtime     on the host at both levels: block tables and what else is made beside the caches
  no tag      untouched: graphs, sampling states, the Top-K's lists, whatever is made while profiling and warming up

Two things are left. At level 2, tensors that lie among the weights and are neither parameter nor buffer come back as
the memory was found: DeepSeek-V4's broadcast mHC weights, tables that a kernel keeps. They are looked for once, kept on
the host and written back; what derives from the weights, the sync derives again. And the caches come back so at both
levels, where a fresh engine has zeros (v1/worker/utils.py:596): padded rows of a graph read the null block, and what
they read there goes on through the router. They are zeroed.
"""
from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Iterable

import torch


class Memory:
    """vLLM's allocator: which regions of the device are a tag's."""

    def __init__(self):
        from vllm.device_allocator import cumem

        self._allocator, self._runtime = cumem.CuMemAllocator.get_instance(), cumem.libcudart

    def regions(self, tag: str) -> list[tuple[int, int]]:
        """(address, bytes)."""
        return [(address, data.handle[1]) for address, data in self._allocator.pointer_to_data.items()
                if data.tag == tag]

    def bytes(self) -> int:
        """Of all tags, what has memory now."""
        return sum(data.handle[1] for data in self._allocator.pointer_to_data.values() if not data.is_asleep)

    def zero(self, address: int, size: int) -> None:
        self._runtime.cudaMemset(address, 0, size)


class Sleeper:
    """engine: an LLMEngine started with enable_sleep_mode; runner: its model runner."""

    def __init__(self, engine, runner, memory: Memory | None = None):
        if not engine.vllm_config.model_config.enable_sleep_mode:
            raise ValueError("found an engine without enable_sleep_mode, expected one with: its memory is in no pool, "
                             "and a sleep would free nothing")
        self.engine, self.runner = engine, runner
        self.memory = memory or Memory()
        self._strays: list[torch.Tensor] | None = None
        self._host: list[torch.Tensor] = []

    @torch.inference_mode()  # the engine's tensors may be inference tensors
    def sleep(self, level: int) -> dict:
        """Nothing may run. Bytes are those of vLLM's pools; `strays` are written back at `wake`."""
        started = time.perf_counter()
        self._addresses = self._where()
        if level == 2 and self._strays is None:
            self._strays = strays(self.memory.regions("weights"), self._known())
        self._host = [stray.to("cpu", copy=True) for stray in self._strays] if level == 2 else []
        awake = self.memory.bytes()
        self.engine.sleep(level)
        return {"level": level, "freed_bytes": awake - self.memory.bytes(), "strays": len(self._host),
                "stray_bytes": sum(map(len, self._host)), "sleep_seconds": round(time.perf_counter() - started, 3)}

    @torch.inference_mode()
    def wake(self) -> dict:
        started = time.perf_counter()
        if not self.engine.wake_up():
            raise RuntimeError("the engine did not wake: part of its memory is still released")
        for region in self.memory.regions("kv_cache"):
            self.memory.zero(*region)
        for stray, host in zip(self._strays if self._host else (), self._host, strict=True):
            stray.copy_(host)
        self._host = []
        if moved := sorted(name for name, address in self._where().items() if self._addresses.get(name) != address):
            raise RuntimeError(f"{len(moved)} tensors lie elsewhere than before the sleep, first {moved[0]}; captured "
                               "graphs still read the old address")
        torch.cuda.synchronize()
        return {"wake_seconds": round(time.perf_counter() - started, 3)}

    def _known(self) -> Iterable[torch.Tensor]:
        """What the sync or vLLM itself brings back."""
        yield from self.runner.model.parameters()
        yield from self.runner.model.buffers()

    def _where(self) -> dict[str, int]:
        model, caches = self.runner.model, self.runner.kv_caches
        named = [*model.named_parameters(), *model.named_buffers(), *((f"cache {i}", t) for i, t in enumerate(caches))]
        return {name: tensor.data_ptr() for name, tensor in named}


def strays(regions: list[tuple[int, int]], known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The storages, as bytes, of live tensors that lie in `regions` and share none with `known`.

    Asks Python's collector, which sees every tensor that Python code can reach; one that only C++ holds is not seen.
    vLLM freezes the heap once it has started, which hides it from `get_objects`.
    """
    regions = sorted(regions)
    starts = [address for address, _ in regions]
    skip = {tensor.untyped_storage().data_ptr() for tensor in known}
    found: dict[int, torch.Tensor] = {}
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    objects = gc.get_objects()
    if frozen:
        gc.freeze()
    for one in objects:
        if not (type(one) is torch.Tensor or issubclass(type(one), torch.nn.Parameter)):
            continue
        if one.layout is not torch.strided or one.is_meta:
            continue
        address = one.untyped_storage().data_ptr()
        index = bisect.bisect_right(starts, address) - 1
        if index >= 0 and address < sum(regions[index]) and address not in skip and address not in found:
            found[address] = torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.untyped_storage())
    return list(found.values())
