"""The block-FP8 linear layer on plain PyTorch kernels: vLLM's compiled ones are not here, tests/gpu has them."""
import plain_fp8
import pytest
import torch

from megatron.zero_mismatch import quant_fp8
from megatron.zero_mismatch.linear_fp8 import EXACT, REFERENCE, OperandCache, linear_fp8
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged


def operands(m=5, n=128, k=256, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator) / 16
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()


def test_gradient_is_that_of_the_unquantised_layer():
    x, w = operands(3, 4, 6, torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: linear_fp8(EXACT, x, w), (x, w))


def test_value_is_the_product_of_exactly_quantised_operands():
    x, w = operands(2, 128, 128)
    codes, scale = plain_fp8.quantise(w.detach().flatten().tolist(), quant_fp8.WEIGHT_FLOOR)
    weight = (torch.tensor(codes, dtype=torch.float64) * scale).view(128, 128)
    rows = [plain_fp8.quantise(row.tolist(), quant_fp8.TOKEN_FLOOR) for row in x.detach()]
    rows = torch.tensor([[c * s for c in codes] for codes, s in rows], dtype=torch.float64)
    assert torch.equal(linear_fp8(REFERENCE, x, w), (rows @ weight.T).bfloat16())


def test_backward_passes_the_quantisers_straight_through():
    x, w = operands()
    grad = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    dx, dw = torch.autograd.grad(linear_fp8(REFERENCE, x, w), (x, w), grad)
    assert torch.equal(dx, grad @ w.detach()) and torch.equal(dw, grad.T @ x.detach())
    assert dx.dtype == dw.dtype == torch.bfloat16


def test_leading_dimensions_are_kept_and_rows_are_independent():
    x, w = operands(6)
    whole = linear_fp8(REFERENCE, x, w)
    assert torch.equal(linear_fp8(REFERENCE, x.view(2, 3, -1), w), whole.view(2, 3, -1))
    assert torch.equal(linear_fp8(REFERENCE, x[4:], w), whole[4:])


def test_merged_projections_quantise_as_their_parts():
    x, w = operands(4, 384)
    parts = [linear_fp8(REFERENCE, x, part) for part in w.detach().split([128, 256])]
    assert torch.equal(torch.cat(parts, -1), linear_fp8(REFERENCE, x, w))


def test_changed_master_is_refused_in_backward():
    x, w = operands()
    out = linear_fp8(REFERENCE, x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(WeightsChanged, match="'master' has writes"):
        out.sum().backward()
    assert w.grad is None


def test_advanced_version_is_refused_in_backward():
    """A distributed optimizer writes through .data: only the guard's version tells."""
    x, w = operands()
    guard = WeightGuard(lambda: [("w", w)])
    out = linear_fp8(REFERENCE, x, w, guard=guard)
    w.data.mul_(2)
    guard.advance()
    with pytest.raises(WeightsChanged, match="found weights of version 1, expected version 0"):
        out.sum().backward()


def test_rebound_master_is_refused_in_backward():
    x, w = operands()
    out = linear_fp8(REFERENCE, x, w)
    w.data = w.data.clone()
    with pytest.raises(WeightsChanged, match="address"):
        out.sum().backward()


def counting():
    made = []
    return made, REFERENCE._replace(cast=lambda master: made.append(1) or REFERENCE.cast(master))


def test_cache_quantises_once_a_version_and_changes_no_bit():
    x, w = operands()
    guard = WeightGuard(lambda: [("w", w)])
    cache, (made, kernels) = OperandCache(guard), counting()
    first = linear_fp8(kernels, x, w, cache=cache, guard=guard)
    assert torch.equal(linear_fp8(kernels, x, w, cache=cache), first) and len(made) == 1
    w.data.mul_(-1)  # not seen by the write counter
    guard.advance()
    assert torch.equal(linear_fp8(kernels, x, w, cache=cache), linear_fp8(REFERENCE, x, w)) and len(made) == 2
    cache.clear()
    linear_fp8(kernels, x, w, cache=cache)
    assert len(made) == 3


def test_cache_sees_a_write_that_came_without_a_version():
    x, w = operands()
    cache, (made, kernels) = OperandCache(WeightGuard(lambda: [("w", w)])), counting()
    linear_fp8(kernels, x, w, cache=cache)
    with torch.no_grad():
        w.mul_(-1)
    assert torch.equal(linear_fp8(kernels, x, w, cache=cache), linear_fp8(REFERENCE, x, w)) and len(made) == 2


def test_cache_keeps_two_masters_apart():
    x, w = operands()
    other = w.detach() * 3
    cache = OperandCache(WeightGuard(lambda: [("w", w)]))
    for master in (w, other, w, other):
        assert torch.equal(linear_fp8(REFERENCE, x, master, cache=cache), linear_fp8(REFERENCE, x, master))


@pytest.mark.parametrize("x,w,match", [
    (torch.zeros(2, 128), torch.zeros(128, 128), "expected bfloat16"),
    (torch.zeros(2, 64).bfloat16(), torch.zeros(128, 128).bfloat16(), r"expected \[..., K\] and \[N, K\]"),
    (torch.zeros(2, 64).bfloat16(), torch.zeros(128, 64).bfloat16(), "multiples of 128"),
])  # fmt: skip
def test_wrong_input_is_refused_with_a_remedy(x, w, match):
    with pytest.raises(ValueError, match=match):
        linear_fp8(REFERENCE, x, w)
