"""A Gaussian policy whose update under unclipped importance sampling has an exact second moment.

Policy N(theta, 1), reward -a^2 / 2, so the optimum is theta = 0. The rollout samples B actions from N(theta + delta, 1)
and the learner weights each by the exact ratio w; the baseline is the policy's expected reward. With x = a - theta:

    theta' = theta + eta * mean of w g,   g = -theta x^2 - (x^3 - x) / 2,   E[w g] = -theta for every delta

The mean is right whatever delta is. The variance is not: E_mu[w^2 g^2] = e^(delta^2) E[g^2] with x ~ N(-delta, 1). For
a mismatch delta ~ N(0, tau^2), drawn anew at each update, averaging over it gives

    E[theta'^2] = rho theta^2 + (eta^2 / B) C      rho = (1 - eta)^2 + (eta^2 / B) (M - 1)
    M = E[e^(delta^2) (delta^4 + 6 delta^2 + 3)]
    C = E[e^(delta^2) (delta^6 + 13 delta^4 + 34 delta^2 + 10)] / 4

so the update is stable in mean square exactly for 0 < eta < 2 / (1 + (M - 1) / B): a larger mismatch, a smaller range.
For tau^2 >= 1/2 no step is stable.
"""
import math
from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    m: float
    c: float


def moments(tau: float) -> Moments:
    """M and C. e^(delta^2) times the density of N(0, tau^2) is that of N(0, s2), scaled by (1 - 2 tau^2)^(-1/2)."""
    if not 0 <= tau * tau < 0.5:
        raise ValueError(f"found tau {tau}, expected 0 <= tau < sqrt(1/2): beyond, the second moment is infinite")
    scale = 1 / math.sqrt(1 - 2 * tau * tau)
    s2 = tau * tau / (1 - 2 * tau * tau)
    d2, d4, d6 = s2, 3 * s2**2, 15 * s2**3
    return Moments(scale * (d4 + 6 * d2 + 3), scale * (d6 + 13 * d4 + 34 * d2 + 10) / 4)


def largest_stable_step(tau: float, batch: int) -> float:
    return 2 / (1 + (moments(tau).m - 1) / batch)


def mean_square(theta0: float, tau: float, eta: float, batch: int, updates: int) -> np.ndarray:
    """E[theta_k^2] for k = 0 .. updates, exact, without lag."""
    m, c = moments(tau)
    rho, noise = (1 - eta) ** 2 + eta**2 / batch * (m - 1), eta**2 / batch * c
    values = [theta0**2]
    for _ in range(updates):
        values.append(rho * values[-1] + noise)
    return np.array(values)


def simulate(
    theta0: float, tau: float, eta: float, batch: int, updates: int, lag: int, chains: int, seed: int
) -> np.ndarray:
    """theta, [updates + 1, chains]: the same update by sampling, the rollout `lag` versions behind."""
    rng = np.random.default_rng(seed)
    theta = np.empty((updates + 1, chains))
    theta[0] = theta0
    for k in range(updates):
        now, rollout = theta[k], theta[max(0, k - lag)] + tau * rng.standard_normal(chains)
        action = rollout + rng.standard_normal((batch, chains))
        x = action - now
        w = np.exp(((action - rollout) ** 2 - x**2) / 2)
        advantage = (now**2 + 1) / 2 - action**2 / 2
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged chain overflows: it is counted, not hidden
            theta[k + 1] = now + eta * (w * advantage * x).mean(0)
    return theta
