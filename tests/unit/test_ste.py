"""Values of a kernel with the gradient of a PyTorch graph, on the CPU with reference kernels in the kernel's place."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.zero_mismatch.ste import replayed, straight_through, visible_with_grad

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
QUIET_NAN, NEGATIVE_NAN_WITH_PAYLOAD = 0x7FC00000, 0xFFC12345 - (1 << 32)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    integer = INTEGERS[got.dtype]
    differs = got.detach().contiguous().view(integer) != want.contiguous().view(integer)
    if differs.any():
        first = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} words differ, first at {first}: "
            f"{got[first].item()!r} != {want[first].item()!r}"
        )


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).view(torch.float32)


SPECIAL = torch.cat([
    torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 1e-45, -1e-45, 1.0]),
    words(QUIET_NAN, NEGATIVE_NAN_WITH_PAYLOAD),
])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64), st.integers(0, 2**31 - 1))
@settings(deadline=None, max_examples=200)
def test_every_fp32_word_of_the_kernel_survives(patterns, seed):
    visible = words(*patterns)
    graph = torch.randn(len(patterns), generator=torch.Generator().manual_seed(seed)).requires_grad_()
    assert_same_bits(visible_with_grad(visible, graph), visible.clone())


def test_special_values_survive_beside_any_graph_value():
    for value in SPECIAL.tolist():
        graph = torch.full_like(SPECIAL, value).requires_grad_()
        assert_same_bits(visible_with_grad(SPECIAL, graph), SPECIAL.clone())


def _arithmetic(visible, graph):
    return visible + (graph - graph.detach())


def test_counter_arithmetic_form_loses_the_sign_of_zero():
    """Why the Function exists (1): measured, -0.0 becomes +0.0."""
    visible, graph = torch.tensor([-0.0]), torch.tensor([3.0], requires_grad=True)
    assert _arithmetic(visible, graph).detach().view(torch.int32).item() == 0
    assert visible_with_grad(visible, graph).detach().view(torch.int32).item() == -(2**31)


def test_counter_arithmetic_form_is_nan_where_the_graph_is_infinite():
    """Why the Function exists (2): measured, inf - inf is NaN, whatever the kernel gave."""
    visible, graph = torch.tensor([7.0]), torch.tensor([float("inf")], requires_grad=True)
    assert _arithmetic(visible, graph).isnan().all()
    assert visible_with_grad(visible, graph).item() == 7.0


def test_gradient_is_routed_to_the_graph_and_to_nothing_else():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    visible = torch.full((5,), 1e6, dtype=torch.float64)
    incoming = torch.randn(5, dtype=torch.float64)
    (visible_with_grad(visible, x.square()) * incoming).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * incoming)
    assert visible.grad is None and not visible.requires_grad


def test_gradient_arrives_in_the_dtype_of_the_graph():
    graph = torch.randn(4, dtype=torch.float32, requires_grad=True)
    out = visible_with_grad(torch.randn(4, dtype=torch.bfloat16), graph)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert graph.grad.dtype == torch.float32 and torch.equal(graph.grad, torch.ones(4))


class _Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("make", [
    lambda x: visible_with_grad(x.detach().exp(), x.exp()),
    lambda x: straight_through(x, torch.round),
    lambda x: replayed(torch.exp, torch.exp, x),
])
def test_undefined_incoming_gradient_stays_none(make):
    x = torch.randn(3, requires_grad=True)
    assert torch.autograd.grad(_Undefined.apply(make(x)).sum(), x, allow_unused=True) == (None,)


def test_no_gradient_is_recorded_when_none_is_needed():
    assert not visible_with_grad(torch.ones(2), torch.zeros(2)).requires_grad
    with torch.no_grad():
        assert not visible_with_grad(torch.ones(2), torch.zeros(2, requires_grad=True)).requires_grad


def _mixing(x, w):
    return torch.softmax(x @ w, -1) * x.sigmoid()


@pytest.mark.parametrize("wrap", [
    lambda x, w: visible_with_grad(_mixing(x, w).detach(), _mixing(x, w)),
    lambda x, w: replayed(_mixing, _mixing, x, w),
])
def test_gradcheck_with_the_reference_as_kernel(wrap):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(wrap, (x, w))


def test_second_derivatives_are_those_of_the_graph():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: visible_with_grad((x**3).detach(), x**3), (x,))
    first = torch.autograd.grad(straight_through(x**3, torch.round).sum(), x, create_graph=True)[0]
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())


def test_replayed_refuses_a_second_derivative():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(replayed(torch.exp, torch.exp, x).sum(), x, create_graph=True)


def test_straight_through_gives_the_rules_values_and_an_identity_gradient_also_where_it_saturates():
    master = torch.tensor([-1000.0, -0.004, 0.3, 447.0, 5000.0], requires_grad=True)

    def e4m3(w):
        return w.clamp(-448, 448).to(torch.float8_e4m3fn).to(w.dtype)

    out = straight_through(master, e4m3)
    assert_same_bits(out, e4m3(master.detach()))
    out.backward(torch.arange(5.0))
    assert torch.equal(master.grad, torch.arange(5.0))


def test_straight_through_refuses_a_quantiser_that_writes_to_the_masters():
    with pytest.raises(ValueError, match="wrote to the master"):
        straight_through(torch.randn(3, requires_grad=True), lambda w: w.mul_(2).clone())


def test_replayed_gives_none_to_inputs_without_gradient_and_to_unused_ones():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    scale = torch.ones(3)
    replayed(lambda x, w, s: x * s, lambda x, w, s: x * s, x, w, scale).sum().backward()
    assert torch.equal(x.grad, torch.ones(3)) and w.grad is None and scale.grad is None


def test_replayed_sees_a_write_between_forward_and_backward():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = replayed(torch.mul, torch.mul, x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_replayed_refuses_a_reference_of_another_shape():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="same tensor"):
        replayed(torch.exp, lambda x: x.exp().sum(), x).sum().backward()


def test_result_cannot_be_changed_in_place():
    out = visible_with_grad(torch.ones(3), torch.zeros(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="inplace|in-place"):
        out.add_(1)


@pytest.mark.parametrize("visible,graph,word", [
    (torch.ones(3), torch.ones(4), "shape"),
    (torch.ones(3, dtype=torch.int32), torch.ones(3), "floating point"),
    (torch.ones(3, requires_grad=True), torch.ones(3), "detach it"),
])
def test_what_cannot_be_meant_is_refused(visible, graph, word):
    with pytest.raises(ValueError, match=word):
        visible_with_grad(visible, graph)
