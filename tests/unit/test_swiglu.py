"""Clamped SwiGLU on the plain PyTorch kernel: the derivative, and the faults that must not pass."""
import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import swiglu

LIMIT = 1.5


def gate_up(rows=4, width=6, dtype=torch.float64, spread=2.0):
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0)) * spread
    return x.to(dtype).requires_grad_()


def formula(x, limit):
    """Written from the model card's formula, differentiated by autograd."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(torch.minimum(gate, torch.tensor(limit, dtype=x.dtype))) * torch.clip(
        up, -limit, limit
    )


def test_gradcheck_with_values_on_both_sides_of_the_clamps():
    x = gate_up()
    gate, up = x.chunk(2, -1)
    assert (gate > LIMIT).any() and (up > LIMIT).any() and (up < -LIMIT).any() and (up.abs() < LIMIT).any()
    assert torch.autograd.gradcheck(lambda x: swiglu.swiglu(swiglu.reference, x, LIMIT), x)


def test_gradient_and_value_are_those_of_the_formula():
    x = gate_up()
    grad = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, = torch.autograd.grad(swiglu.swiglu(swiglu.reference, x, LIMIT), x, grad)
    want, = torch.autograd.grad(formula(x, LIMIT), x, grad)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    assert torch.allclose(swiglu.product(x, LIMIT), formula(x, LIMIT), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropped", ["gate", "up"])
def test_dropped_clamp_is_caught(dropped, monkeypatch):
    """The planted fault: a derivative that forgets one clamp fails gradcheck."""
    kept = swiglu.product_grad

    def faulty(x, grad, limit):
        right, without = kept(x, grad, limit).chunk(2, -1), kept(x, grad, 1e9).chunk(2, -1)
        return torch.cat([without[0], right[1]] if dropped == "gate" else [right[0], without[1]], -1)

    monkeypatch.setattr(swiglu, "product_grad", faulty)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda x: swiglu.swiglu(swiglu.reference, x, LIMIT), gate_up())


def test_gradient_passes_at_the_bound_itself():
    x = torch.tensor([[LIMIT, LIMIT, LIMIT, -LIMIT]], dtype=torch.float64, requires_grad=True)
    swiglu.swiglu(swiglu.reference, x, LIMIT).sum().backward()
    assert (x.grad != 0).all()


def test_reference_rounds_silu_before_the_product_as_the_kernel_does():
    x = gate_up(64, 128, torch.bfloat16).detach()
    gate, up = (part.clamp(max=LIMIT) for part in x.chunk(2, -1))
    up = up.clamp(min=-LIMIT)
    silu = (gate.float() / (1 + torch.exp(-gate.float()))).bfloat16()
    want = (silu.float() * up.float()).bfloat16()
    same = swiglu.reference(x, LIMIT) == want
    assert same.float().mean() > 0.999, "sigmoid and 1 / (1 + exp) may differ in an ulp before the rounding"
    assert not torch.equal(swiglu.product(x, LIMIT).bfloat16(), want), "one rounding is another contract"
