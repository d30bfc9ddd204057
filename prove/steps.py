"""Looks over the model runner's shoulder: what its steps were, when they ran, which kernels they launched."""
from __future__ import annotations

import collections
import contextlib
import gc
import math
import statistics
import time

from prove.host import HostProfile


SETTLED = 20  # steps until the pipeline is full and the clocks are up


def on_device(events) -> list[dict]:
    """Of a profile's rows those that ran on the device, the longest first; the calls that launched them are rows of no
    device time."""
    ran = [{"name": e.key, "count": e.count, "us": e.self_device_time_total} for e in events
           if e.self_device_time_total > 0]
    return sorted(ran, key=lambda kernel: -kernel["us"])


class Clock:
    """Times the steps of a run in which `rows` requests all decode. With `profile_steps` it profiles so many of them on
    the device and the next ones on the host: one after the other, because each slows the other's side."""

    def __init__(self, runner, rows: int, profile_steps: int):
        self.runner, self.rows, self.profile_steps = runner, rows, profile_steps
        self.times: list[float] = []
        self.others: list[int] = []  # of each other step, how many of `times` came before it
        self.profiler, self.kernels, self.profiled = None, [], 0
        self.host, self.host_runs = HostProfile(), False

    def __enter__(self) -> Clock:
        self.execute = self.runner.execute_model
        self.runner.execute_model = self._step
        return self

    def __exit__(self, *exc) -> None:
        self.runner.execute_model = self.execute
        if self.profiler is not None:
            self._stop()
        if self.host_runs:
            self._stop_host()

    def _step(self, scheduler_output, *args, **kwargs):
        counts = scheduler_output.num_scheduled_tokens
        if len(counts) == self.rows == scheduler_output.total_num_scheduled_tokens:
            self.times.append(time.perf_counter())
            if self.profile_steps:
                self._profile()
        else:
            self.others.append(len(self.times))
        return self.execute(scheduler_output, *args, **kwargs)

    def _profile(self) -> None:
        """Before each step: ends or begins what is due."""
        if self.profiler is not None:
            self.profiled += 1
            if self.profiled == self.profile_steps:
                self._stop()
                self.host_runs = True
                self.host.start()
        elif self.host_runs:
            self.host.steps += 1
            if self.host.steps == self.profile_steps:
                self._stop_host()
        elif len(self.times) == SETTLED:
            self._start()

    def _stop_host(self) -> None:
        self.host_runs = False
        self.host.stop()

    def _start(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profiler.start()

    def _stop(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.profiler.stop()
        self.kernels = on_device(self.profiler.key_averages())
        self.profiler = None

    def summary(self) -> dict:
        times = self.times
        decode = (len(times) - 1) * self.rows / (times[-1] - times[0]) if len(times) > 1 else 0.0
        return {"decode_steps": len(times), "decode_tokens_per_second": decode, "kernels": self.kernels,
                "profiled_steps": self.profiled, "host": self.host.summary()}


class Decoding:
    """Requests that decode together, a block of steps at a time; between blocks they wait, and so does the engine.
    Garbage is collected after a block and not within it, so that no collection falls into one of two engines' blocks
    alone; `gc.freeze` was vLLM's, when it had started."""

    def __init__(self, engine, runner, names: list[str]):
        self.engine, self.names, self.clock = engine, names, Clock(runner, rows=len(names), profile_steps=0)

    def begin(self) -> dict:
        """Prefills all, and decodes until the pipeline is full. `seconds`: until the first step in which all decode."""
        started = time.perf_counter()
        self._advance(SETTLED)
        return {"seconds": self.clock.times[0] - started}

    def block(self, steps: int, untimed: int) -> dict:
        """`untimed` steps to take up the work again, then `steps` by the clock, with no other between them: where the
        cache is just full, some decode fewer requests, or prefill one anew."""
        stamps = untimed + steps + 1
        times = self._advance(stamps, most=2 * stamps)[untimed:]
        if fewer := sum(before > untimed for before in self.clock.others):
            raise RuntimeError(f"{fewer} steps between the {steps} timed ones did not have all {len(self.names)} "
                               "requests decoding: the cache does not hold them all any more")
        each = [after - before for before, after in zip(times, times[1:], strict=False)]
        return {"steps": steps, "seconds": times[-1] - times[0], "median": statistics.median(each),
                "longest": max(each)}

    def _advance(self, stamps: int, most: float = math.inf) -> list[float]:
        """The times at which steps began in which all decode, `stamps` of them within `most` steps."""
        times, taken = self.clock.times, 0
        del times[:], self.clock.others[:]
        gc.disable()
        try:
            with self.clock:
                while len(times) < stamps:
                    if taken >= most or not self.engine.has_unfinished_requests():
                        raise RuntimeError(f"only {len(times)} of {taken} steps had all {len(self.names)} requests "
                                           f"decoding, {stamps} are needed: the cache does not hold them all any more, "
                                           "or they sample too few tokens")
                    self.engine.step()
                    taken += 1
        finally:
            gc.enable()
            gc.collect(1)
        return times

    def end(self) -> None:
        self.engine.abort_request(self.names)


class Steps:
    """Counts what the model runner really did, so that a case can show it was not vacuous."""

    def __init__(self, runner, scheduler):
        self.pool = scheduler.kv_cache_manager.block_pool
        self._on, self.held = False, 0
        self._zero()
        execute, preempt = runner.execute_model, scheduler._preempt_request

        def counted_execute(scheduler_output, *args, **kwargs):
            self._batch(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        def counted_preempt(*args, **kwargs):
            self.preemptions += self._on
            return preempt(*args, **kwargs)

        runner.execute_model, scheduler._preempt_request = counted_execute, counted_preempt
        if runner.cudagraph_manager is not None:
            dispatch = runner.cudagraph_manager.dispatch

            def counted_dispatch(*args, **kwargs):
                described = dispatch(*args, **kwargs)
                if self._on:
                    self.modes[described.cg_mode.name] += 1
                    self.mixed_modes[described.cg_mode.name] += self.is_mixed
                return described

            runner.cudagraph_manager.dispatch = counted_dispatch

    def _zero(self) -> None:
        self.modes, self.decode_rows, self.mixed, self.prefills = collections.Counter(), set(), 0, []
        self.mixed_modes, self.is_mixed = collections.Counter(), False  # of the steps with prefill and decode rows
        self.preemptions, self.peak_blocks, self.idle = 0, 0, 0

    def _batch(self, scheduler_output) -> None:
        counts = list(scheduler_output.num_scheduled_tokens.values())
        self.idle = 0 if counts else self.idle + 1
        if not self._on or not counts:
            return
        used = self.pool.num_gpu_blocks - self.pool.get_num_free_blocks() - self.held
        self.peak_blocks = max(self.peak_blocks, used)
        prefill = [c for c in counts if c > 1]
        self.is_mixed = 0 < len(prefill) < len(counts)
        self.mixed += self.is_mixed
        if not prefill:
            self.decode_rows.add(len(counts))
        self.prefills += prefill

    @contextlib.contextmanager
    def counted(self):
        self._zero()
        self._on = True
        try:
            yield self
        finally:
            self._on = False

    def summary(self) -> dict:
        return {"modes": dict(self.modes), "decode_rows": sorted(self.decode_rows), "mixed_steps": self.mixed,
                "mixed_modes": {mode: count for mode, count in self.mixed_modes.items() if count},
                "longest_chunk": max(self.prefills, default=0), "chunks": len(self.prefills),
                "preemptions": self.preemptions, "peak_blocks": self.peak_blocks}
