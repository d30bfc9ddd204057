"""prove's trainer backend for DeepSeek-V4 without a GPU or vLLM, as trainer_fake is for Nemotron-H.

The "engine" holds FP8 codes and scales in the engine's names, computes from those alone, and samples token by token
from a full forward. flags["fault"] plants what must be noticed: "scales" (it keeps the scales of its first weights).
"""
import types

import numpy as np
import torch
import trainer_fake
from cuda_on_cpu import cuda_on_cpu
from megatron.zero_mismatch import kernels, kernels_dsv4
from megatron.zero_mismatch.packing import pack as pack_sequences
from tiny_deepseek_v4 import CONFIG, model

from prove import trainer_backend
from prove.engine import pack


class Backend(trainer_backend.Backend):
    info = trainer_fake.Backend.info

    def __init__(self, *, model: str, flags: dict, weights_script=None, emit=None):
        self.placed = cuda_on_cpu()
        self.placed.__enter__()  # for the life of the process
        self.config, self.fault, self.actor, self.derived = CONFIG, flags.get("fault"), None, 0
        self.scheduler = types.SimpleNamespace(block_size=64)
        kernels_dsv4.from_vllm = kernels_dsv4.reference
        self.engine = engine_model()
        self.held = {name: torch.nn.Parameter(t.clone(), requires_grad=False) for name, t in self.engine.exported()}
        self.first = {name: t.clone() for name, t in self.held.items() if name.endswith("_scale_inv")}
        for layer in self.engine.model.layers:
            layer.attn.compress_ratio = max(1, layer.ratio)
            layer.attn.rotary_emb = types.SimpleNamespace(cos_sin_cache=self.engine.tables[layer.ratio])
        self.runner = types.SimpleNamespace(model=types.SimpleNamespace(
            named_parameters=self.held.items, model=self.engine.model, process_weights_after_loading=self._derive))
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

    _sleeper, _vocabulary = trainer_fake.Backend._sleeper, trainer_fake.Backend._vocabulary

    def _derive(self):
        self.derived += 1

    @torch.no_grad()
    def op_run(self, *, requests, graphs="on"):
        self.engine.take({**self.held, **(self.first if self.fault == "scales" else {})})
        answers = {}
        for request in requests:
            generator = torch.Generator().manual_seed(request["seed"])
            tokens = torch.tensor(request["prompt"])
            for _ in range(request["max_tokens"]):
                hidden = self.engine.hidden(*pack_sequences([tokens]))[-1:]
                z = kernels.reference().linear(hidden, self.engine.lm_head.weight)[0]
                tokens = torch.cat([tokens, torch.multinomial(z.float().softmax(-1), 1, generator=generator)])
            words = self.engine(*pack_sequences([tokens])).numpy()[-request["max_tokens"]:].view(np.uint32).copy()
            answers[request["id"]] = {"tokens": pack(tokens[-request["max_tokens"]:].numpy()), "words": pack(words)}
            if request.get("vocabulary"):
                answers[request["id"]]["vocabulary"] = self._vocabulary(tokens, request["max_tokens"])
        return {"answers": answers, "seconds": 0.0, "modes": {"derived": self.derived, "FULL": 1}}


def engine_model():
    return model()
