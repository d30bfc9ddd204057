"""Runs inside the engine's process: vLLM's engine and the aligned actor on one GPU, and the weights between them.

The engine is `vllm_backend.Backend`, unchanged. The actor starts from the engine's weights; from then on it is the
authority, and every version reaches the engine in place, under CUDA graphs that were captured before the first.
"""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import time

import numpy as np

from prove import vllm_backend
from prove.engine import pack, unpack

# By architecture: the module under megatron.zero_mismatch.models, and its model.
MODELS = {"NemotronHForCausalLM": ("nemotron_h", "NemotronH"), "DeepseekV4ForCausalLM": ("deepseek_v4", "DeepseekV4")}


class Backend(vllm_backend.Backend):
    ranks = 1  # that share a batch: more in cp_backend

    def __init__(self, *, model: str, **start):
        super().__init__(model=model, **start)
        if self.config is None:
            raise ValueError(f"{model} is no folder with a config.json; download the checkpoint and name its folder")
        self.actor = None

    def info(self) -> dict:
        return super().info() | megatron_path()

    # ---- ops

    def op_actor(self, *, lr: float, recompute: bool = True, restore: str | None = None, sleep: int = 0) -> dict:
        """Builds the actor, from a checkpoint where there is one, and sends its weights to the engine. `sleep`: the
        level at which the engine sleeps during every update; 0 leaves it awake."""
        import torch
        from megatron.zero_mismatch.weight_sync import SyncLedger, WeightReceiver

        with _training():
            self.actor = self._build(lr, recompute)
            if restore:
                self.actor.load(pathlib.Path(restore))
            # DeepSeek-V4 keeps a sum of mHC weights besides its parameters, and makes it again in place.
            derive = getattr(self.runner.model, "process_weights_after_loading", None)
            self.receiver = WeightReceiver(self.resident, derive=derive)
            self.ledger = SyncLedger(max_lag=0)
            self.level, self.sleeper = sleep, self._sleeper() if sleep else None
            seconds = self._sync()
        parameters = sum(p.numel() for p in self.actor.model.parameters())
        return {"parameters": parameters, "faults": self._faults(), "version": self.actor.guard.version,
                "sync_seconds": seconds, "optimizer": type(self.actor.optimizer.chained_optimizers[0]).__name__,
                "weights": self.actor.guard.digest, "torch_memory": torch.cuda.memory_allocated()}

    def op_rollout(self, *, requests: list[dict]) -> dict:
        """The engine's answers, refused unless it holds the actor's weights of now."""
        tag = self.receiver.tag()
        answers = self.op_run(requests=requests)
        self.ledger.check(tag, self.actor.guard.version)
        self.vocabulary = {name: answer.pop("vocabulary") for name, answer in answers["answers"].items()
                           if "vocabulary" in answer}
        return {**answers, "version": tag.version}

    def op_score(self, *, sequences: list[dict], micro: int) -> dict:
        """The actor's logprob words of each sequence's answer, in micro-batches of about `micro` tokens."""
        return self._score(self.actor.model, sequences, micro)

    def op_whole(self, *, sequences: list[dict], micro: int) -> dict:
        """The logprob of every token of the vocabulary at every position of these answers, against the last rollout's,
        for which they were asked. A missing position or token differs."""
        import torch

        found = {"positions": 0, "words": 0, "differing_words": 0, "nan": 0}
        with _training(), torch.no_grad():
            for batch in micro_batches(sequences, micro):
                tokens, packed = self._packed(batch)
                places = [torch.arange(end - len(unpack(s["tokens"])), end)
                          for s, (_, end) in zip(batch, packed.bounds, strict=True)]
                right = self.actor.model.vocabulary(tokens, packed, torch.cat(places).to(tokens.device))
                left = np.concatenate([self.vocabulary[s["id"]] for s in batch]).view(np.float32)
                left = torch.from_numpy(left).to(right.device)
                found["positions"] += len(left)
                found["words"] += left.numel()
                found["differing_words"] += int((left.view(torch.int32) != right.view(torch.int32)).sum())
                found["nan"] += int((left.isnan() | right.isnan()).sum())
        return found

    def op_update(self, *, sequences: list[dict], micro: int) -> dict:
        """REINFORCE Zero on the answers (fields: id, prompt, tokens, words, advantage), AdamW, and the sync. `words`
        are those of this pass's own forward."""
        import torch

        torch.cuda.reset_peak_memory_stats()
        with _training():
            with self._asleep() as slept:
                learned = self._learn(sequences, micro)
            sync = self._sync()
        return {**learned, "sync_seconds": sync, "peak_memory": torch.cuda.max_memory_allocated(), "sleep": slept}

    def op_save(self, *, folder: str) -> dict:
        self.actor.save(pathlib.Path(folder))
        return {"version": self.actor.guard.version, "weights": self.actor.guard.digest}

    def op_save_weights(self, *, path: str) -> None:
        """For an actor without an engine (cp_backend): the model's config; the masters, of which what the engine holds
        is no exact image; and the rotary tables, where a family reads the engine's."""
        import torch

        masters = {name: t.cpu() for name, t in self.actor.model.state_dict().items()}
        tables = {ratio: table.cpu() for ratio, table in getattr(self.actor.model, "tables", {}).items()}
        torch.save({"config": self.config, "masters": masters, "tables": tables}, path)

    def op_save_gradients(self, *, sequences: list[dict], micro: int, path: str) -> None:
        """The gradient of the loss of `update`, by parameter; nothing is learned."""
        import torch

        with self._accumulated(sequences, micro) as (whole, _):
            torch.save({name: gradient.cpu() for name, gradient in whole.items()}, path)

    def op_gradient_errors(self, *, sequences: list[dict], micro: int, path: str) -> dict:
        """{parameter: how far its gradient is from the one that save_gradients wrote to `path`, relative to that}:
        `whole`, and `own`, this process's share. Worked out here and not by who asks: DeepSeek-V4's tiny-train has
        8 GiB of them, which the device goes through in a second."""
        import torch

        with self._accumulated(sequences, micro) as (whole, own):
            kept = torch.load(path, map_location="cpu", mmap=True)
            wanted = ((name, kept[name].to(gradient.device)) for name, gradient in whole.items())
            return {name: {"whole": _apart(whole[name], want), "own": _apart(own[name], want)}
                    for name, want in wanted}

    def op_gradients(self, *, sequences: list[dict], micro: int, faults: list[str]) -> dict:
        """Every parameter's gradient against the independent reference: see prove/grad.py. What is known after the
        first step; op_more_gradients takes the next, as long as something is missing."""
        whole = [self._whole(s) for s in sequences]
        self.comparison = self._gradients().compare(self.actor, self.config, whole, micro, faults)
        return self.op_more_gradients()

    def op_more_gradients(self) -> dict:
        with _training():
            return next(self.comparison)

    def op_layers(self, *, prompt: list[int]) -> dict:
        """Where engine and actor part: the differing words of every layer's outputs, for one prompt's prefill."""
        import torch

        request = {"id": "layers", "prompt": prompt, "max_tokens": 1, "seed": 0}
        with _noting(self.runner.model.model.layers) as engine:
            self.op_run(requests=[request], graphs="off")
        with _training(), torch.no_grad(), _noting(self.actor.model.model.layers) as actor:
            from megatron.zero_mismatch.packing import pack as pack_sequences

            self.actor.model.hidden(*pack_sequences([torch.tensor(prompt, device="cuda")]))
        rows = []
        for layer, (left, right) in enumerate(zip(engine, actor, strict=False)):
            # Output and residual; what more a layer hands on (DeepSeek-V4: its mixing matrices) follows from them.
            differ = [int((one[:len(prompt)] != two).sum()) for one, two in zip(left[:2], right[:2], strict=True)]
            rows.append({"layer": layer, "kind": self.actor.model.shape.pattern[layer], "output": differ[0],
                         "residual": differ[1]})
        return {"rows": rows}

    # ---- inside

    def _score(self, model, sequences: list[dict], micro: int) -> dict:
        import torch

        started, found = time.perf_counter(), {}
        with _training(), torch.no_grad():
            for batch in micro_batches(sequences, micro):
                tokens, packed = self._packed(batch)
                found |= _answers(batch, packed, model(tokens, packed))
            torch.cuda.synchronize()
        return {"words": found, "seconds": time.perf_counter() - started}

    def _learn(self, sequences: list[dict], micro: int) -> dict:
        """op_update without the sync; the caller is in `_training`."""
        import torch

        started = time.perf_counter()
        found, loss = self._accumulate(sequences, micro)
        torch.cuda.synchronize()
        accumulated = time.perf_counter() - started
        norm = self.actor.update()
        torch.cuda.synchronize()
        return {"words": found, "loss": loss, "norm": norm, "seconds": time.perf_counter() - started,
                "accumulate_seconds": accumulated, "version": self.actor.guard.version,
                "weights": self.actor.guard.digest}

    def _accumulate(self, sequences: list[dict], micro: int) -> tuple[dict, float]:
        """Fills the gradient buffers: (the forward's words, the loss)."""
        found, losses = {}, []
        for batch in micro_batches(sequences, micro):
            tokens, packed = self._packed(batch)
            seen = {}
            losses.append(self.actor.accumulate(self._loss(batch, packed, len(sequences), seen), tokens, packed))
            found |= seen
        return found, sum(losses)

    @contextlib.contextmanager
    def _accumulated(self, sequences: list[dict], micro: int):
        """Yields (the gradients of all ranks, this process's share of them), by parameter."""
        with _training():
            self._accumulate(sequences, micro)
            own = {name: p.main_grad for name, p in self.actor.model.named_parameters() if p.requires_grad}
            yield self.actor.gradients(), own
            self.actor.ddp.zero_grad_buffer()

    def _model(self, recompute: bool):
        """(name of the family, its model's shape, the model with the weights to start from)."""
        (architecture,) = self.config["architectures"]
        if architecture not in MODELS:
            raise ValueError(f"no aligned trainer for {architecture}; there is one for {', '.join(MODELS)}")
        where, name = MODELS[architecture]
        module = importlib.import_module(f"megatron.zero_mismatch.models.{where}")
        shape = module.Shape.from_hf(self.config)
        model = getattr(module, name)(shape, *self._tables(where), recompute=recompute)
        model = model.cuda()
        self._start(model)
        return where, shape, model

    def _start(self, model) -> None:
        model.take(dict(self.resident()))

    def _build(self, lr: float, recompute: bool):
        from megatron.zero_mismatch.actor import Actor

        where, shape, model = self._model(recompute)
        actor = Actor(model, heads=shape.heads, layers=len(shape.pattern), hidden=shape.hidden, lr=lr,
                      context_parallel=self.ranks)
        # The forward and its recomputation quantise a weight once a version.
        from megatron.zero_mismatch.linear_fp8 import OperandCache

        if where == "deepseek_v4":
            model.run.guard, model.run.cache = actor.guard, OperandCache(actor.guard)
        elif shape.formats:
            model.guard, model.cache = actor.guard, OperandCache(actor.guard)
        return actor

    def _tables(self, where: str) -> tuple:
        """The kernels of a family, and the engine's own rotary tables where the family has them."""
        if where == "deepseek_v4":
            from megatron.zero_mismatch import kernels_dsv4
            from megatron.zero_mismatch.models.deepseek_v4_weights import rotary_tables

            return kernels_dsv4.from_vllm(), rotary_tables(self.runner.model)
        from megatron.zero_mismatch import kernels

        return (kernels.from_vllm(page=self.scheduler.block_size),)

    def _gradients(self):
        (architecture,) = self.config["architectures"]
        return importlib.import_module(
            "prove.gradients_deepseek_v4" if MODELS[architecture][0] == "deepseek_v4" else "prove.gradients")

    def _faults(self) -> tuple[str, ...] | None:
        """A family's own planted faults; None: those of grad.py."""
        found = getattr(self._gradients(), "FAULTS", None)
        if found is None and self.actor.model.shape.formats:
            from prove.grad import FAULTS
            from prove.gradients import QUANTISED_FAULTS

            return FAULTS + QUANTISED_FAULTS
        return found

    def _sleeper(self):
        from prove.sleep import Sleeper

        return Sleeper(self.engine, self.runner)

    @contextlib.contextmanager
    def _asleep(self):
        """The engine sleeps inside; what is yielded says afterwards how. `refused`: a rollout between wake and sync."""
        from megatron.zero_mismatch.weight_sync import SyncRefused

        slept: dict = {}
        if not self.level:
            yield slept
            return
        self.receiver.asleep(self.level)
        slept |= self.sleeper.sleep(self.level)
        yield slept
        slept |= self.sleeper.wake()
        self.receiver.awake()
        try:
            self.ledger.check(self.receiver.tag(), self.actor.guard.version)
            slept["refused"] = False
        except SyncRefused:
            slept["refused"] = True

    def _sync(self) -> float:
        import torch
        from megatron.zero_mismatch.weight_sync import Manifest

        torch.cuda.synchronize()
        started = time.perf_counter()
        exported = list(self.actor.model.exported())
        manifest = Manifest.of(self.actor.guard, exported)
        self.ledger.publish(manifest)
        self.receiver.begin(manifest)
        with torch.inference_mode():  # the engine's parameters may be inference tensors
            for name, tensor in exported:
                self.receiver.put(name, tensor)
            receipt = self.receiver.commit()
        self.ledger.confirm(receipt)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def _whole(self, sequence: dict):
        import torch

        return torch.tensor([*sequence["prompt"], *map(int, unpack(sequence["tokens"]))], device="cuda")

    def _packed(self, batch: list[dict]):
        from megatron.zero_mismatch.packing import pack as pack_sequences

        return pack_sequences([self._whole(s) for s in batch])

    def _loss(self, batch: list[dict], packed, responses: int, seen: dict):
        """The micro-batch's share of the objective, as a function of its logprobs; notes their words in `seen`."""
        import torch
        from megatron.zero_mismatch.reinforce_zero import reinforce_zero_loss

        behind = [torch.from_numpy(unpack(s["words"]).view(np.float32).copy()).cuda() for s in batch]
        advantage = torch.tensor([s["advantage"] for s in batch], device="cuda")

        def loss(logprobs):
            seen.update(_answers(batch, packed, logprobs))
            own = [logprobs[end - len(old):end] for (_, end), old in zip(packed.bounds, behind, strict=True)]
            padded = torch.nn.utils.rnn.pad_sequence
            lengths = torch.tensor([len(old) for old in behind], device="cuda")
            mask = torch.arange(int(lengths.max()), device="cuda") < lengths[:, None]
            return reinforce_zero_loss(padded(own, True), padded(behind, True), mask, advantage,
                                       responses=responses).loss
        return loss


