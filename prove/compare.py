"""Bit comparison of logprobs, and the figures reported beside it.

A run is token ids and the fp32 words of the logprobs of those tokens. Two runs agree only if every word is equal:
-0.0 differs from +0.0, a NaN differs from everything (itself too), a missing token differs. The figures (|dp| with
p = exp(logprob), and the k3 estimate of the KL) describe a difference; they never decide.
"""
from __future__ import annotations

import dataclasses
import math

import numpy as np


def words(logprobs) -> np.ndarray:
    """fp32 bits of logprobs. float64 input must hold fp32 values (vLLM hands out Python floats made from fp32)."""
    values = np.asarray(logprobs, dtype=np.float64)
    narrow = values.astype(np.float32)
    exact = (narrow.astype(np.float64) == values) | np.isnan(values)
    if not exact.all():
        first = int(np.flatnonzero(~exact)[0])
        raise ValueError(f"logprob {first} is {float(values[first])}, not an fp32 value: its bits were lost on the way")
    return narrow.view(np.uint32)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One request's answer. tokens: [n] int64; words: [n] uint32, the logprob bits of the same tokens."""

    tokens: np.ndarray
    words: np.ndarray

    def __post_init__(self):
        if len(self.tokens) != len(self.words):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.words)} logprobs: they must pair up")

    def head(self, count: int) -> Sequence:
        return Sequence(self.tokens[:count], self.words[:count])


@dataclasses.dataclass
class Figures:
    """The result of comparing many pairs; `add` accumulates, `row` renders. Equal means nothing at all differed."""

    tokens: int = 0            # tokens that should have been compared
    differing_words: int = 0   # positions whose token or fp32 word differs
    differing_tokens: int = 0  # positions whose token id differs
    missing: int = 0           # positions present on one side only
    nan: int = 0               # NaN logprobs on either side
    first: dict | None = None  # the first difference: request, index, both tokens and words
    _dp: list = dataclasses.field(default_factory=list, repr=False)
    _k3: list = dataclasses.field(default_factory=list, repr=False)

    def add(self, name: str, left: Sequence, right: Sequence) -> None:
        count = max(len(left.tokens), len(right.tokens))
        shared = min(len(left.tokens), len(right.tokens))
        self.tokens += count
        self.missing += count - shared
        same_token = left.tokens[:shared] == right.tokens[:shared]
        lw, rw = left.words[:shared], right.words[:shared]
        lp, rp = lw.view(np.float32), rw.view(np.float32)
        nans = np.isnan(lp) | np.isnan(rp)
        self.nan += int(nans.sum())
        differs = ~same_token | (lw != rw) | nans
        self.differing_tokens += int((~same_token).sum())
        self.differing_words += int(differs.sum()) + count - shared
        # After the first other token the contexts differ: its logprobs are answers to another question.
        comparable = np.cumsum(~same_token) == 0
        self._figures(lp[comparable].astype(np.float64), rp[comparable].astype(np.float64))
        if self.first is None and (differs.any() or count != shared):
            at = int(np.flatnonzero(differs)[0]) if differs.any() else shared
            self.first = {"request": name, "index": at, **_side("left", left, at), **_side("right", right, at)}

    def count(self, name: str, answer: Sequence, expected: int) -> None:
        """A base run has no other side; it must still be complete and free of NaN."""
        self.tokens += expected
        self.missing += abs(expected - len(answer.tokens))
        nans = np.isnan(answer.words.view(np.float32))
        self.nan += int(nans.sum())
        if self.first is None and (nans.any() or len(answer.tokens) != expected):
            at = int(np.flatnonzero(nans)[0]) if nans.any() else len(answer.tokens)
            self.first = {"request": name, "index": at, **_side("left", answer, at)}

    def _figures(self, left: np.ndarray, right: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self._dp.append(np.abs(np.exp(left) - np.exp(right)))
            same = left == right  # also two -inf, whose difference would be NaN
            ratio = np.where(same, 0.0, right - left)
            self._k3.append(np.expm1(ratio) - ratio)

    @property
    def equal(self) -> bool:
        """No difference among at least one token; an empty comparison proves nothing."""
        return self.tokens > 0 and self.differing_words == 0 and self.nan == 0 and self.missing == 0

    def summary(self) -> dict:
        dp = np.concatenate(self._dp) if self._dp else np.zeros(0)
        k3 = np.concatenate(self._k3) if self._k3 else np.zeros(0)
        return {
            "tokens": self.tokens,
            "differing_words": self.differing_words,
            "differing_tokens": self.differing_tokens,
            "missing": self.missing,
            "nan": self.nan,
            "max_dp": _number(dp.max() if dp.size else 0.0),
            "mean_dp": _number(dp.mean() if dp.size else 0.0),
            "std_dp": _number(dp.std() if dp.size else 0.0),
            "k3": _number(k3.mean() if k3.size else 0.0),
            "first": self.first,
            "equal": self.equal,
        }


def _side(name: str, sequence: Sequence, at: int) -> dict:
    if at >= len(sequence.tokens):
        return {f"{name}_token": None, f"{name}_word": None, f"{name}_logprob": None}
    word = sequence.words[at:at + 1]
    return {
        f"{name}_token": int(sequence.tokens[at]),
        f"{name}_word": f"0x{int(word[0]):08x}",
        f"{name}_logprob": _number(word.view(np.float32)[0]),
    }


def _number(value) -> float | str:
    """JSON has no NaN or infinity; they are kept as text so that a record stays valid JSON."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)
