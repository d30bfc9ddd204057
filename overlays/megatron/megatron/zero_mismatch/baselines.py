"""The corrections REINFORCE Zero is compared with, in its interface (section 4 of the article, "results").

Each differs from `reinforce_zero_loss` only in the coefficient c of A_i grad log pi; w = pi / mu, a constant here:

    tis               c = min(w, cap)                        truncated importance sampling: biased low where w > cap
    mis               c = w where the response is kept       whole responses are rejected (a sequence gate)
    token_gate        c = w where low <= w <= high           single tokens are rejected
    score_centering   c = 1, and the mean of the score under the rollout's distribution is subtracted

A rejected token keeps its place in T_i and B, so a gate is exactly a zero coefficient. The article names neither the
statistic nor the bounds of its gates; they are the caller's arguments and have no default.
Losses are surrogates: their gradients are the estimators, their values mean nothing. The expectation of each on a
two-armed bandit is in tests/unit/test_baselines.py in closed form.
"""
import torch

from .reinforce_zero import Estimate, advantage_column, importance_weights, mean_over_responses

# 1 - sum(p) of a head that covers the vocabulary is rounding noise in fp32, of either sign; below this it is no tail.
SMALLEST_TAIL = 1e-6


def tis(logprob, rollout_logprob, mask, advantage, *, cap: float, responses: int | None = None) -> Estimate:
    """Truncated: min(w, cap). Shapes as in `reinforce_zero_loss`."""
    if not cap > 0:
        raise ValueError(f"found cap {cap}, expected more than 0")
    weight = importance_weights(logprob, rollout_logprob, mask).detach()
    return _surrogate(logprob, mask, advantage, weight, weight.clamp(max=cap), mask, responses)


def token_gate(
    logprob, rollout_logprob, mask, advantage, *, low: float, high: float, responses: int | None = None
) -> Estimate:
    """w where low <= w <= high, else 0."""
    _check_bounds(low, high)
    weight = importance_weights(logprob, rollout_logprob, mask).detach()
    kept = mask & (weight >= low) & (weight <= high)
    return _surrogate(logprob, mask, advantage, weight, torch.where(kept, weight, 0), kept, responses)


def mis(
    logprob, rollout_logprob, mask, advantage, *, low: float, high: float, responses: int | None = None
) -> Estimate:
    """Masked, by sequence: token weights of the responses whose geometric mean weight is in [low, high], else 0.

    The geometric mean, not the product: a bound on the product would mean another thing at every length.
    """
    _check_bounds(low, high)
    weight = importance_weights(logprob, rollout_logprob, mask).detach()
    log_weight = torch.where(mask, (logprob - rollout_logprob).detach(), 0)
    mean = (log_weight.sum(1) / mask.sum(1)).exp()
    kept = mask & ((mean >= low) & (mean <= high)).unsqueeze(1)
    return _surrogate(logprob, mask, advantage, weight, torch.where(kept, weight, 0), kept, responses)


def score_centering(
    logprob,
    rollout_logprob,
    mask,
    advantage,
    *,
    head_logprob: torch.Tensor,
    head_rollout_logprob: torch.Tensor,
    responses: int | None = None,
) -> Estimate:
    """No importance weight; the score minus its mean under the rollout's distribution (arXiv:2609.20807).

    head_logprob (with gradient), head_rollout_logprob: [B, T, K], both sides' logprobs at the K tokens the rollout
    recorded, normalised over the whole vocabulary. What it did not record is taken for the learner's tail, rescaled to
    the rollout's missing mass: exact when K is the vocabulary.
    """
    weight = importance_weights(logprob, rollout_logprob, mask).detach()
    _check_head(head_logprob, head_rollout_logprob, mask)
    inside = mask.unsqueeze(2)
    head_logprob = torch.where(inside, head_logprob, 0)
    p = head_logprob.detach().exp()
    q = torch.where(inside, head_rollout_logprob, 0).exp()
    scale = (1 - q.sum(2)).clamp(min=0) / (1 - p.sum(2)).clamp(min=SMALLEST_TAIL)
    # sum_v p_v grad log p_v = 0 over the vocabulary, so the tail's part is -scale * p_v on the head.
    mean_score = ((q - scale.unsqueeze(2) * p) * head_logprob).sum(2)
    centred = torch.where(mask, logprob - mean_score, 0)
    loss = -mean_over_responses(advantage_column(advantage, weight) * centred, mask, responses)
    return Estimate(loss, weight, mask)


def _surrogate(logprob, mask, advantage, weight, coefficient, kept, responses) -> Estimate:
    per_token = advantage_column(advantage, weight) * coefficient * torch.where(mask, logprob, 0)
    return Estimate(-mean_over_responses(per_token, mask, responses), weight, kept)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"found bounds [{low}, {high}], expected 0 <= low < high")


def _check_head(head_logprob: torch.Tensor, head_rollout_logprob: torch.Tensor, mask: torch.Tensor) -> None:
    if head_logprob.shape != head_rollout_logprob.shape or head_logprob.shape[:2] != mask.shape:
        raise ValueError(
            f"found heads {tuple(head_logprob.shape)} and {tuple(head_rollout_logprob.shape)}, expected one "
            f"[{mask.shape[0]}, {mask.shape[1]}, K] shape"
        )
    bad = mask.unsqueeze(2) & (~torch.isfinite(head_logprob) | head_rollout_logprob.isnan())
    if bad.any():
        raise ValueError(
            f"{int(bad.sum())} head logprobs cannot be used, first {bad.nonzero()[0].tolist()}; the learner's must be "
            "finite, the rollout's not NaN"
        )
