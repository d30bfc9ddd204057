"""Every operator of the aligned trainer, in fp64 with its PyTorch reference in the kernel's place: no vLLM, no GPU.

Values come from the kernel and from nothing else; the gradient is checked against finite differences, and a planted
fault in each derivative must fail that check.
"""
from unittest import mock

import pytest
import torch
from megatron.zero_mismatch import attention, batched, conv1d, experts, linear, logprob, mamba2, norm, relu2, router
from megatron.zero_mismatch.packing import Packed, pack

SIZES = mamba2.Sizes(heads=2, head_dim=3, groups=1, state=2, chunk=4)
PACKED = Packed((3, 1, 6), torch.device("cpu"))  # inside a chunk, one token, over two chunks
IDS = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [1, 2], [0, 2], [0, 1], [1, 0], [2, 1], [0, 2]], dtype=torch.int32)
TOKENS = torch.tensor([0, 4, 4, 2, 1, 3, 0, 2, 4, 1])


def normal(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


# name: (the operator with a kernel first, its reference as that kernel, its differentiable inputs)
OPERATORS = {
    "linear": (linear.linear, linear.reference, lambda: (normal(10, 4), normal(3, 4))),
    "rms_norm": (lambda k, x, w: norm.rms_norm(k, x, w, 1e-3), norm.reference, lambda: (normal(10, 4), normal(4))),
    "add_rms_norm": (lambda k, x, r, w: norm.add_rms_norm(k, x, r, w, 1e-3), norm.reference_add,
                     lambda: (normal(10, 4), normal(10, 4) * 2, normal(4))),
    "gated_rms_norm": (lambda k, x, g, w: norm.gated_rms_norm(k, x, g, w, 1e-3, 3), norm.reference_gated,
                       lambda: (normal(10, 6), normal(10, 6) * 2, normal(6))),
    "relu2": (relu2.relu2, relu2.reference, lambda: (normal(10, 4),)),
    "conv1d": (lambda k, x, w, b: conv1d.conv1d(k, x, w, b, PACKED), conv1d.reference,
               lambda: (normal(10, 5), normal(5, 4), normal(5))),
    "mamba2": (lambda k, x, dt, a, d, b: mamba2.mamba2(k, x, dt, -a.exp(), d, b, PACKED, SIZES), mamba2.reference,
               lambda: (normal(10, 6 + 4), normal(10, 2), normal(2), normal(2), normal(2) - 1)),
    "attention": (lambda k, q, key, v: attention.attention(k, q, key, v, PACKED, 0.5), attention.reference,
                  lambda: (normal(10, 4, 3), normal(10, 2, 3), normal(10, 2, 3) * 2)),
    "router_logits": (router.logits, router.reference_logits, lambda: (normal(10, 4), normal(3, 4))),
    "router_weights": (lambda k, z: router.top_k(k, z, torch.zeros(4, dtype=torch.float64), 2, True)[0],
                       router.reference_top_k, lambda: (normal(10, 4),)),
    "router_weights_as_they_are": (lambda k, z: router.top_k(k, z, torch.zeros(4, dtype=torch.float64), 2, False)[0],
                                   router.reference_top_k, lambda: (normal(10, 4),)),
    "experts": (lambda k, x, u, d, w: experts.experts(k, x, u, d, w, IDS), experts.reference,
                lambda: (normal(10, 4), normal(3, 5, 4), normal(3, 4, 5), normal(10, 2))),
    "logprob": (lambda k, h, w: logprob.logprob(linear.reference, k, h, w, TOKENS), logprob.reference,
                lambda: (normal(10, 4), normal(5, 4))),
    "batched": (lambda k, a, b: batched.matmul(a, b), None, lambda: (normal(2, 3, 4, 5), normal(2, 3, 5, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_gradient_is_that_of_finite_differences(name):
    operator, reference, inputs = OPERATORS[name]
    with mock.patch.object(attention, "BLOCK", 4), mock.patch.object(logprob, "BLOCK", 4):
        assert torch.autograd.gradcheck(lambda *x: operator(reference, *x), [x.detach().requires_grad_()
                                                                            for x in inputs()])


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - {"batched"}))
def test_values_are_the_kernels_bit_for_bit(name):
    """The kernel may give anything: negative zeros, infinities and NaNs come through as they are."""
    operator, reference, inputs = OPERATORS[name]

    def kernel(*arguments):
        assert not any(torch.is_tensor(a) and a.requires_grad for a in arguments), "a kernel has no gradient"
        found = reference(*arguments)
        first = found[0] if isinstance(found, tuple) else found
        first.flatten()[:4] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-320], dtype=torch.float64)
        kept.append(first.clone())
        return found

    kept: list[torch.Tensor] = []
    out = operator(kernel, *inputs())
    out = out[0] if isinstance(out, tuple) else out
    assert torch.equal(out.detach().flatten().view(torch.int64), torch.cat(kept).flatten().view(torch.int64))


ONE_EXPERT = experts._one_expert


def _without_routing_gradient(*arguments):
    dx, dweight, *dw = ONE_EXPERT(*arguments)
    return dx, dweight * 0, *dw


# name: (module, what to break there, how): each a slip of the derivative alone.
FAULTS = {
    "rms_norm": (norm, "rms_grad", lambda grad, x, weight, eps: (grad * weight, grad.sum(0))),
    "attention": (attention, "_rows", lambda x, rows: x.unflatten(1, (rows, -1)).permute(1, 0, 2, 3).flatten(1, 2)),
    "experts": (experts, "_one_expert", _without_routing_gradient),
    "mamba2": (mamba2, "_carried", lambda b, decay, scaled, share, grid: (
        scaled.new_zeros(*scaled.shape[:2], scaled.shape[-1], b.shape[-1]))),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_changes_the_gradient(name):
    operator, reference, inputs = OPERATORS[name]
    module, attribute, broken = FAULTS[name]
    leaves = inputs()
    values = operator(reference, *leaves).detach()
    weight = torch.arange(1, values.numel() + 1, dtype=values.dtype).view_as(values).sin()

    def gradients():
        return torch.autograd.grad((operator(lambda *a: values.clone(), *leaves) * weight).sum(), leaves)

    good = gradients()
    with mock.patch.object(module, attribute, broken):
        bad = gradients()
    assert not all(torch.allclose(a, b) for a, b in zip(good, bad, strict=True))


def test_the_choice_of_experts_follows_the_biased_score_and_the_weights_do_not():
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    weights, ids = router.reference_top_k(logits, torch.tensor([9.0, 0.0, 0.0]), 2, True)
    assert ids.tolist() == [[0, 2]]
    scores = torch.sigmoid(logits)[0, [0, 2]]
    assert torch.allclose(weights[0], scores / scores.sum())


def test_a_convolution_does_not_reach_into_the_sequence_before():
    x, weight, bias = (t.detach() for t in (normal(10, 5), normal(5, 4), normal(5)))
    packed = conv1d.reference(x, weight, bias, PACKED)
    for begin, end in PACKED.bounds:
        alone = conv1d.reference(x[begin:end], weight, bias, Packed((end - begin,), x.device))
        assert torch.allclose(packed[begin:end], alone, rtol=1e-12)


def test_a_scan_starts_anew_with_every_sequence():
    inputs = [t.detach() for t in OPERATORS["mamba2"][2]()]
    rates = -inputs[2].exp()
    packed = mamba2.reference(inputs[0], inputs[1], rates, *inputs[3:], PACKED, SIZES)
    for begin, end in PACKED.bounds:
        own = Packed((end - begin,), rates.device)
        alone = mamba2.reference(inputs[0][begin:end], inputs[1][begin:end], rates, *inputs[3:], own, SIZES)
        assert torch.allclose(packed[begin:end], alone, rtol=1e-12)


def test_where_an_expert_lies_changes_no_bit():
    """NeMo-RL #4243: logprobs followed the trainer's degree of expert parallelism. All it decides is where an expert
    lies; a token's sum keeps the order of its slots. In fp32, where another order of three shows."""
    x, weights, w1, w2 = (normal(*shape).detach().float().requires_grad_()
                          for shape in ((64, 8), (64, 3), (4, 5, 8), (4, 8, 5)))
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(row))[:3] for row in range(64)]).int()
    place = torch.tensor([2, 0, 3, 1])  # of experts 0 to 3

    def run(w1, w2, ids):
        out = experts.experts(experts.reference, x, w1, w2, weights, ids)
        return out, *torch.autograd.grad(out, (x, weights, w1, w2), torch.ones_like(out))

    order = place.argsort()
    out, dx, dweights, dw1, dw2 = run(w1, w2, ids)
    moved = run(w1[order], w2[order], place[ids.long()].int())
    for one, other in zip((out, dx, dweights, dw1[order], dw2[order]), moved, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_experts_backward_gives_the_same_bits_twice():
    inputs = [t.detach().to(torch.bfloat16).requires_grad_() for t in OPERATORS["experts"][2]()]
    inputs[3] = inputs[3].detach().float().requires_grad_()

    def run():
        out = experts.experts(experts.reference, *inputs, IDS)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="drop empty sequences"):
        pack([torch.tensor([1]), torch.tensor([], dtype=torch.int64)])


def test_a_linear_of_two_dtypes_is_refused():
    with pytest.raises(ValueError, match="cast the master once"):
        linear.linear(linear.reference, torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16))
