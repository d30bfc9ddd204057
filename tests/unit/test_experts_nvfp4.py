"""NVFP4 experts on a CPU: plain PyTorch in Humming's place."""
import pytest
import torch
from megatron.zero_mismatch import experts, quant_nvfp4
from megatron.zero_mismatch.experts_nvfp4 import EXACT, REFERENCE, experts_nvfp4
from megatron.zero_mismatch.version_guard import WeightsChanged

IDS = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 2], [2, 0]], dtype=torch.int32)  # expert 3 has no rows


def operands(dtype, hidden=16, width=32):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return [t.requires_grad_() for t in (
        normal(5, hidden).to(dtype), (normal(4, width, hidden) / 4).to(dtype), (normal(4, hidden, width) / 4).to(dtype),
        normal(5, 2).sigmoid().to(torch.promote_types(dtype, torch.float32)))]


def test_gradient_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(lambda *parts: experts_nvfp4(EXACT, *parts, IDS), operands(torch.float64, 3, 2))


def test_values_and_gradients_are_those_of_the_dequantised_weights():
    x, w13, w2, weights = parts = operands(torch.bfloat16)
    out = experts_nvfp4(REFERENCE, *parts, IDS)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad)
    values = [quant_nvfp4.dequantise(*quant_nvfp4.quantise(w.detach()), torch.float64) for w in (w13, w2)]
    exact = [t.detach().double().requires_grad_() for t in (x, *values, weights)]
    want = experts.reference(*exact, IDS)
    want.backward(grad.double())
    for name, found, wanted in (("out", out, want), *(
            (name, p.grad, e.grad) for name, p, e in zip(("x", "w13", "w2", "weights"), parts, exact, strict=True))):
        assert (found.double() - wanted).norm() < 2**-6 * wanted.norm(), name
    assert (values[0] - w13.double()).norm() > 0.05 * w13.double().norm(), "far from the masters"


def test_an_expert_without_rows_learns_nothing():
    parts = operands(torch.bfloat16)
    experts_nvfp4(REFERENCE, *parts, IDS).sum().backward()
    assert not parts[1].grad[3].any() and not parts[2].grad[3].any() and parts[1].grad[:3].flatten(1).any(1).all()


def test_what_the_engine_holds_reads_back_as_the_values_that_are_multiplied():
    master = operands(torch.bfloat16)[1].detach()
    operand = REFERENCE.operand(master)
    assert torch.equal(REFERENCE.read(operand.resident, *master.shape), operand.values(torch.bfloat16))


@pytest.mark.parametrize("which", [1, 2])
def test_a_backward_behind_a_changed_master_is_refused(which):
    parts = operands(torch.bfloat16)
    out = experts_nvfp4(REFERENCE, *parts, IDS)
    with torch.no_grad():
        parts[which] += 1
    with pytest.raises(WeightsChanged, match=("", "w13", "w2")[which]):
        out.sum().backward()


def test_masters_of_another_shape_or_type_are_refused():
    x, w13, w2, weights = operands(torch.bfloat16)
    with pytest.raises(ValueError, match="expected .T, H., .E, I, H."):
        experts_nvfp4(REFERENCE, x, w2, w2, weights, IDS)
    with pytest.raises(ValueError, match="expected bfloat16"):
        experts_nvfp4(REFERENCE, x, w13.float(), w2, weights, IDS)
