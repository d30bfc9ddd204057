"""Each baseline's expectation on the two-armed bandit, in closed form, and its bias as a number."""
import bandit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.zero_mismatch.baselines import mis, score_centering, tis, token_gate
from megatron.zero_mismatch.reinforce_zero import group_advantages, reinforce_zero_loss

quick = settings(deadline=None, max_examples=60)

P, Q = bandit.P, bandit.Q  # w = 5 for arm 1, 5/9 for arm 0
SCALE = (1 - 1 / bandit.GROUP) * 0.75  # group mean's factor times the difference of rewards

ESTIMATORS = {
    "tis": lambda a, heads: tis(*a, cap=2.0),
    "mis": lambda a, heads: mis(*a, low=0.5, high=2.0),
    "token_gate": lambda a, heads: token_gate(*a, low=0.5, high=2.0),
    "score_centering": lambda a, heads: centred(a, *heads),
}
# What each makes of arm 1 and arm 0 (c s under q, minus its mean), worked out by hand at p = 0.5, q = 0.1, cap = 2:
# the on-policy value is p (1 - p) = 0.25.
#   tis    c = (5/9, 2)   E[r c s] - E[r] E[c s] = 0.1*2*0.5 - 0.1*(0.1*2*0.5 - 0.9*(5/9)*0.5) = 0.1 + 0.015
#   gates  c = (5/9, 0)                            0         - 0.1*(0         - 0.25)           = 0.025
#   score  s - E_q[s]                              q (1 - q)                                    = 0.09
BY_HAND = {"tis": 0.115, "mis": 0.025, "token_gate": 0.025, "score_centering": 0.09}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_bias_has_the_computed_value(name):
    found = bandit.expected_update(lambda *a: ESTIMATORS[name](a[:4], a[4]))
    assert found == pytest.approx(BY_HAND[name] * SCALE, rel=1e-12)
    assert found - bandit.on_policy() == pytest.approx((BY_HAND[name] - 0.25) * SCALE, rel=1e-12)


@given(st.floats(0.02, 0.98), st.floats(0.02, 0.98), st.floats(0.1, 4))
@settings(deadline=None, max_examples=20)
def test_truncation_has_its_closed_form_everywhere(p, q, cap):
    found = bandit.expected_update(lambda *a: tis(*a[:4], cap=cap), p, q)
    clipped = [min(w, cap) for w in bandit.weights(p, q)]
    assert found == pytest.approx(bandit.closed_form(clipped, p, q), rel=1e-9, abs=1e-12)


@given(st.floats(0.02, 0.98), st.floats(0.02, 0.98))
@settings(deadline=None, max_examples=20)
def test_gates_have_their_closed_form_everywhere(p, q):
    gated = [w if 0.5 <= w <= 2 else 0.0 for w in bandit.weights(p, q)]
    if any(abs(w - edge) < 1e-9 for w in bandit.weights(p, q) for edge in (0.5, 2)):
        return
    for name in ("token_gate", "mis"):  # one token a response: the two gates are one
        found = bandit.expected_update(lambda *a, n=name: ESTIMATORS[n](a[:4], a[4]), p, q)
        assert found == pytest.approx(bandit.closed_form(gated, p, q), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_on_policy_every_estimator_is_reinforce(name):
    found = bandit.expected_update(lambda *a: ESTIMATORS[name](a[:4], a[4]), p=0.4, q=0.4)
    assert found == pytest.approx(bandit.on_policy(p=0.4), rel=1e-12)


def ragged(seed, rows=5, columns=4):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows,), generator=g).unsqueeze(1)
    rollout = -torch.rand(rows, columns, generator=g) * 3
    logprob = rollout + torch.randn(rows, columns, generator=g)
    heads = [torch.log_softmax(torch.randn(rows, columns, 7, generator=g), 2)[..., :4] for _ in range(2)]
    nan = torch.tensor(float("nan"))
    heads = [torch.where(mask.unsqueeze(2), h, nan) for h in heads]
    advantage = group_advantages(torch.rand(rows, generator=g).tolist(), [0] * rows)
    return [torch.where(mask, logprob, nan), torch.where(mask, rollout, nan), mask, advantage], heads


def gradients(name, parts, heads, **kwargs):
    logprob, head = parts[0].clone().requires_grad_(), heads[0].clone().requires_grad_()
    if name == "score_centering":
        found = score_centering(logprob, *parts[1:], head_logprob=head, head_rollout_logprob=heads[1], **kwargs)
    else:
        bounds = {"cap": 1.2} if name == "tis" else {"low": 0.5, "high": 1.5}
        found = {"tis": tis, "mis": mis, "token_gate": token_gate}[name](logprob, *parts[1:], **bounds, **kwargs)
    found.loss.backward()
    head_grad = torch.zeros_like(head) if head.grad is None else head.grad
    return found, torch.cat([logprob.grad.flatten(), head_grad.flatten()])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(st.integers(0, 10**6), st.permutations(range(5)))
