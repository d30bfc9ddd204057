"""DeepSeek-V4's routing weights on plain PyTorch kernels: vLLM's are on the GPU."""
import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import router_dsv4
from megatron.zero_mismatch.router_dsv4 import REFERENCE, route, route_hashed

FACTOR = 1.5


def logits(tokens=4, experts=9, dtype=torch.float64):
    return (torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)) * 3).to(dtype).requires_grad_()


def bias(experts=9):
    return torch.randn(experts, generator=torch.Generator().manual_seed(1))


def plain(z, ids):
    """Row by row, differentiated by autograd."""
    rows = []
    for row, chosen in zip(z, ids.tolist(), strict=True):
        p = [torch.sqrt(torch.log(1 + torch.exp(row[e]))) for e in chosen]
        rows.append(torch.stack([FACTOR * v / sum(p) for v in p]))
    return torch.stack(rows)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda z: route(REFERENCE, z, bias(), 3, FACTOR)[0], logits())
    table = torch.tensor([[0, 4, 2], [8, 1, 3]], dtype=torch.int32)
    tokens = torch.tensor([1, 0, 0, 1])
    assert torch.autograd.gradcheck(lambda z: route_hashed(REFERENCE, z, tokens, table, FACTOR)[0], logits())


def test_weights_and_gradient_are_those_of_the_formula():
    z = logits()
    weights, ids = route(REFERENCE, z, bias(), 3, FACTOR)
    want = plain(z, ids)
    assert torch.allclose(weights, want, rtol=1e-12) and torch.allclose(weights.sum(-1), torch.tensor(FACTOR).double())
    grad = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got, = torch.autograd.grad(weights, z, grad)
    assert torch.allclose(got, torch.autograd.grad(want, z, grad)[0], rtol=1e-11, atol=1e-13)
    assert int((got != 0).sum()) == ids.numel()


def test_choice_is_by_score_plus_bias_and_ties_go_to_the_lower_expert():
    z = torch.zeros(1, 4, requires_grad=True)
    _, ids = route(REFERENCE, z, torch.tensor([0.0, 1.0, 1.0, 2.0]), 3, FACTOR)
    assert ids.tolist() == [[3, 1, 2]] and ids.dtype == torch.int32 and not ids.requires_grad


def test_bias_gets_no_gradient_and_steers_no_weight():
    b = bias().requires_grad_()
    weights, ids = route(REFERENCE, logits(), b, 9, FACTOR)
    weights.sum().backward()
    assert b.grad is None
    other, other_ids = route(REFERENCE, logits(), -b, 9, FACTOR)
    assert torch.allclose(other.gather(1, other_ids.argsort().long()), weights.gather(1, ids.argsort().long()))


def test_missing_share_of_the_sum_is_caught(monkeypatch):
    """The planted fault: a derivative that takes the normalising sum for a constant."""

    class Faulty(router_dsv4._Route):
        @staticmethod
        def backward(ctx, grad, _):
            z, ids = ctx.saved_tensors
            chosen = z.gather(1, ids.long())
            p = torch.nn.functional.softplus(chosen).sqrt()
            dz = ctx.factor / p.sum(-1, keepdim=True) * grad * torch.sigmoid(chosen) / (2 * p)
            return None, torch.zeros_like(z).scatter_add(1, ids.long(), dz), None

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(
            lambda z: Faulty.apply(lambda z: REFERENCE.top_k(z, bias(), 3, FACTOR), z, FACTOR)[0], logits())


def test_underflow_gives_zero_and_not_nan():
    z = torch.tensor([[1.0, -120.0, -2.0]], requires_grad=True)
    weights, _ = route(REFERENCE, z, torch.zeros(3), 3, FACTOR)
    weights.square().sum().backward()
    assert z.grad.isfinite().all() and z.grad[0, 1] == 0
