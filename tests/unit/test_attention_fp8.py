"""Attention over an FP8 cache on a CPU: plain PyTorch in the kernels' place."""
import pytest
import torch
from megatron.zero_mismatch import attention, kernels
from megatron.zero_mismatch.attention_fp8 import EXACT, REFERENCE, Scales, attention_fp8
from megatron.zero_mismatch.packing import Packed

PACKED = Packed((3, 1, 5), torch.device("cpu"))


def operands(dtype, seed=0, dim=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(9, heads, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for heads in (4, 2, 2)]


def scales(*values):
    return Scales(*(torch.tensor([v]) for v in values))


def test_gradient_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(
        lambda *parts: attention_fp8(EXACT, *parts, PACKED, 0.5, scales(1.0, 0.25, 2.0)), operands(torch.float64))


def test_values_and_gradients_are_those_of_what_the_cache_holds():
    parts, scale = operands(torch.bfloat16, dim=16), scales(1.0, 4.7 / 448, 4.1 / 448)
    out = attention_fp8(REFERENCE, *parts, PACKED, 0.25, scale)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad)
    read = [((p.detach().float() / s).clamp(-448, 448).to(torch.float8_e4m3fn).double() * s.double()).requires_grad_()
            for p, s in zip(parts, scale, strict=True)]
    want = attention.reference(*read, PACKED, 0.25)
    want.backward(grad.double())
    pairs = {"out": (out.detach(), want.detach())} | {
        name: (p.grad, r.grad) for name, p, r in zip("qkv", parts, read, strict=True)}
    for name, (found, wanted) in pairs.items():
        assert (found.double() - wanted).norm() < 2**-7 * wanted.norm(), name
    assert (read[1] - parts[1].double()).abs().max() > 0.01, "the cache rounds"


def test_pages_hold_every_token_once_and_in_order():
    pages = attention.Pages.of(Packed((5, 1, 4), torch.device("cpu")), 4)
    assert pages.count == 4
    assert pages.rows.tolist() == [0, 1, 2, 3, 4, 8, 12, 13, 14, 15]
    assert pages.table[:, 0].tolist() == [0, 2, 3] and pages.table[0].tolist() == [0, 1]


def test_what_every_layer_asks_of_a_batch_is_made_once():
    batch, same = (Packed((5, 1, 4), torch.device("cpu")) for _ in range(2))
    assert attention.Pages.of(batch, 4) is attention.Pages.of(same, 4) is not attention.Pages.of(batch, 8)
    assert kernels._mamba2_pieces(batch) is kernels._mamba2_pieces(same)
    assert kernels._mamba2_pieces(batch).table[:3, 0, 3].tolist() == [5, 1, 4]
    assert kernels._mamba2_pieces(Packed((5, 4, 1), torch.device("cpu"))).table[:3, 0, 3].tolist() == [5, 4, 1]


def test_scales_of_several_numbers_are_refused():
    with pytest.raises(ValueError, match="one number each"):
        attention_fp8(REFERENCE, *operands(torch.bfloat16), PACKED, 0.5,
                      Scales(torch.ones(1), torch.ones(2), torch.ones(1)))