@quick
def test_batch_order_changes_no_bit_of_a_tokens_gradient(name, seed, order):
    parts, heads = ragged(seed)
    _, straight = gradients(name, parts, heads)
    _, shuffled = gradients(name, [x[order] for x in parts], [h[order] for h in heads])
    back = torch.argsort(torch.tensor(order))
    unshuffled = torch.cat([shuffled[:20].view(5, 4)[back].flatten(), shuffled[20:].view(5, 4, 4)[back].flatten()])
    assert torch.equal(unshuffled.view(torch.int32), straight.view(torch.int32))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nan_in_the_padding_reaches_nothing(name):
    parts, heads = ragged(3)
    found, gradient = gradients(name, parts, heads)
    assert found.loss.isfinite() and gradient.isfinite().all() and not found.kept[~parts[2]].any()
    assert not gradient[:20].view(5, 4)[~parts[2]].any()


def test_wide_bounds_are_the_unclipped_estimator():
    parts, heads = ragged(1)
    logprob = parts[0].clone().requires_grad_()
    reinforce_zero_loss(logprob, *parts[1:]).loss.backward()
    wide = {"low": 0, "high": 1e30}
    for estimator, bounds in ((tis, {"cap": 1e30}), (mis, wide), (token_gate, wide)):
        other = parts[0].clone().requires_grad_()
        found = estimator(other, *parts[1:], **bounds)
        found.loss.backward()
        assert found.kept.sum() == parts[2].sum()
        torch.testing.assert_close(other.grad, logprob.grad, rtol=1e-6, atol=0)


def test_sequence_gate_keeps_or_drops_whole_responses():
    logprob = torch.full((3, 2), -1.0)
    # Geometric means e^0, e^0.6 (whose product is e^1.2) and e^0.9, against bounds of e^-0.69 and e^0.69.
    rollout = logprob - torch.tensor([[1.2, -1.2], [0.6, 0.6], [0.9, 0.9]])
    parts = (logprob, rollout, torch.ones(3, 2, dtype=torch.bool), torch.ones(3))
    assert mis(*parts, low=0.5, high=2.0).kept.tolist() == [[True] * 2, [True] * 2, [False] * 2]
    assert token_gate(*parts, low=0.5, high=2.0).kept.tolist() == [[False] * 2, [True] * 2, [False] * 2]


def test_a_rejected_token_keeps_its_place_in_the_mean():
    """Otherwise a gate would silently raise the step size of what it keeps."""
    logprob = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    rollout = torch.tensor([[-1.0, -9.0]])
    token_gate(logprob, rollout, torch.ones(1, 2, dtype=torch.bool), torch.ones(1), low=0.5, high=2.0).loss.backward()
    assert logprob.grad.tolist() == [[-0.5, 0.0]]


@pytest.mark.parametrize("kept", [2, 5, 9])
def test_score_centering_models_what_was_not_recorded_as_the_learners_tail(kept):
    """Against the definition, with the modelled rollout distribution written out over the whole vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    p, q = logits.softmax(0), torch.randn(9, dtype=torch.float64).softmax(0)
    sampled = 1
    lp = torch.log_softmax(logits, 0)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = score_centering(
        lp[sampled].view(1, 1), q[sampled].log().view(1, 1), mask, torch.ones(1),
        head_logprob=lp[:kept].view(1, 1, -1), head_rollout_logprob=q[:kept].log().view(1, 1, -1),
    ).loss
    found = -torch.autograd.grad(loss, logits)[0]

    model = torch.cat([q[:kept], p.detach()[kept:] * (1 - q[:kept].sum()) / (1 - p.detach()[:kept].sum())])
    assert model.sum().item() == pytest.approx(1)
    score = torch.eye(9, dtype=torch.float64)[sampled] - p.detach()
    mean_score = sum(model[v] * (torch.eye(9, dtype=torch.float64)[v] - p.detach()) for v in range(9))
    torch.testing.assert_close(found, score - mean_score, rtol=1e-9, atol=1e-9)


def centred(parts, head, rollout_head):
    return score_centering(*parts, head_logprob=head, head_rollout_logprob=rollout_head)


@pytest.mark.parametrize("call,words", [
    (lambda a: tis(*a, cap=0.0), "cap"),
    (lambda a: tis(*a, cap=float("nan")), "cap"),
    (lambda a: mis(*a, low=2.0, high=1.0), "low < high"),
    (lambda a: token_gate(*a, low=-1.0, high=1.0), "0 <= low"),
    (lambda a: centred(a, torch.zeros(5, 4, 2), torch.zeros(5, 4, 3)), "heads"),
    (lambda a: centred(a, torch.full((5, 4, 2), float("nan")), torch.zeros(5, 4, 2)), "cannot be used"),
    (lambda a: tis(a[0], a[1] - 200, *a[2:], cap=2.0), "overflow"),
    (lambda a: mis(a[0], a[1], torch.zeros_like(a[2]), a[3], low=0.5, high=2.0), "no token to train on"),
])
def test_what_cannot_be_meant_is_refused(call, words):
    parts, _ = ragged(0)
    with pytest.raises(ValueError, match=words):
        call(parts)