def megatron_path() -> dict:
    """For an engine's info: the `megatron` folder of the overlay that is imported. It need not lie beside vLLM, and
    where it lies in several folders only one of them runs: a record is bound to that one."""
    overlay = importlib.util.find_spec("megatron.zero_mismatch")
    if overlay is None:
        raise ValueError("found a Megatron without its overlay, expected the patched one: apply.py apply --upstream "
                         "megatron (docs/install.md)")
    return {"megatron_path": str(pathlib.Path(overlay.origin).parent.parent)}


def _apart(side, want) -> float:
    """|side - want| / |want|"""
    want = want.double()
    return float((side.double() - want).norm() / want.norm())


def micro_batches(sequences: list[dict], micro: int):
    """Sequences in their order, as many as fit `micro` tokens, at least one."""
    batch, tokens = [], 0
    for sequence in sequences:
        length = len(sequence["prompt"]) + len(unpack(sequence["tokens"]))
        if batch and tokens + length > micro:
            yield batch
            batch, tokens = [], 0
        batch.append(sequence)
        tokens += length
    yield batch


def _answers(batch: list[dict], packed, logprobs) -> dict:
    """{id: packed words of the answer's tokens}."""
    host = logprobs.detach().cpu().numpy()
    return {s["id"]: pack(host[end - len(unpack(s["tokens"])):end].view(np.uint32))
            for s, (_, end) in zip(batch, packed.bounds, strict=True)}


@contextlib.contextmanager
def _noting(layers):
    """Clones of each layer's (output, residual), as integers, in the order of the calls."""
    import torch

    seen, hooks = [], []
    for layer in layers:
        hooks.append(layer.register_forward_hook(
            lambda module, inputs, outputs: seen.append([t.clone().view(torch.int16) for t in outputs])))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _training():
    """The engine's steps run in inference mode; what trains must not."""
    import torch

    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    return stack
