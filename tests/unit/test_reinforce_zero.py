"""REINFORCE Zero against closed forms, its invariances, and what it refuses."""
import itertools
import math

import bandit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.zero_mismatch.reinforce_zero import group_advantages, importance_weights, reinforce_zero_loss

quick = settings(deadline=None, max_examples=60)


def batch(seed=0, rows=6, columns=5, dtype=torch.float32):
    """Ragged responses with NaN in the padding, so that a leak is seen."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, columns + 1, (rows,), generator=g)
    mask = torch.arange(columns) < lengths.unsqueeze(1)
    logprob = -torch.rand(rows, columns, generator=g).to(dtype) * 3
    rollout = logprob + torch.randn(rows, columns, generator=g).to(dtype) * 0.3
    nan = torch.tensor(float("nan"), dtype=dtype)
    rewards = torch.rand(rows, generator=g).tolist()
    return torch.where(mask, logprob, nan), torch.where(mask, rollout, nan), mask, group_advantages(rewards, [0] * rows)


def gradient(logprob, rollout, mask, advantage, **kwargs):
    logprob = logprob.clone().requires_grad_()
    reinforce_zero_loss(logprob, rollout, mask, advantage, **kwargs).loss.backward()
    return logprob.grad


def assert_same_bits(got, want, what):
    differs = got.contiguous().view(torch.int32) != want.contiguous().view(torch.int32)
    if differs.any():
        first = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(f"{what}: {int(differs.sum())} words differ, first {first}: {got[first]} != {want[first]}")


# ---- closed forms


def test_loss_is_the_formula_of_the_article():
    logprob, rollout, mask, advantage = batch(dtype=torch.float64)
    expected = 0.0
    for i in range(len(mask)):
        ratios = [math.exp(logprob[i, t].item() - rollout[i, t].item()) for t in range(mask.shape[1]) if mask[i, t]]
        expected -= advantage[i].item() * sum(ratios) / len(ratios) / len(mask)
    assert reinforce_zero_loss(logprob, rollout, mask, advantage).loss.item() == pytest.approx(expected, rel=1e-13)


def test_gradient_is_the_weighted_score():
    logprob, rollout, mask, advantage = batch(dtype=torch.float64)
    w = importance_weights(logprob, rollout, mask)
    expected = -advantage.unsqueeze(1) * w / mask.sum(1, keepdim=True) / len(mask)
    torch.testing.assert_close(gradient(logprob, rollout, mask, advantage), expected, rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(
        lambda x: reinforce_zero_loss(x, rollout, mask, advantage).loss,
        torch.where(mask, logprob, 0).requires_grad_(),
    )


@pytest.mark.parametrize("p,q", [(0.5, 0.1), (0.9, 0.2), (0.3, 0.3), (1e-4, 0.7)])
@pytest.mark.parametrize("group", [2, 3, 5])
def test_expected_update_is_the_on_policy_one(p, q, group):
    """Two-armed bandit: pulls from q, update in expectation as if from p, however far apart."""
    found = bandit.expected_update(lambda *a: reinforce_zero_loss(*a[:4]), p, q, group=group)
    assert found == pytest.approx(bandit.on_policy(p, group=group), rel=1e-12)
    assert bandit.closed_form(bandit.weights(p, q), p, q, group=group) == pytest.approx(found, rel=1e-12)


def test_counter_without_weights_the_expected_update_is_another():
    """The two arms of the claim above: coefficient 1 instead of w gives the covariance under q, not under p."""
    assert bandit.closed_form((1, 1)) == pytest.approx(0.06 * 0.75)
    assert bandit.on_policy() == pytest.approx(0.25 * 0.75 * 2 / 3)


def test_longer_responses_keep_the_rollouts_histories():
    """Stated limit: with two tokens, the expectation is on-policy at each history, under the rollout's histories.

    Exact: E[-dL/dtheta] = (1 - 1/G) (1/2) sum_t sum_h mu(h) sum_a d pi(a|h)/d theta E_mu[r | h, a].
    """
    theta0, mu, group = 0.4, {(): 0.2, (0,): 0.7, (1,): 0.35}, 2
    slope = {(): 1.0, (0,): -2.0, (1,): 0.5}  # logit of token 1 at each history, as slope * theta
    reward = {(0, 0): 0.1, (0, 1): 1.0, (1, 0): 0.4, (1, 1): 0.0}
    rollouts = list(itertools.product((0, 1), repeat=2))

    def chance(tokens):
        return math.prod(mu[tokens[:t]] if tokens[t] else 1 - mu[tokens[:t]] for t in range(2))

    found = 0.0
    for responses in itertools.product(rollouts, repeat=group):
        theta = torch.tensor(theta0, dtype=torch.float64, requires_grad=True)
        sign = torch.tensor([[1.0 if a else -1.0 for a in tokens] for tokens in responses], dtype=torch.float64)
        slopes = torch.tensor([[slope[tokens[:t]] for t in range(2)] for tokens in responses], dtype=torch.float64)
        logprob = torch.nn.functional.logsigmoid(sign * slopes * theta)
        recorded = torch.tensor(
            [[math.log(mu[s[:t]] if s[t] else 1 - mu[s[:t]]) for t in range(2)] for s in responses], dtype=torch.float64
        )
        advantage = group_advantages([reward[tokens] for tokens in responses], [0] * group)
        loss = reinforce_zero_loss(logprob, recorded, torch.ones(group, 2, dtype=torch.bool), advantage).loss
        found -= math.prod(map(chance, responses)) * torch.autograd.grad(loss, theta)[0].item()

    expected = 0.0
    for history in mu:
        reach = 1.0 if not history else (mu[()] if history[0] else 1 - mu[()])
        p = 1 / (1 + math.exp(-slope[history] * theta0))
        for a in (0, 1):
            if history:
                value = reward[(*history, a)]
            else:
                value = sum(reward[(a, b)] * (mu[(a,)] if b else 1 - mu[(a,)]) for b in (0, 1))
            expected += reach * (1 if a else -1) * slope[history] * p * (1 - p) * value
    assert found == pytest.approx((1 - 1 / group) * expected / 2, rel=1e-12)


# ---- advantages


def test_advantage_is_reward_minus_the_groups_mean():
    found = group_advantages([1.0, 0.0, 0.5, 3.0, 5.0], ["a", "a", "a", "b", "b"])
    assert found.tolist() == [0.5, -0.5, 0.0, -1.0, 1.0]


@given(st.floats(-1e30, 1e30), st.integers(2, 9))
@quick
def test_equal_rewards_give_exactly_zero_and_train_nothing(reward, size):
    advantage = group_advantages([reward] * size, [0] * size)
    assert advantage.tolist() == [0.0] * size
    logprob, rollout, mask, _ = batch(rows=size)
    assert not gradient(logprob, rollout, mask, advantage).any()


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1e6, 1e6)), min_size=6, max_size=12), st.randoms())
@quick
def test_advantages_do_not_depend_on_the_order(pairs, random):
    pairs += [(g, 1.0) for g in (0, 1, 2) for _ in (0, 1)]
    order = list(range(len(pairs)))
    random.shuffle(order)
    straight = group_advantages([r for _, r in pairs], [g for g, _ in pairs])
    shuffled = group_advantages([pairs[i][1] for i in order], [pairs[i][0] for i in order])
    assert torch.equal(shuffled, straight[order])


@pytest.mark.parametrize("rewards,groups,words", [
    ([1.0], ["g"], "group 'g' with one response"),
    ([1.0, 2.0, 3.0], ["a", "a", "b"], "group 'b' with one response"),
    ([1.0, float("nan")], ["a", "a"], "found reward nan at response 1"),
    ([1.0, float("inf")], ["a", "a"], "found reward inf"),
    ([], [], "one key a reward"),
    ([1.0, 2.0], ["a"], "one key a reward"),
])
def test_groups_that_cannot_be_meant_are_refused(rewards, groups, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, groups)


# ---- invariances, bit for bit


@given(st.integers(0, 10**6), st.randoms())
@quick
def test_batch_order_changes_no_bit_of_a_tokens_gradient(seed, random):
    logprob, rollout, mask, advantage = batch(seed)
    order = list(range(len(mask)))
    random.shuffle(order)
    straight = gradient(logprob, rollout, mask, advantage)
    shuffled = gradient(logprob[order], rollout[order], mask[order], advantage[order])
    assert_same_bits(shuffled, straight[order], "shuffled batch")


@given(st.integers(0, 10**6), st.integers(1, 5))
@quick
def test_micro_batches_change_no_bit_of_a_tokens_gradient(seed, cut):
    parts = batch(seed)
    whole = gradient(*parts)
    first = gradient(*(x[:cut] for x in parts), responses=6)
    second = gradient(*(x[cut:] for x in parts), responses=6)
    assert_same_bits(torch.cat([first, second]), whole, "two micro-batches")


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 1e30, float("nan"), -float("inf")]))
@quick
def test_padding_changes_no_bit_and_gets_no_gradient(seed, more, content):
    logprob, rollout, mask, advantage = batch(seed)
    pad = torch.full((6, more), content)
    wide = gradient(
        torch.cat([logprob, pad], 1), torch.cat([rollout, pad], 1),
        torch.cat([mask, torch.zeros(6, more, dtype=torch.bool)], 1), advantage,
    )
    assert_same_bits(wide[:, :5], gradient(logprob, rollout, mask, advantage), "padded batch")
    assert not wide[:, 5:].any() and not wide[:, :5][~mask].any()


def test_weights_are_reported_unclipped_and_nothing_is_rejected():
    logprob = torch.tensor([[-0.1, -9.0], [-2.0, -0.5]])
    rollout = torch.tensor([[-12.0, -0.1], [-2.0, -40.0]])
    found = reinforce_zero_loss(logprob, rollout, torch.ones(2, 2, dtype=torch.bool), torch.tensor([1.0, -1.0]))
    assert found.weight.max() == torch.tensor(39.5).exp() and found.kept.all() and not found.weight.requires_grad


# ---- refusals: a clear error, never a silent NaN


@pytest.mark.parametrize("change,words", [
    (dict(rollout=-100.0), r"1 importance ratios overflow torch.float32, first \[1, 0\]: learner -1.0, rollout -100.0"),
    (dict(rollout=float("nan")), "logprob of the rollout that is not finite"),
    (dict(rollout=-float("inf")), r"first \[1, 0\] = -inf"),
    (dict(learner=float("nan")), "logprob of the learner that is not finite"),
    (dict(learner=-float("inf")), "logprob of the learner that is not finite"),
    (dict(mask=False), "1 responses have no token to train on, first row 1"),
    (dict(advantage=float("nan")), "finite values without gradient"),
])
def test_what_would_become_nan_is_refused(change, words):
    logprob, rollout = torch.full((2, 2), -1.0), torch.full((2, 2), -1.0)
    mask, advantage = torch.ones(2, 2, dtype=torch.bool), torch.tensor([1.0, -1.0])
    for name, tensor in (("learner", logprob), ("rollout", rollout), ("advantage", advantage)):
        if name in change:
            tensor[(1, 0) if tensor.dim() == 2 else 1] = change[name]
    if "mask" in change:
        mask[1] = False
    with pytest.raises(ValueError, match=words):
        reinforce_zero_loss(logprob.requires_grad_(), rollout, mask, advantage)


@given(st.floats(-200, -0.125, width=32), st.floats(-200, -0.125, width=32))
@quick
def test_any_finite_logprobs_give_a_finite_loss_or_an_overflow_error(learner, rollout):
    logprob = torch.tensor([[learner]], requires_grad=True)
    parts = (torch.tensor([[rollout]]), torch.ones(1, 1, dtype=torch.bool), torch.tensor([0.5]))
    if learner - rollout > 88.7228:
        with pytest.raises(ValueError, match="overflow"):
            reinforce_zero_loss(logprob, *parts)
        return
    loss = reinforce_zero_loss(logprob, *parts).loss
    loss.backward()
    assert loss.isfinite() and logprob.grad.isfinite().all()


@pytest.mark.parametrize("change,words", [
    (lambda a: (a[0].bfloat16(), a[1].bfloat16(), *a[2:]), "narrower type"),
    (lambda a: (a[0].double(), *a[1:]), "expected float32 on both"),
    (lambda a: (a[0], a[1][:, :1], *a[2:]), "shape"),
    (lambda a: (a[0], a[1], a[2].float(), a[3]), "torch.bool"),
    (lambda a: (a[0], a[1].clone().requires_grad_(), *a[2:]), "recorded values"),
    (lambda a: (*a[:3], a[3][:2]), "advantages"),
])
def test_wrong_shapes_and_dtypes_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        reinforce_zero_loss(*change(batch()))


def test_a_micro_batch_cannot_be_larger_than_its_batch():
    with pytest.raises(ValueError, match="whole batch's count"):
        reinforce_zero_loss(*batch(), responses=5)
