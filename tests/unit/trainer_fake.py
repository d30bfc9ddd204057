"""prove's trainer backend on a machine without a GPU or vLLM: the reference kernels on both sides, Megatron-core as is.

The "engine" is the same tiny model over parameters of its own, in the engine's names and layout, and samples token by
token from a full forward: its words equal the trainer's as long as it holds the trainer's weights. flags["fault"]
plants what must be noticed: "stale" (it keeps answering from its first weights), "vocabulary" (one word of a token that
was not sampled), "level 1" (it loses its weights in a sleep that keeps them), "eager" (it replays no graph).
"""
import importlib.util
import os
import sys
import types

import numpy as np
import torch
from cuda_on_cpu import cuda_on_cpu
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.packing import pack as pack_sequences
from tiny_nemotron import CONFIG, engine_weights, model

if importlib.util.find_spec("psutil") is None:  # Megatron's writer asks it how much memory it takes, for its log
    memory = types.SimpleNamespace(rss=0)
    sys.modules["psutil"] = types.SimpleNamespace(Process=lambda pid: types.SimpleNamespace(memory_info=lambda: memory))

from prove import trainer_backend
from prove.engine import pack


class Sleeper:
    """Drops what a sleep of level 2 drops."""

    def __init__(self, weights: dict, fault: str | None):
        self.weights, self.fault, self.level = weights, fault, 0

    def sleep(self, level: int) -> dict:
        self.level = level
        return {"level": level, "freed_bytes": 1, "sleep_seconds": 0.0}

    def wake(self) -> dict:
        if self.level == 2 or self.fault == "level 1":
            for tensor in self.weights.values():
                tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
        return {"wake_seconds": 0.0}


class Backend(trainer_backend.Backend):
    def __init__(self, *, model: str, flags: dict, weights_script=None, emit=None):
        self.placed = cuda_on_cpu()
        self.placed.__enter__()  # for the life of the process
        self.config, self.fault, self.actor = CONFIG, flags.get("fault"), None
        weights = engine_weights()
        self.scheduler = types.SimpleNamespace(block_size=16)
        kernels.from_vllm = lambda page: kernels.reference()
        self.engine = _over({k: v.clone() for k, v in weights.items()} if self.fault == "stale" else weights)
        self.runner = types.SimpleNamespace(model=types.SimpleNamespace(named_parameters=weights.items,
                                                                        model=self.engine.model))
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

    def info(self):
        return {"versions": {"vllm": "fake"}, "gpu": "none", "vllm_path": os.environ["FAKE_SITE"] + "/vllm",
                "start_seconds": 0.0, "weights": "00", "cache_block": self.scheduler.block_size,
                **trainer_backend.megatron_path()}

    def _sleeper(self):
        return Sleeper(dict(self.resident()), self.fault)

    @torch.no_grad()
    def op_run(self, *, requests, graphs="on"):
        answers = {}
        for request in requests:
            generator = torch.Generator().manual_seed(request["seed"])
            tokens = torch.tensor(request["prompt"])
            for _ in range(request["max_tokens"]):
                z = self._logits(tokens)
                tokens = torch.cat([tokens, torch.multinomial(z.float().softmax(-1), 1, generator=generator)])
            words = self.engine(*pack_sequences([tokens])).numpy()[-request["max_tokens"]:].view(np.uint32).copy()
            answers[request["id"]] = {"tokens": pack(tokens[-request["max_tokens"]:].numpy()), "words": pack(words)}
            if request.get("vocabulary"):
                answers[request["id"]]["vocabulary"] = self._vocabulary(tokens, request["max_tokens"])
        return {"answers": answers, "seconds": 0.0, "modes": {} if self.fault == "eager" else {"FULL": 1}}

    def _vocabulary(self, tokens, count: int):
        places = torch.arange(len(tokens) - count, len(tokens))
        every = self.engine.vocabulary(*pack_sequences([tokens]), places).numpy().view(np.uint32)
        if self.fault == "vocabulary":
            every[0, (int(tokens[-count]) + 1) % every.shape[1]] ^= 1
        return every

    def _logits(self, tokens):
        hidden = self.engine.hidden(*pack_sequences([tokens]))[-1:]
        return kernels.reference().linear(hidden, self.engine.lm_head.weight)[0]


def _over(weights: dict[str, torch.Tensor]):
    """A model that reads the engine's own tensors, A included."""
    made = model()
    for name, parameter in list(made.named_parameters()):
        owner = made.get_submodule(name.rpartition(".")[0])
        leaf, theirs = name.rpartition(".")[2], name.replace(".experts.w", ".experts.routed_experts.w")
        if leaf == "A_log":
            del owner.A_log
            owner.A_log = _Rates(weights[theirs.removesuffix("_log")])
        else:
            parameter.data = weights[theirs].data
    return made


class _Rates:
    """Stands for A_log where A itself is held: -exp(A_log) is A."""

    def __init__(self, a: torch.Tensor):
        self.a = a

    def exp(self) -> torch.Tensor:
        return -self.a
