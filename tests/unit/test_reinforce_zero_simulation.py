"""The simulation in docs/reinforce_zero: its closed forms, its two arms, and that its README tells its results."""
import json
import pathlib
import sys

import numpy as np
import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "reinforce_zero"
sys.path.append(str(FOLDER))

import gaussian_policy as gaussian  # noqa: E402
import simulate  # noqa: E402
import token_policy as tokens  # noqa: E402

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(120)
WEIGHTS = WEIGHTS / WEIGHTS.sum()  # for the expectation under N(0, 1)


def _update_moments(theta: float, delta: float) -> tuple[float, float]:
    """E[w g] and E[(w g)^2] under the rollout N(theta + delta, 1), by quadrature, from the definitions."""
    action = theta + delta + NODES
    w = np.exp(NODES**2 / 2 - (action - theta) ** 2 / 2)
    g = ((theta**2 + 1) / 2 - action**2 / 2) * (action - theta)
    return float((WEIGHTS * w * g).sum()), float((WEIGHTS * (w * g) ** 2).sum())


@pytest.mark.parametrize("delta", [0.0, 0.3, -0.8])
def test_the_update_is_on_policy_in_the_mean_whatever_the_mismatch(delta):
    for theta in (-1.0, 0.2, 2.0):
        assert _update_moments(theta, delta)[0] == pytest.approx(-theta, abs=1e-9)


@pytest.mark.parametrize("tau", [0.0, 0.2, 0.4])
def test_the_second_moment_has_its_closed_form(tau):
    m, c = gaussian.moments(tau)
    for theta in (0.0, 0.7):
        likely = zip(NODES[30:90], WEIGHTS[30:90], strict=True)
        over_delta = sum(p * _update_moments(theta, tau * d)[1] for d, p in likely)
        assert over_delta == pytest.approx(m * theta**2 + c, rel=1e-5)


def test_the_stable_range_shrinks_with_the_mismatch_and_one_step_is_on_both_sides():
    bounds = [gaussian.largest_stable_step(tau, simulate.BATCH) for tau in simulate.TAUS]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > simulate.ETA > bounds[-1]
    for bound in bounds:
        for eta, grows in ((0.99 * bound, False), (1.01 * bound, True)):
            tau = simulate.TAUS[bounds.index(bound)]
            trace = gaussian.mean_square(100.0, tau, eta, simulate.BATCH, 3000)
            assert (trace[-1] > trace[0]) == grows
    with pytest.raises(ValueError, match="infinite"):
        gaussian.moments(0.71)


def test_sampling_agrees_with_the_closed_form():
    theta = gaussian.simulate(1.0, 0.2, 0.5, 8, updates=40, lag=0, chains=40_000, seed=1)
    exact = gaussian.mean_square(1.0, 0.2, 0.5, 8, 40)
    assert (theta[20:] ** 2).mean() == pytest.approx(exact[20:].mean(), rel=0.05)


def test_aligned_arm_has_no_kernel_term_and_stock_arm_has():
    torch.set_num_threads(1)
    aligned = list(tokens.train(2, False, 12, 200.0, 0))
    stock = list(tokens.train(2, True, 12, 200.0, 0))
    assert all(split.words.passed and split.kernel.k3 == 0 for split, _, _ in aligned)
    assert aligned[-1][0].lag.k3 > 0
    assert all(split.words.differing_words > 0 for split, _, _ in stock[4:])


def test_readme_tells_the_results():
    results = json.loads((FOLDER / "results.json").read_text())
    text = (FOLDER / "README.md").read_text()
    for row in simulate.token_table(results) + simulate.gaussian_table(results):
        assert row in text, row
    assert (FOLDER / "simulation.png").stat().st_size > 10_000
