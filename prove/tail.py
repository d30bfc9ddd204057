"""Watches what a step computes behind the model's forward, for `prove bisect`: the logits, and the words made of them.

A row is known by the position whose successor it scores, as in prove/trace.py. Two sites: "logits" makes logits of the
hidden state, "sampler" a token and its logprob of the logits. Read against vLLM 0.33.0, v1/worker/gpu/model_runner.py:
`sample` (1633) calls compute_logits on the rows of `logits_indices`; where prompt logprobs are asked for,
`compute_prompt_logprobs` (2214) comes right after it and goes over all rows of the step in order, in chunks.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from prove.trace import resolve, row_hash

AT_ONCE = 64  # rows hashed at once: 64 of 131,072 logits are 64 MiB in int64


class Tail:
    """`with tail.installed(): run`; then `tail.sites`, which prove.trace.first_difference reads.

    keys_of: input batch -> (request, position) of every row; watch: request -> the last position wanted; prompts:
    request -> length of its prompt; scores: where the function is looked up that scores a prompt's rows.
    """

    def __init__(self, runner, scores: str, keys_of: Callable, watch: dict[str, int], prompts: dict[str, int]):
        self.runner, self.scores, self.keys_of = runner, scores, keys_of
        self.watch, self.prompts = watch, prompts
        self.keys: list[tuple[str, int]] = []    # of the rows of this step
        self.coming: list[tuple[str, int]] = []  # of those that compute_logits has still to see
        self.sites: dict[str, dict] = {}

    @contextlib.contextmanager
    def installed(self):
        with contextlib.ExitStack() as undo:
            for owner, attribute, watched in ((self.runner, "sample", self._sample),
                                              (self.runner.model, "compute_logits", self._logits),
                                              (*resolve(self.scores)[:2], self._prompt)):
                function = getattr(owner, attribute)
                setattr(owner, attribute, self._around(watched, function))
                undo.callback(setattr, owner, attribute, function)
            yield self

    @staticmethod
    def _around(watched: Callable, function: Callable) -> Callable:
        return lambda *args, **kwargs: watched(function, *args, **kwargs)

    def _sample(self, function, hidden_states, input_batch, *more):
        self.keys = self.keys_of(input_batch)
        rows = self.coming = [self.keys[row] for row in input_batch.logits_indices.tolist()]
        result = function(hidden_states, input_batch, *more)
        self.coming = self.keys
        if (made := result[0].logprobs_tensors) is not None:
            # Within a prompt, at the end of a chunk, a token is sampled as well, and thrown away.
            self._words([key if key[1] >= self.prompts[key[0]] - 1 else None for key in rows],
                        made.logprob_token_ids, made.logprobs)
        return result

    def _logits(self, function, hidden, *more):
        logits = function(hidden, *more)
        rows, self.coming = self.coming[:len(hidden)], self.coming[len(hidden):]
        if len(rows) != len(hidden) or len(rows) != len(logits):
            raise RuntimeError(f"logits of {len(hidden)} rows were read as those of {len(rows)}")
        self._enter("logits", {"hidden": self._hashed(rows, hidden)}, {"logits": self._hashed(rows, logits)})
        return logits

    def _prompt(self, function, *args):
        token_ids, logprobs, ranks = function(*args)
        self._words(self.keys, token_ids, logprobs)
        return token_ids, logprobs, ranks

    def _words(self, rows: list, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """The token that is scored is the first of its row."""
        tokens, words = token_ids[:, 0].tolist(), logprobs[:, 0].float().contiguous().view(torch.int32).tolist()
        made = {key: pair for key, *pair in zip(rows, tokens, words, strict=True) if key and self._wanted(key)}
        logits = self.sites.get("logits", {"out": {"logits": {}}})["out"]["logits"]
        self._enter("sampler", {"logits": {key: logits[key] for key in made}},
                    {"token": {key: token for key, (token, _) in made.items()},
                     "logprob": {key: word for key, (_, word) in made.items()}})

    def _wanted(self, key: tuple[str, int]) -> bool:
        return key[1] <= self.watch.get(key[0], -1)

    def _hashed(self, rows: list[tuple[str, int]], tensor: torch.Tensor) -> dict[tuple[str, int], int]:
        chosen = [row for row, key in enumerate(rows) if self._wanted(key)]
        found: list[int] = []
        for start in range(0, len(chosen), AT_ONCE):
            part = tensor[chosen[start:start + AT_ONCE]]
            found += row_hash(part, len(part)).tolist()
        return dict(zip((rows[row] for row in chosen), found, strict=True))

    def _enter(self, name: str, given: dict[str, dict], made: dict[str, dict]) -> None:
        site = self.sites.setdefault(name, {"in": {}, "out": {}, "written": set(made)})
        for side, found in (("in", given), ("out", made)):
            for tensor, hashed in found.items():
                site[side].setdefault(tensor, {}).update(hashed)
