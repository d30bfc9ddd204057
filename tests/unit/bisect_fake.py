"""A backend for `prove bisect` that needs no GPU: vLLM's own tracing of prove over a small torch model, in which
planted_ops.mix (written by the test, found by PYTHONPATH) adds up in another order where more than 4 rows run together.

flags["fault"] == "sampler" lets a logprob depend on the request's place, behind the model, where no call is watched.
"""
import os
import types

import numpy as np
import planted_ops
import torch

from prove import vllm_backend
from prove.engine import pack

VOCAB, WIDTH = 97, 8


class Layer(torch.nn.Module):
    def __init__(self, planted):
        super().__init__()
        self.norm, self.planted = torch.nn.LayerNorm(WIDTH), planted
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.weight.weight_loader = lambda: None  # what an engine hangs on its parameters cannot be pickled

    def forward(self, x):
        y = self.norm(x)
        y = planted_ops.mix(y, self.weight) if self.planted else (y[:, None] * self.weight).sum(-1)
        out = torch.empty_like(y)
        planted_ops.scale(y, out)
        return x + out


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(False), Layer(True), Layer(False)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Runner:
    def __init__(self):
        self.model, self.execute_model_state, self.hidden = Model(), None, None

    @torch.inference_mode()
    def execute_model(self, step):
        self.hidden = self.model(torch.tensor(step.tokens))
        self.execute_model_state = types.SimpleNamespace(input_batch=types.SimpleNamespace(
            num_tokens=len(step.tokens), positions=torch.tensor(step.positions), req_ids=step.names,
            query_start_loc_np=np.asarray(step.starts)))


class Backend(vllm_backend.Backend):
    def __init__(self, *, model, flags, weights_script=None, emit=None):
        assert flags["enforce_eager"]
        self.runner, self.held, self.fault = Runner(), {}, flags.get("fault")

    def info(self):
        return {"versions": {"vllm": "fake"}, "gpu": "none", "vllm_path": os.environ["FAKE_SITE"] + "/vllm",
                "start_seconds": 0.0, "cache_block": 256, "max_model_len": 8192, "max_num_seqs": 256, "weights": "00"}

    def op_run(self, *, requests, chunk=None, graphs="on", one_by_one=False):
        assert graphs == "off"
        answers = {}
        for batch in [[r] for r in requests] if one_by_one else [requests]:
            answers |= self._together(batch)
        return {"answers": answers, "seconds": 0.0}

    def _together(self, requests):
        rows, answers = {r["id"]: (list(r["prompt"]), 0) for r in requests}, {r["id"]: ([], []) for r in requests}
        scored = {}
        while rows:
            hidden = self._step(rows)
            for place, request in enumerate(requests):
                name = request["id"]
                if name not in rows:
                    continue
                tokens, done = rows[name]
                words = [word + (place if self.fault == "sampler" else 0) for word in hidden[name]]
                scored.setdefault(name, words[:-1])
                answers[name][0].append((tokens[-1] * 31 + request["seed"]) % VOCAB)
                answers[name][1].append(words[-1])
                rows[name] = (tokens + answers[name][0][-1:], len(tokens))
                if len(answers[name][0]) == request["max_tokens"]:
                    del rows[name]
        return {name: {"tokens": pack(np.asarray(tokens, np.int64)), "words": pack(_bits(words)), "cached": 0,
                       **({"prompt_words": pack(_bits(scored[name]))} if _forced(requests, name) else {})}
                for name, (tokens, words) in answers.items()}

    def _step(self, rows):
        """Runs what each request has not run yet; the last row's words of each."""
        new = {name: tokens[done:] for name, (tokens, done) in rows.items()}
        starts = np.cumsum([0, *map(len, new.values())])
        self.runner.execute_model(types.SimpleNamespace(
            total_num_scheduled_tokens=int(starts[-1]), tokens=sum(new.values(), []),
            positions=sum((list(range(done, len(tokens))) for tokens, done in rows.values()), []),
            names=[f"{name}.1-0a1b" for name in new], starts=starts))
        sums = self.runner.hidden.sum(-1).tolist()
        return {name: sums[starts[i]:starts[i + 1]] for i, name in enumerate(new)}


def _forced(requests, name):
    return any(r["id"] == name and r.get("prompt_logprobs") for r in requests)


def _bits(values):
    return np.asarray(values, np.float32).view(np.uint32)
