"""The mismatch metrics: exact zeros, exact splits, and no NaN that passes."""
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.zero_mismatch.mismatch_metrics import k3, peak_to_median, split, spread, word_gate

quick = settings(deadline=None, max_examples=60)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def _exact_k3(x: float) -> float:
    """e^x - 1 - x by its series in fractions."""
    term, total = Fraction(1), Fraction(0)
    for n in range(1, 60):
        term = term * Fraction(x) / n
        total += term if n > 1 else 0
    return float(total)


@given(st.floats(-4, 4).filter(lambda x: abs(x) > 1e-150))
@quick
def test_k3_is_its_definition_without_cancellation(x):
    assert k3(torch.tensor([x], dtype=torch.float64)).item() == pytest.approx(_exact_k3(x), rel=1e-9)


def test_k3_is_exactly_zero_only_where_the_logprobs_are_equal():
    assert k3(torch.tensor([0.0])).item() == 0.0
    one_ulp = torch.tensor([-1e-7]) - torch.tensor([-1e-7]).nextafter(torch.tensor(0.0))
    assert k3(one_ulp).item() > 0
    assert k3(torch.tensor([1e-3, -1e-3])).tolist() == pytest.approx([_exact_k3(1e-3), _exact_k3(-1e-3)], rel=1e-9)


def test_spread_is_the_formula_over_the_masked_tokens():
    logprob, reference = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -1.0, float("nan")]])
    found = spread(logprob, reference, torch.tensor([[True, True, False]]))
    w = [math.exp(0.5), math.exp(-1)]
    assert found.tokens == 2
    assert found.max_weight == pytest.approx(w[0]) and found.mean_weight == pytest.approx(sum(w) / 2)
    assert found.k3 == pytest.approx(sum(v - 1 - math.log(v) for v in w) / 2)


def test_exact_expectation_of_the_weight_is_one_and_of_k3_the_kl():
    """Sampled from mu in exact proportions: mean w = 1 and mean k3 = KL(mu || pi)."""
    mu, pi = [0.5, 0.25, 0.25], [0.2, 0.5, 0.3]
    draws = [0, 0, 1, 2]  # in the proportions of mu
    record = torch.tensor([[math.log(mu[a]) for a in draws]], dtype=torch.float64)
    learner = torch.tensor([[math.log(pi[a]) for a in draws]], dtype=torch.float64)
    found = spread(learner, record, ones(1, 4))
    assert found.mean_weight == pytest.approx(1)
    assert found.k3 == pytest.approx(sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True)))


def test_split_separates_lag_from_kernel():
    torch.manual_seed(0)
    at_version = -torch.rand(4, 6)
    now, mask = at_version + 0.1 * torch.randn(4, 6), ones(4, 6)
    aligned = split(now, at_version, at_version.clone(), mask)
    assert aligned.kernel.k3 == 0 and aligned.words.passed and aligned.kernel.max_weight == 1
    assert aligned.lag == aligned.total and aligned.lag.k3 > 0

    recorded = at_version + 0.02 * torch.randn(4, 6)
    stock = split(now, at_version, recorded, mask)
    assert stock.lag == aligned.lag, "the lag does not see the kernels"
    assert stock.kernel.k3 > 0 and not stock.words.passed and stock.words.differing_words == 24

    synchronous = split(at_version, at_version, recorded, mask)
    assert synchronous.lag.k3 == 0 and synchronous.kernel == synchronous.total


def test_word_gate_sees_one_ulp_in_one_token_and_says_where():
    recorded = -torch.rand(3, 5)
    recomputed = recorded.clone()
    assert word_gate(recomputed, recorded, ones(3, 5)).passed
    recomputed[2, 1] = recorded[2, 1].nextafter(torch.tensor(-9.0))
    found = word_gate(recomputed, recorded, ones(3, 5))
    assert (found.differing_words, found.invalid_tokens, found.passed) == (1, 0, False)
    assert found.first == (2, 1, recomputed[2, 1].item(), recorded[2, 1].item())
    assert found.max_dp > 0 and found.std_dp > 0 and found.k3 > 0
    mask = ones(3, 5)
    mask[2, 1] = False
    assert word_gate(recomputed, recorded, mask).passed


def test_word_gate_sees_what_probabilities_hide():
    """-800 against -900: both probabilities are 0 even in fp64. The words differ, and so does k3."""
    found = word_gate(torch.tensor([[-800.0]]), torch.tensor([[-900.0]]), ones(1, 1))
    assert found.max_dp == 0 and found.differing_words == 1 and not found.passed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_equal_invalid_logprobs_on_both_sides_still_fail(value):
    """A missing token written as NaN, or an impossible one as -inf, must not pass because both sides agree on it."""
    record = torch.tensor([[-1.0, value]])
    found = word_gate(record.clone(), record, ones(1, 2))
    assert (found.invalid_tokens, found.differing_words, found.passed) == (1, 1, False)
    assert all(math.isfinite(x) for x in (found.max_dp, found.mean_dp, found.std_dp, found.k3))
    all_bad = word_gate(record[:, 1:].clone(), record[:, 1:], ones(1, 1))
    assert not all_bad.passed and all_bad.first[:2] == (0, 0)


def test_word_gate_tells_signed_zeros_apart():
    assert not word_gate(torch.tensor([[0.0]]), torch.tensor([[-0.0]]), ones(1, 1)).passed


@given(st.integers(0, 10**6), st.permutations(range(6)))
@quick
def test_metrics_do_not_depend_on_the_batch_order(seed, order):
    g = torch.Generator().manual_seed(seed)
    a, b = -torch.rand(6, 3, generator=g), -torch.rand(6, 3, generator=g)
    mask = torch.rand(6, 3, generator=g) < 0.7
    mask[0, 0] = True
    straight, shuffled = word_gate(a, b, mask), word_gate(a[order], b[order], mask[order])
    assert straight.differing_words == shuffled.differing_words and straight.max_dp == shuffled.max_dp
    assert spread(a, b, mask).k3 == pytest.approx(spread(a[order], b[order], mask[order]).k3, rel=1e-12)


def test_peak_to_median():
    assert peak_to_median([1.0, 2.0, 3.0, 8.0]) == 8 / 2.5
    assert peak_to_median([2.0]) == 1.0
    assert peak_to_median([0.0, 0.0]) is None
    assert peak_to_median([0.0, 0.0, 1e-9]) == math.inf
    for bad in ([], [float("nan")], [1.0, float("inf")], [-1.0]):
        with pytest.raises(ValueError, match="finite and not negative"):
            peak_to_median(bad)


@pytest.mark.parametrize("call,words", [
    (lambda: spread(torch.tensor([[float("nan")]]), torch.zeros(1, 1), ones(1, 1)), r"not finite at \[0, 0\]"),
    (lambda: spread(torch.zeros(1, 1), torch.full((1, 1), -1e4), ones(1, 1)), "log ratio of 10000"),
    (lambda: spread(torch.zeros(1, 1), torch.zeros(1, 1), ~ones(1, 1)), "at least one token"),
    (lambda: spread(torch.zeros(1, 2), torch.zeros(1, 1), ones(1, 1)), "one shape"),
    (lambda: word_gate(torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, 1), ones(1, 1)), "float32 words"),
])
def test_what_would_become_nan_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
