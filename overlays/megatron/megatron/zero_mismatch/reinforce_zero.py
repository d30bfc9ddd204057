"""REINFORCE Zero: plain REINFORCE under unclipped token-level importance weights.

The objective is the one displayed in section 4 of the article "Zero Mismatch, Simple Async RL". For B responses, the
i-th of T_i tokens with advantage A_i (its reward minus the mean reward of its group):

    L = -(1/B) sum_i (1/T_i) sum_t A_i w_it        w_it = pi(a_it | h_it) / mu_i(a_it | h_it)

pi is the learner now, mu the probability the rollout recorded when it sampled the token. No truncation, no gate, no
value model. The gradient of w is w grad log pi, so autograd through the ratio is the estimator.

Invariant: at a fixed history, the expectation of the update over tokens drawn from mu is the expectation under pi,
because w is the exact ratio. That is all it corrects: histories and group means stay those of the rollout's policy.
It also needs the recorded logprob to be that of the weights `mu` names, which is what the aligned kernels give.

Invariant: the gradient that reaches one token's logprob depends on its own logprobs, mask row, advantage and B only.
Batch order, padding, other responses and the split into micro-batches cannot change a bit of it.

Nothing here returns NaN: an overflowing ratio, a logprob that is not finite or an empty response is an error.
"""
import statistics
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch


class Estimate(NamedTuple):
    loss: torch.Tensor  # scalar
    weight: torch.Tensor  # [B, T] w = pi / mu, detached, 0 where masked
    kept: torch.Tensor  # [B, T] bool: tokens whose gradient counts


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable]) -> torch.Tensor:
    """Reward minus the group's mean, fp64 [B]. Exact in any order; exactly 0 where a group's rewards are all equal."""
    rewards = [float(r) for r in rewards]
    if len(rewards) != len(groups) or not rewards:
        raise ValueError(f"found {len(rewards)} rewards and {len(groups)} group keys, expected one key a reward")
    members: dict[Hashable, list[float]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward != reward or reward in (float("inf"), float("-inf")):
            raise ValueError(f"found reward {reward} at response {index}, expected a finite one; repair the reward")
        members.setdefault(group, []).append(reward)
    for group, values in members.items():
        if len(values) < 2:
            raise ValueError(
                f"found group {group!r} with one response, expected two or more: its advantage is always 0 and it "
                "trains nothing; sample more responses a prompt, or resubmit those that are missing"
            )
    # statistics.mean adds fractions: one rounding, whatever the order, and the mean of equal values is that value.
    means = {group: statistics.mean(values) for group, values in members.items()}
    return torch.tensor([r - means[g] for r, g in zip(rewards, groups, strict=True)], dtype=torch.float64)


def reinforce_zero_loss(
    logprob: torch.Tensor,
    rollout_logprob: torch.Tensor,
    mask: torch.Tensor,
    advantage: torch.Tensor,
    *,
    responses: int | None = None,
) -> Estimate:
    """logprob (with gradient), rollout_logprob: [B, T] fp32 or fp64; mask: [B, T] bool; advantage: [B].

    `responses` is the B of the formula when this call sees one micro-batch of it. Values where mask is False may be
    anything, NaN included.
    """
    weight = importance_weights(logprob, rollout_logprob, mask)
    loss = -mean_over_responses(advantage_column(advantage, weight) * weight, mask, responses)
    return Estimate(loss, weight.detach(), mask)


def importance_weights(logprob: torch.Tensor, rollout_logprob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """w = exp(logprob - rollout_logprob), [B, T], differentiable in logprob, 0 where masked; or a clear error."""
    _check_shapes(logprob, rollout_logprob, mask)
    for tensor, whose in ((logprob, "the learner"), (rollout_logprob, "the rollout")):
        bad = mask & ~torch.isfinite(tensor.detach())
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{int(bad.sum())} tokens have a logprob of {whose} that is not finite, first [{row}, {column}] = "
                f"{tensor[row, column].item()}; a sampled token has a positive probability on both sides: mask what "
                "was not sampled, and find the kernel that produced it"
            )
    # Masked before the exponential: a NaN in the padding must not reach a gradient as 0 * NaN.
    weight = torch.where(mask, torch.where(mask, logprob - rollout_logprob, 0).exp(), 0)
    overflow = ~torch.isfinite(weight.detach())
    if overflow.any():
        row, column = overflow.nonzero()[0].tolist()
        raise ValueError(
            f"{int(overflow.sum())} importance ratios overflow {weight.dtype}, first [{row}, {column}]: learner "
            f"{logprob[row, column].item()}, rollout {rollout_logprob[row, column].item()}; such a gap is not weight "
            "lag: recompute at the rollout's own version (mismatch_metrics.split) and lower the lag or the step size"
        )
    return weight


def mean_over_responses(per_token: torch.Tensor, mask: torch.Tensor, responses: int | None = None) -> torch.Tensor:
    """(1/B) sum_i (1/T_i) sum_t of [B, T] values that are 0 where masked."""
    lengths = mask.sum(1)
    if (lengths == 0).any():
        empty = (lengths == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"{len(empty)} responses have no token to train on, first row {empty[0]}; drop them before the batch is "
            "formed (after the group's mean, which counts their reward)"
        )
    if responses is not None and responses < mask.shape[0]:
        raise ValueError(f"found responses={responses} for {mask.shape[0]} rows, expected the whole batch's count")
    return (per_token.sum(1) / lengths).sum() / (responses or mask.shape[0])


def advantage_column(advantage: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B] -> [B, 1] in the dtype and on the device of the tokens."""
    if advantage.shape != like.shape[:1] or advantage.requires_grad or not torch.isfinite(advantage).all():
        raise ValueError(
            f"found advantages {tuple(advantage.shape)}, requires_grad={advantage.requires_grad}, expected "
            f"({like.shape[0]},) finite values without gradient; see group_advantages"
        )
    return advantage.to(like).unsqueeze(1)


def _check_shapes(logprob: torch.Tensor, rollout_logprob: torch.Tensor, mask: torch.Tensor) -> None:
    if logprob.dim() != 2 or rollout_logprob.shape != logprob.shape or mask.shape != logprob.shape:
        raise ValueError(
            f"found logprob {tuple(logprob.shape)}, rollout_logprob {tuple(rollout_logprob.shape)}, mask "
            f"{tuple(mask.shape)}, expected one [responses, tokens] shape"
        )
    if logprob.dtype not in (torch.float32, torch.float64) or rollout_logprob.dtype != logprob.dtype:
        raise ValueError(
            f"found logprob {logprob.dtype} and rollout_logprob {rollout_logprob.dtype}, expected float32 on both: a "
            "narrower type hides the differences the weights correct"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"found a mask of {mask.dtype}, expected torch.bool; compare it with 0")
    if rollout_logprob.requires_grad:
        raise ValueError("found a rollout_logprob that requires a gradient, expected the recorded values; detach them")
