"""A two-armed bandit whose estimators have exact expectations: every outcome of a group is enumerated.

Arm 1 has probability p = sigmoid(theta) under the learner and q under the rollout; a response is one pull.
The score is d log pi / d theta: 1 - p for arm 1, -p for arm 0.
"""
import itertools
import math

import torch
from megatron.zero_mismatch.reinforce_zero import group_advantages

P, Q, REWARDS, GROUP = 0.5, 0.1, (0.25, 1.0), 3


def learner(theta):
    """Logprobs of arms 0 and 1."""
    return torch.stack([torch.nn.functional.logsigmoid(-theta), torch.nn.functional.logsigmoid(theta)])


def expected_update(estimator, p=P, q=Q, rewards=REWARDS, group=GROUP) -> float:
    """The exact mean of -dL/dtheta over pulls from q; estimator(logprob, rollout_logprob, mask, advantage, heads)."""
    mean = 0.0
    for arms in itertools.product((0, 1), repeat=group):
        chance = math.prod(q if arm else 1 - q for arm in arms)
        if chance == 0:
            continue
        theta = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
        rollout = torch.tensor([math.log1p(-q), math.log(q)], dtype=torch.float64)
        column = torch.tensor(arms)
        logprob = learner(theta)
        heads = (logprob.expand(group, 1, 2), rollout.expand(group, 1, 2))
        loss = estimator(
            logprob[column].unsqueeze(1),
            rollout[column].unsqueeze(1),
            torch.ones(group, 1, dtype=torch.bool),
            group_advantages([rewards[arm] for arm in arms], ["g"] * group),
            heads,
        ).loss
        mean -= chance * torch.autograd.grad(loss, theta)[0].item()
    return mean


def closed_form(coefficient, p=P, q=Q, rewards=REWARDS, group=GROUP) -> float:
    """The mean of A c s for coefficients c(arm): a group's mean correlates with a member by 1/G, hence (1 - 1/G).

    E[A_i c_i s_i] = (1 - 1/G) (E[r c s] - E[r] E[c s]), all under q.
    """
    chance, score = (1 - q, q), (-p, 1 - p)
    cs = [chance[arm] * coefficient[arm] * score[arm] for arm in (0, 1)]
    mean_reward = sum(chance[arm] * rewards[arm] for arm in (0, 1))
    return (1 - 1 / group) * sum((rewards[arm] - mean_reward) * cs[arm] for arm in (0, 1))


def on_policy(p=P, rewards=REWARDS, group=GROUP) -> float:
    """(1 - 1/G) dJ/dtheta with J = p r1 + (1 - p) r0: what the same estimator gives when the rollout is the learner."""
    return (1 - 1 / group) * p * (1 - p) * (rewards[1] - rewards[0])


def weights(p=P, q=Q):
    return ((1 - p) / (1 - q), p / q)
