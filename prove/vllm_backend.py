"""Runs inside the engine's process: vLLM in-process, and the switches the proofs need.

Nothing of vLLM is imported before `Backend` is built, so the environment the parent set is the one vLLM sees.
Read against vLLM 0.33.0; what is used beyond the public LLMEngine is listed here:

- engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens: read at every schedule()
  (v1/core/sched/scheduler.py:719), so setting it changes the chunk size of a running engine.
- engine.model_executor.driver_worker.worker.model_runner.cudagraph_manager._graphs_captured: while it is False,
  dispatch() (v1/worker/gpu/cudagraph_utils.py:535) sends every batch to the eager path.
- engine.reset_prefix_cache(reset_running_requests=True): preempts whatever runs; it starts again from its tokens.
"""
from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import time

import numpy as np

from prove.compare import words
from prove.engine import pack
from prove.scripts import load
from prove.steps import Clock, Decoding, Steps

IDLE_STEPS = 500
LATE_STEPS = 10  # after an abort: a step may still be under way, and its blocks come back when it is over


class Backend:
    SCORES = "vllm.v1.worker.gpu.sample.prompt_logprob:compute_prompt_logprobs_with_chunking"

    def __init__(self, *, model: str, flags: dict, weights_script: str | None = None, emit=lambda message: None):
        started = time.monotonic()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        emit({"event": "log", "text": f"vllm imported after {time.monotonic() - started:.1f} s"})
        # A written checkpoint is needed until the engine is built. Each engine writes its own: digests must agree.
        with tempfile.TemporaryDirectory(prefix="prove-") as folder:
            if weights_script:
                model = _small_model(load(weights_script), model, folder)
            self.config = _config(model)
            args = EngineArgs(model=model, disable_log_stats=True, **flags)
            self.engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.budget = self.scheduler.max_num_scheduled_tokens
        self.steps = Steps(self.runner, self.scheduler)
        self.held: dict[str, list] = {}
        self.counter = 0
        self.start_seconds = time.monotonic() - started

    # ---- what this engine is

    def info(self) -> dict:
        import torch
        import triton
        import vllm

        config = self.engine.vllm_config
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__,
                         "cuda": torch.version.cuda},
            "gpu": torch.cuda.get_device_name(0),
            "vllm_path": str(pathlib.Path(vllm.__file__).parent),
            "start_seconds": round(self.start_seconds, 1),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "cudagraph_capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "cache_block": self.scheduler.block_size,
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "runner": type(self.runner).__module__,
            "weights": parameters_digest(self.runner.model),
        }

    def resident(self) -> list:
        """What the engine serves from: its parameters, and the scales of an FP8 cache, which are buffers there."""
        held = list(self.runner.model.named_parameters())
        if ((self.config or {}).get("quantization_config") or {}).get("kv_cache_scheme"):
            from megatron.zero_mismatch.models.nemotron_h_weights import is_cache_scale

            held += [(name, buffer) for name, buffer in self.runner.model.named_buffers() if is_cache_scale(name)]
        return held

    # ---- ops

    def op_run(self, *, requests: list[dict], chunk: int | None = None, graphs: str = "on",
               preempt_at: list[int] = (), fresh: bool = True, one_by_one: bool = False,
               keep_blocks: int | None = None) -> dict:
        """Answers requests (fields: workload.Request, and join, read_cache, prompt_logprobs, vocabulary).

        chunk: most tokens a step; graphs: "on", "off" or "mixed" (every other step); preempt_at: steps before which all
        running requests are preempted; fresh: forget the prefix cache first; keep_blocks: cache blocks left to use.
        """
        if fresh:
            self._forget()
        batches = [[r] for r in requests] if one_by_one else [requests]
        answers: dict = {}
        with self._chunk(chunk), self._graphs(), self._keep(keep_blocks), self.steps.counted() as steps:
            started = time.monotonic()
            for batch in batches:
                answers |= self._drive(batch, graphs, set(preempt_at))
            seconds = time.monotonic() - started
        return {"answers": answers, "seconds": round(seconds, 3), **steps.summary()}

    def op_bench(self, *, requests: list[dict], profile_steps: int = 0) -> dict:
        """Throughput of answering `requests` together. Decode is timed over the steps in which every request decodes,
        each request still running; profile_steps > 0 profiles that many of them instead of timing."""
        self._forget()
        clock = Clock(self.runner, rows=len(requests), profile_steps=profile_steps)
        for request in requests:
            self._add(request)
        tokens, started = 0, time.perf_counter()
        with clock:
            while self.engine.has_unfinished_requests():
                tokens += sum(len(output.outputs[0].token_ids) for output in self.engine.step())
        seconds = time.perf_counter() - started
        return {"tokens": tokens, "seconds": seconds, **clock.summary()}

    def op_decode_begin(self, *, requests: list[dict]) -> dict:
        """Answers `requests` together from here on: op_decode advances them, op_decode_end drops them."""
        self._forget()
        self.decoding = Decoding(self.engine, self.runner, [self._add(request) for request in requests])
        return self.decoding.begin()

    def op_decode(self, *, steps: int, untimed: int) -> dict:
        return self.decoding.block(steps, untimed)

    def op_decode_end(self) -> None:
        self.decoding.end()
        for _ in range(LATE_STEPS):
            if self.engine.reset_prefix_cache():
                break
            self.engine.step()

    def _forget(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: blocks are still in use")

    def op_trace(self, *, watch: dict[str, int], functions: list[str], keep: list[dict] = (), arm: str = "left",
                 **run) -> dict:
        """A run with every watched call hashed, for each request of `watch` its positions up to the one given. `keep`
        names sites, and for each the row (`key`) of which the call's arguments are held for op_repro, no hashes."""
        from prove.trace import Tracer

        tracer = Tracer(self.runner.model, functions, keep={each["site"]: tuple(each["key"]) for each in keep})
        execute = self.runner.execute_model

        def traced(scheduler_output, *args, **kwargs):
            tokens = scheduler_output.total_num_scheduled_tokens
            tracer.begin(tokens)
            result = execute(scheduler_output, *args, **kwargs)
            keys = _row_keys(self.runner.execute_model_state.input_batch) if tokens else []
            tracer.end(keys, lambda key: key[1] <= watch.get(key[0], -1))
            return result

        self.runner.execute_model = traced
        try:
            with tracer.installed():
                self.op_run(**{**run, "graphs": "off"})
        finally:
            self.runner.execute_model = execute
        self.held[arm] = tracer.kept
        return {"missing": tracer.missing, "sites": [] if keep else _sites(tracer.sites, watch)}

    def op_trace_behind(self, *, watch: dict[str, int], requests: list[dict], **run) -> dict:
        """The same for what a step computes after the model's forward."""
        from prove.tail import Tail

        tail = Tail(self.runner, self.SCORES, _row_keys, watch, {r["id"]: len(r["prompt"]) for r in requests})
        with tail.installed():
            self.op_run(**{**run, "requests": requests, "graphs": "off"})
        return {"sites": _sites(tail.sites, watch)}

    def op_repro(self, *, site: str, folder: str, name: str, env: dict[str, str]) -> dict:
        """Reduces the two held calls to a file that shows the difference by itself. env: what vLLM has to see there."""
        import torch

        from prove import leaf, repro

        if not all(site in self.held.get(arm, {}) for arm in ("left", "right")):
            return {"form": None, "why": "it was not called with this row in both arms again"}
        left, right = (self.held[arm][site] for arm in ("left", "right"))
        function, module = repro.function_of(left, self.runner.model)
        with torch.inference_mode():
            pair = repro.reduce(function, left, right)
            inner = pair and leaf.pair(function, pair["left"], pair["right"])
        if pair is None:
            return {"form": None, "why": "replaying the call on its arguments alone shows no difference: it depends on "
                                         "state it reads (a KV cache, the step's attention metadata)"}
        said = {"form": pair["form"], "rows": [pair["left"]["rows"], pair["right"]["rows"]]}
        if inner:
            said["operators"] = [inner[side]["path"] for side in ("left", "right")]
        title, written = f"{site}: the same row, other bits ({pair['form']}).", []
        for stem, calls, saved in ((f"{name}-operators", inner, None), (name, pair, module)):
            try:
                if calls:
                    data = repro.save(pathlib.Path(folder), stem, site, saved, calls)
                    written += repro.scripts(data, title, calls, env, _setup(env))
            except Exception as error:  # noqa: BLE001 - pickling a module can fail in any way; the finding stands
                said["why"] = f"the call cannot be saved: {type(error).__name__}: {error}"
        return said | ({"scripts": written} if written else {})

    def _drive(self, requests: list[dict], graphs: str, preempt_at: set[int]) -> dict:
        names: dict[str, dict] = {}
        try:
            return self._answers(requests, graphs, preempt_at, names)
        finally:
            if self.engine.has_unfinished_requests():  # it raised: leave nothing behind for the next run
                self.engine.abort_request(list(names))

    def _answers(self, requests: list[dict], graphs: str, preempt_at: set[int], names: dict[str, dict]) -> dict:
        waiting = sorted(requests, key=lambda r: r.get("join", 0))  # stable: equal joins keep their order
        answers, step = {}, 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (waiting[0].get("join", 0) <= step or not self.engine.has_unfinished_requests()):
                request = waiting.pop(0)
                names[self._add(request)] = request
            if step in preempt_at:
                self.engine.reset_prefix_cache(reset_running_requests=True)
            if self.runner.cudagraph_manager is not None and graphs != "on":
                self.runner.cudagraph_manager._graphs_captured = graphs == "mixed" and step % 2 == 0
            for output in self.engine.step():
                request = names[output.request_id]
                answers[request["id"]] = _answer(output)
                if request.get("vocabulary"):
                    size = self.engine.vllm_config.model_config.get_vocab_size()
                    answers[request["id"]]["vocabulary"] = vocabulary_words(output.outputs[0].logprobs, size)
            if self.steps.idle > IDLE_STEPS:
                raise RuntimeError(f"nothing was scheduled for {IDLE_STEPS} steps with {len(names) - len(answers)} "
                                   "requests unanswered: the cache cannot hold even one of them")
            step += 1
        return answers

    def _add(self, request: dict) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.counter += 1
        wants_prompt = request.get("prompt_logprobs", False)
        params = SamplingParams(
            temperature=request.get("temperature", 1.0), seed=request["seed"], max_tokens=request["max_tokens"],
            ignore_eos=True, detokenize=False,
            logprobs=-1 if request.get("vocabulary") else 0 if request.get("logprobs", True) else None,
            prompt_logprobs=0 if wants_prompt else None,
            flat_logprobs=True, skip_reading_prefix_cache=not request.get("read_cache", False),
            output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"{request['id']}.{self.counter}"
        self.engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        return name

    @contextlib.contextmanager
    def _chunk(self, chunk: int | None):
        self.scheduler.max_num_scheduled_tokens = min(chunk or self.budget, self.budget)
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = self.budget

    @contextlib.contextmanager
    def _keep(self, blocks: int | None):
        """Takes free cache blocks out of the pool, so that only `blocks` are left for requests."""
        pool = self.scheduler.kv_cache_manager.block_pool
        spare = pool.get_num_free_blocks() - blocks if blocks else 0
        held = pool.get_new_blocks(spare) if spare > 0 else []
        self.steps.held = len(held)
        try:
            yield
        finally:
            self.steps.held = 0
            pool.free_blocks(held)

    @contextlib.contextmanager
    def _graphs(self):
        manager = self.runner.cudagraph_manager
        captured = manager._graphs_captured if manager is not None else None
        try:
            yield
        finally:
            if manager is not None:
                manager._graphs_captured = captured


def _row_keys(batch) -> list[tuple[str, int]]:
    """(request, position) of every row of a step. vLLM's request ids end in "-" and a random tail, ours in ".count"."""
    positions = batch.positions[:batch.num_tokens].tolist()
    keys = []
    for index, name in enumerate(batch.req_ids):
        rows = range(int(batch.query_start_loc_np[index]), int(batch.query_start_loc_np[index + 1]))
        keys += [(name.rpartition("-")[0].rpartition(".")[0], positions[row]) for row in rows]
    return keys


def _sites(sites: dict[str, dict], watch: dict[str, int]) -> list[dict]:
    names = {name: index for index, name in enumerate(watch)}
    return [{"name": name, "written": sorted(site["written"]),
             **{side: _packed(site[side], names) for side in ("in", "out")}} for name, site in sites.items()]


def _packed(side: dict[str, dict], names: dict[str, int]) -> dict[str, list[dict]]:
    """{tensor: {(request, position): hash}} for the pipe: {tensor: [numbers of the requests, positions, hashes]}."""
    return {tensor: [pack(np.asarray(column, np.int64)) for column in (
                [names[name] for name, _ in rows], [position for _, position in rows], [*rows.values()])]
            for tensor, rows in side.items()}


def _setup(env: dict[str, str]) -> tuple[str, ...]:
    """What an engine of this environment calls before its operators, as v1/worker/gpu_worker.py does: it replaces
    operators of torch."""
    invariant = env.get("VLLM_BATCH_INVARIANT") == "1"
    return ("vllm.model_executor.determinism.batch_invariant:init_batch_invariance",) if invariant else ()


def _answer(output) -> dict:
    completion = output.outputs[0]
    answer = {
        "tokens": pack(np.asarray(completion.token_ids, dtype=np.int64)),
        "words": pack(words(_chosen(completion.logprobs))),
        "cached": int(output.num_cached_tokens or 0),
    }
    if output.prompt_logprobs is not None:
        # One entry a prompt token; the first has none. After a prefix hit only the computed tail is there.
        answer["prompt_words"] = pack(words(_chosen(output.prompt_logprobs)))
    return answer


def vocabulary_words(logprobs, size: int) -> np.ndarray:
    """uint32 [positions, size]: every token's logprob, at its id. vLLM lists the sampled token, then all by rank. A
    token that is not listed has the word of a NaN. An array, for this process alone: a step's are too many for a pipe.
    """
    found = np.full((len(logprobs.start_indices), size), np.float32(np.nan).view(np.uint32))
    for row, (start, end) in enumerate(zip(logprobs.start_indices, logprobs.end_indices, strict=True)):
        found[row, logprobs.token_ids[start:end]] = words(logprobs.logprobs[start:end])
    return found


def _chosen(logprobs) -> list[float]:
    """The logprob of the sampled (or prompt) token at each position: vLLM puts it first."""
    bounds = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [logprobs.logprobs[start] for start, end in bounds if start < end]


def _config(model: str) -> dict | None:
    """The checkpoint's config.json where it lies in a folder; None for a name on the hub."""
    path = pathlib.Path(model, "config.json")
    return json.loads(path.read_text()) if path.is_file() else None


def _small_model(script, source: str, folder: str) -> str:
    """What to load: `source`, its parameters filled by the script, or the checkpoint that the script writes."""
    if hasattr(script, "fill"):
        _replace_dummy_loader(script)
        return source
    script.write(source, folder)
    return folder


def _replace_dummy_loader(script) -> None:
    """load_format = "dummy" fills the parameters by the recipe's script instead of with near-zero noise."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("dummy")
    class TinyLoader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            pass

        def load_weights(self, model, model_config) -> None:
            script.fill(model)


def parameters_digest(model) -> str:
    """A 64-bit sum over the bytes of all parameters as the kernels see them: equal models have equal digests."""
    import torch

    total = 0
    for index, (_, param) in enumerate(model.named_parameters()):
        flat = param.detach().contiguous().view(-1).view(torch.uint8)
        tail = flat.numel() % 4
        whole = flat[:flat.numel() - tail].view(torch.int32).sum(dtype=torch.int64) if flat.numel() >= 4 else flat.sum()
        total = (total * 1000003 + int(whole) + int(flat[-tail:].sum() if tail else 0) + index) % 2**64
    return f"{total:016x}"
