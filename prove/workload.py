"""The requests every comparison is made over: which prompts, how many tokens, which seeds; a function of two numbers.

Prompt lengths sit on both sides of what the model and the kernels are cut by: the 128-token window and ratio, the
ratio 4, the 64- and 256-token cache blocks, 512 tokens (where the indexer changes its tile), 2048 tokens (below it the
C4A Top-K has nothing to choose, 2048 / 4 = 512 = index_topk).
"""
from __future__ import annotations

import dataclasses
import random

LENGTHS = (  # ordered so that the first few already cover short, window, block and Top-K
    150, 2300, 1, 257, 129, 4097, 64, 513, 2049, 3, 128, 1000, 2048, 255, 17, 3000, 127, 512, 4095, 2, 300, 256, 65,
    2051, 511, 5, 5000, 131, 1025, 63, 2047, 600, 4096, 1023)
TOKENS_A_REQUEST = 140
MOST_REQUESTS = 144  # above 129: the batch sizes 128 and 129 are prefixes of the workload
FEWEST_REQUESTS = 12


@dataclasses.dataclass(frozen=True)
class Request:
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0

    def message(self, **changes) -> dict:
        """As the engine's op takes it; `changes` are its other fields (join, read_cache, prompt_logprobs, ...)."""
        return {**dataclasses.asdict(self), "prompt": list(self.prompt), **changes}

    def forced(self, tokens) -> dict:
        """The prompt with an answer behind it, to be scored rather than continued."""
        return self.message(prompt=[*self.prompt, *map(int, tokens)], max_tokens=1, prompt_logprobs=True)


@dataclasses.dataclass(frozen=True)
class Workload:
    requests: tuple[Request, ...]
    vocab: int

    @property
    def tokens(self) -> int:
        return sum(r.max_tokens for r in self.requests)

    def spread(self, count: int) -> tuple[Request, ...]:
        """`count` requests, their prompt lengths spread over the whole table."""
        return self.requests[:count]


def prompt(length: int, vocab: int, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(vocab) for _ in range(length))


def build(tokens: int, vocab: int, lengths: tuple[int, ...] = LENGTHS) -> Workload:
    """At least `tokens` sampled tokens behind prompts of these lengths in turn; fewer than 12 requests would leave most
    of LENGTHS out."""
    count = max(FEWEST_REQUESTS, min(MOST_REQUESTS, tokens // TOKENS_A_REQUEST))
    share = max(8, -(-tokens // count))
    requests = tuple(
        Request(
            id=f"r{i:03d}",
            prompt=prompt(lengths[i % len(lengths)], vocab, seed=1000 + i),
            max_tokens=share + i * 5 % 9,              # requests leave the batch one after another
            seed=7000 + i,
            temperature=0.0 if i % 8 == 7 else 1.0,    # some greedy: a first answer must equal its repeats
        ) for i in range(count))
    return Workload(requests, vocab)
