"""A backend for `prove bisect` that needs no GPU: vLLM's own tracing of prove over a small torch model, in which
planted_ops.mix (written by the test, found by PYTHONPATH) adds up in another order where more than 4 rows run together.

flags["fault"]: "logits" lets the logits depend on the request's place in the step, "sampler" what is made of them, and
"answers" the answers, behind everything that is watched; "no logits" makes of the logits another number of rows.
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

    def compute_logits(self, hidden):
        return hidden * 2


class Runner:
    """What prove reads of vLLM's: a step is execute_model and then sample_tokens."""

    def __init__(self, fault):
        self.model, self.execute_model_state, self.hidden, self.fault = Model(), None, None, fault
        if fault == "logits":
            self.model.compute_logits = lambda hidden: hidden * 2 + torch.arange(len(hidden))[:, None]
        if fault == "no logits":
            self.model.compute_logits = lambda hidden: hidden[:1] * 2

    @torch.inference_mode()
    def execute_model(self, step):
        self.hidden = self.model(torch.tensor(step.tokens))
        self.execute_model_state = types.SimpleNamespace(input_batch=types.SimpleNamespace(
            num_tokens=len(step.tokens), positions=torch.tensor(step.positions), req_ids=step.names,
            query_start_loc_np=np.asarray(step.starts), logits_indices=torch.tensor(step.starts[1:] - 1)))

    @torch.inference_mode()
    def sample_tokens(self, tokens, targets):
        """The words of the last row of each request, and where `targets` are asked for, those of every row."""
        batch = self.execute_model_state.input_batch
        self.execute_model_state = None
        sampled, _, _ = self.sample(self.hidden, batch, tokens)
        words = sampled.logprobs_tensors.logprobs[:, 0].tolist()
        scored = planted_ops.scores(targets, self.hidden, self.model.compute_logits, 0) if targets is not None else None
        return words, scored and scored[1][:, 0].tolist()

    def sample(self, hidden_states, input_batch, tokens):
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        words = logits.sum(-1, keepdim=True) + torch.arange(len(tokens))[:, None] * (self.fault == "sampler")
        made = types.SimpleNamespace(logprob_token_ids=torch.tensor(tokens)[:, None], logprobs=words)
        return types.SimpleNamespace(logprobs_tensors=made), None, None


class Backend(vllm_backend.Backend):
    SCORES = "planted_ops:scores"

    def __init__(self, *, model, flags, weights_script=None, emit=None):
        assert flags["enforce_eager"]
        self.fault = flags.get("fault")
        self.runner, self.held = Runner(self.fault), {}

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
            seeds = [request["seed"] for request in requests if request["id"] in rows]
            words, prompts = self._step(rows, seeds, any(r.get("prompt_logprobs") for r in requests))
            for place, request in enumerate(requests):
                name = request["id"]
                if name not in rows:
                    continue
                tokens, done = rows[name]
                scored.setdefault(name, prompts.get(name, [])[:-1])
                answers[name][0].append((tokens[-1] * 31 + request["seed"]) % VOCAB)
                answers[name][1].append(words[name] + (place if self.fault == "answers" else 0))
                rows[name] = (tokens + answers[name][0][-1:], len(tokens))
                if len(answers[name][0]) == request["max_tokens"]:
                    del rows[name]
        return {name: {"tokens": pack(np.asarray(tokens, np.int64)), "words": pack(_bits(words)), "cached": 0,
                       **({"prompt_words": pack(_bits(scored[name]))} if _forced(requests, name) else {})}
                for name, (tokens, words) in answers.items()}

    def _step(self, rows, seeds, scoring):
        """Runs what each request has not run yet: the word that each samples, and the words of all its rows."""
        new = {name: tokens[done:] for name, (tokens, done) in rows.items()}
        starts = np.cumsum([0, *map(len, new.values())])
        self.runner.execute_model(types.SimpleNamespace(
            total_num_scheduled_tokens=int(starts[-1]), tokens=sum(new.values(), []),
            positions=sum((list(range(done, len(tokens))) for tokens, done in rows.values()), []),
            names=[f"{name}.1-0a1b" for name in new], starts=starts))
        following = sum(([*tokens[done + 1:], 0] for tokens, done in rows.values()), [])
        words, scored = self.runner.sample_tokens(
            [(tokens[-1] * 31 + seed) % VOCAB for (tokens, _), seed in zip(rows.values(), seeds, strict=True)],
            torch.tensor(following) if scoring else None)
        return (dict(zip(new, words, strict=True)),
                {name: scored[starts[i]:starts[i + 1]] for i, name in enumerate(new)} if scoring else {})


def _forced(requests, name):
    return any(r["id"] == name and r.get("prompt_logprobs") for r in requests)


def _bits(values):
    return np.asarray(values, np.float32).view(np.uint32)
