"""FP8 projections with static scales on a CPU: plain PyTorch in Cutlass' place."""
import pytest
import torch
from megatron.zero_mismatch import linear_fp8_static
from megatron.zero_mismatch.linear_fp8 import OperandCache
from megatron.zero_mismatch.linear_fp8_static import EXACT, REFERENCE, cast, dequantise
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged

SCALE = torch.tensor([5.0 / 448])


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def call(kernels, x, master, scale=SCALE, **settings):
    return linear_fp8_static.linear_fp8_static(kernels, x, master, scale, **settings)


@pytest.mark.parametrize("squared", [False, True])
def test_gradient_is_that_of_finite_differences(squared):
    x, master = (normal(*shape, dtype=torch.float64).requires_grad_() for shape in ((5, 6), (3, 6)))
    assert torch.autograd.gradcheck(lambda *a: call(EXACT, *a, squared=squared), (x, master))


@pytest.mark.parametrize("squared", [False, True])
def test_quantised_values_and_gradients_are_those_of_the_dequantised_operands(squared):
    x, master, grad = normal(7, 64).requires_grad_(), normal(32, 64).requires_grad_(), normal(7, 32, seed=1)
    out = call(REFERENCE, x, master, squared=squared)
    out.backward(grad)
    codes, scale = cast(master.detach())
    weight = codes.double() * scale.double()
    held = x.detach().float().clamp(min=0).square().bfloat16() if squared else x.detach()
    rows = (held.float() / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).double() * SCALE.double()
    to_rows = grad.double() @ weight
    want = {"out": rows @ weight.T, "master": grad.double().T @ rows,
            "x": to_rows * (2 * x.detach().double().clamp(min=0) if squared else 1)}
    for name, found in {"out": out.detach(), "master": master.grad, "x": x.grad}.items():
        error = (found.double() - want[name]).norm() / want[name].norm()
        assert error < 2**-7, f"{name}: BF16 rounds by up to 2**-8, found {error:.5f}"
    assert (dequantise(codes, scale, torch.float32) - master).norm() > 0.01 * master.norm(), "not the masters"


def test_one_scale_holds_the_whole_matrix_and_zeros_have_one_too():
    codes, scale = cast(normal(32, 64))
    assert codes.float().abs().max() == 448 and scale.ndim == 0
    assert not cast(torch.zeros(16, 16).bfloat16()).codes.float().any()


def test_cached_operand_is_made_once_a_version():
    master = normal(16, 16).requires_grad_()
    guard, made = WeightGuard(lambda: [("master", master)]), []
    cache = OperandCache(guard)
    kernels = REFERENCE._replace(operand=lambda m: made.append(1) or cast(m))
    for _ in range(2):
        call(kernels, normal(3, 16), master, cache=cache, guard=guard)
    with torch.no_grad():
        master += 1
    guard.advance()
    call(kernels, normal(3, 16), master, cache=cache, guard=guard)
    assert len(made) == 2


def test_a_backward_behind_a_changed_master_is_refused():
    master = normal(16, 16).requires_grad_()
    out = call(REFERENCE, normal(3, 16), master)
    with torch.no_grad():
        master += 1
    with pytest.raises(WeightsChanged, match="master"):
        out.sum().backward()


@pytest.mark.parametrize("x, master, scale, said", [
    (normal(3, 32), normal(16, 16), SCALE, "expected .M, K., .N, K."),
    (normal(3, 16), normal(24, 16), SCALE, "multiples of 16"),
    (normal(3, 16).float(), normal(16, 16), SCALE, "expected bfloat16"),
    (normal(3, 16), normal(16, 16), torch.ones(2), "one number"),
])
def test_what_the_engine_would_not_multiply_is_refused(x, master, scale, said):
    with pytest.raises(ValueError, match=said):
        call(REFERENCE, x, master, scale)
