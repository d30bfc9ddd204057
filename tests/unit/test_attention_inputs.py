"""Norms, rotation and the cache trip before the attention, on plain PyTorch kernels."""
import functools

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import attention_inputs as module
from megatron.zero_mismatch.attention_inputs import REFERENCE, norms, q_and_k
from megatron.zero_mismatch.version_guard import WeightsChanged

gradcheck = functools.partial(torch.autograd.gradcheck, fast_mode=True)
EPS = 1e-3


def scene(tokens=3, rank=5, heads=2, dim=6, turned=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, shift=0.0):
        return (torch.randn(*shape, generator=generator) + shift).to(dtype).requires_grad_()

    angle = torch.randn(30, turned // 2, generator=generator)
    low_rank = normal(tokens, rank), normal(tokens, dim), normal(rank, shift=1.0), normal(dim, shift=1.0)
    fixed = torch.randint(0, 30, (tokens,), generator=generator), torch.cat([angle.cos(), angle.sin()], -1)
    return low_rank, (normal(tokens, heads, dim), normal(tokens, dim)), fixed


def plain_norm(x, weight=None):
    y = torch.stack([row / (sum(v * v for v in row) / len(row) + EPS) ** 0.5 for row in x.flatten(0, -2)])
    return y.view_as(x) * (1 if weight is None else weight)


def plain_turn(x, positions, cos_sin):
    turned, out = cos_sin.shape[1], x.clone()
    cos, sin = cos_sin[positions].double().chunk(2, -1)
    first = x.shape[-1] - turned
    for i in range(turned // 2):
        c, s = (a[:, i].view(-1, *[1] * (x.ndim - 2)) for a in (cos, sin))
        even, odd = x[..., first + 2 * i], x[..., first + 2 * i + 1]
        out[..., first + 2 * i], out[..., first + 2 * i + 1] = even * c - odd * s, even * s + odd * c
    return out


def test_gradcheck():
    low_rank, high, fixed = scene()
    assert gradcheck(lambda *t: norms(REFERENCE, *t, EPS), low_rank)
    assert gradcheck(lambda *t: q_and_k(REFERENCE, *t, *fixed, EPS), high)


def test_values_and_gradients_are_those_of_the_formulas():
    low_rank, high, fixed = scene(4)
    qr, kv, w_q, w_kv = low_rank
    cases = [
        (norms(REFERENCE, *low_rank, EPS), (plain_norm(qr, w_q), plain_norm(kv, w_kv)), low_rank),
        (q_and_k(REFERENCE, *high, *fixed, EPS),
         (plain_turn(plain_norm(high[0]), *fixed), plain_turn(high[1], *fixed)), high),
    ]  # fmt: skip
    for got, want, inputs in cases:
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(g.shape, generator=generator, dtype=torch.float64) for g in got]
        for g, w in zip(got, want, strict=True):
            assert torch.allclose(g, w, rtol=1e-12)
        for g, w in zip(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(want, inputs, grads), strict=True):
            assert torch.allclose(g, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fault", ["turned the wrong way", "norm taken for a constant"])
def test_planted_fault_is_caught(fault, monkeypatch):
    _, high, fixed = scene()
    if fault == "turned the wrong way":
        real = module.rotate
        monkeypatch.setattr(module, "rotate", lambda x, p, c, back=False: real(x, p, c))
    else:
        monkeypatch.setattr(module, "rms_grad", lambda g, x, w, eps: (
            g * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), None))
    with pytest.raises(GradcheckError):
        gradcheck(lambda *t: q_and_k(REFERENCE, *t, *fixed, EPS), high)


def test_low_precision_rows_made_the_trip_and_gradients_pass_it_straight():
    _, (q, kv), (positions, cos_sin) = scene(4, dim=512, turned=64, dtype=torch.bfloat16)
    q_out, rows = q_and_k(REFERENCE, q, kv, positions, cos_sin, 1e-6)
    assert q_out.dtype == rows.dtype == torch.bfloat16
    assert len(set(rows[0, :64].tolist())) < 64, "64 values of one FP8 group are not all different"
    grad = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    dkv, = torch.autograd.grad(rows, kv, grad)
    assert torch.equal(dkv[:, :448], grad[:, :448])


def test_changed_norm_weight_is_refused_in_backward():
    low_rank, _, _ = scene()
    out = norms(REFERENCE, *low_rank, EPS)
    with torch.no_grad():
        low_rank[3].add_(1)
    with pytest.raises(WeightsChanged, match="'kv_norm' has writes"):
        out[0].sum().backward()
