"""How far the learner is from the rollout, split into weight lag and kernel mismatch.

For a token sampled with weights of version v and trained on at version k (section 3 of the article):

    log w = log pi_k - log mu_v = (log pi_k - log pi_v) + (log pi_v - log mu_v)
                                   weight lag              kernel mismatch

pi is the learner's computation, mu the rollout's record. The second term needs the learner's logprob at the rollout's
own version, recomputed with the weights of v; with aligned kernels it is exactly 0, word for word.

k3(x) = e^x - 1 - x of a log ratio x is the estimator of the KL divergence used throughout: 0 at x = 0, positive
elsewhere. D3 is its mean over an update's tokens at x = log w. Everything is evaluated in fp64; the comparison of
words is on the fp32 bits themselves.
"""
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Below this, e^x - 1 - x is x^2 / 2 + x^3 / 6 + x^4 / 24 to fp64's precision, and the subtraction would not be.
SERIES_BELOW = 1e-3


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """e^x - 1 - x elementwise in fp64, without cancellation; exactly 0 only at 0."""
    x = log_ratio.double()
    series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x / 120)))
    return torch.where(x.abs() < SERIES_BELOW, series, torch.expm1(x) - x)


@dataclass(frozen=True)
class Spread:
    """Of log ratios over the tokens of one update."""

    tokens: int
    k3: float
    max_weight: float
    mean_weight: float


def spread(logprob: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> Spread:
    """Of logprob - reference, [B, T], where mask is True."""
    ratio = _masked(logprob, mask) - _masked(reference, mask)
    weight = ratio.exp()
    if not torch.isfinite(weight).all():
        worst = ratio[~torch.isfinite(weight)][0].item()
        raise ValueError(
            f"found a log ratio of {worst}, expected one whose exponential is finite in float64; one of the two "
            "logprobs is not that of a sampled token"
        )
    return Spread(ratio.numel(), k3(ratio).mean().item(), weight.max().item(), weight.mean().item())


@dataclass(frozen=True)
class WordGate:
    """Learner against rollout at equal weights. Passed only if every number but `tokens` is 0."""

    tokens: int
    differing_words: int
    invalid_tokens: int  # NaN or infinite on a side; they count as differing, and the four numbers below leave them out
    first: tuple[int, int, float, float] | None  # row, column, recomputed, recorded
    max_dp: float  # of |p_recomputed - p_recorded|
    mean_dp: float
    std_dp: float
    k3: float

    @property
    def passed(self) -> bool:
        numbers = (self.differing_words, self.invalid_tokens, self.max_dp, self.mean_dp, self.std_dp, self.k3)
        return all(number == 0 for number in numbers)


def word_gate(recomputed: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor) -> WordGate:
    """Both [B, T] fp32: the learner's logprob at the rollout's version, and the rollout's record.

    Probabilities alone would not do: they underflow where logprobs still differ.
    """
    if recomputed.dtype != torch.float32 or recorded.dtype != torch.float32:
        raise ValueError(f"found {recomputed.dtype} and {recorded.dtype}, expected the float32 words of both sides")
    _check_mask(recomputed, mask)
    _check_mask(recorded, mask)
    a, b = recomputed.detach(), recorded.detach()
    usable = mask & torch.isfinite(a) & torch.isfinite(b)
    differs = mask & ((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)) | ~usable)
    first = None
    if differs.any():
        row, column = differs.nonzero()[0].tolist()
        first = (row, column, a[row, column].item(), b[row, column].item())
    a, b = a[usable].double(), b[usable].double()
    dp = (a.exp() - b.exp()).abs()
    return WordGate(
        tokens=int(mask.sum()),
        differing_words=int(differs.sum()),
        invalid_tokens=int((mask & ~usable).sum()),
        first=first,
        max_dp=dp.max().item() if dp.numel() else 0.0,
        mean_dp=dp.mean().item() if dp.numel() else 0.0,
        std_dp=dp.std(correction=0).item() if dp.numel() else 0.0,
        k3=k3(a - b).mean().item() if dp.numel() else 0.0,
    )


@dataclass(frozen=True)
class Split:
    total: Spread  # its k3 is D3
    lag: Spread
    kernel: Spread
    words: WordGate


def split(
    logprob: torch.Tensor, at_rollout_version: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor
) -> Split:
    """learner now, learner at the rollout's version, rollout's record; each [B, T] fp32."""
    return Split(
        total=spread(logprob, recorded, mask),
        lag=spread(logprob, at_rollout_version, mask),
        kernel=spread(at_rollout_version, recorded, mask),
        words=word_gate(at_rollout_version, recorded, mask),
    )


def peak_to_median(per_update: Sequence[float]) -> float | None:
    """Of D3 over updates (figure 1 of the article). None if D3 was 0 throughout; infinite if only its median was."""
    values = list(per_update)
    if not values or not all(math.isfinite(v) and v >= 0 for v in values):
        raise ValueError(f"found {len(values)} values, expected at least one, each finite and not negative")
    peak, median = max(values), statistics.median(values)
    if median == 0:
        return math.inf if peak > 0 else None
    return peak / median


def _check_mask(tensor: torch.Tensor, mask: torch.Tensor) -> None:
    if tensor.shape != mask.shape or mask.dtype != torch.bool or not mask.any():
        raise ValueError(
            f"found logprobs {tuple(tensor.shape)} and a mask {tuple(mask.shape)} of {mask.dtype} with "
            f"{int(mask.sum())} tokens, expected one shape, torch.bool, and at least one token"
        )


def _masked(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    _check_mask(tensor, mask)
    values = tensor.detach()[mask].double()
    if not torch.isfinite(values).all():
        bad = (mask & ~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise ValueError(f"found a logprob that is not finite at {bad}, expected finite ones; a missing token fails")
    return values
