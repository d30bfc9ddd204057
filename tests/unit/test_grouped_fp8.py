"""The routed experts on plain PyTorch kernels (vLLM's grouped GEMMs are not here; tests/gpu has them)."""
import plain_fp8
import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import grouped_fp8 as module
from megatron.zero_mismatch import quant_fp8, swiglu
from megatron.zero_mismatch.grouped_fp8 import EXACT, REFERENCE, grouped_fp8
from megatron.zero_mismatch.linear_fp8 import OperandCache
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged

LIMIT = 0.8


def scene(tokens=5, hidden=4, inner=3, experts=4, slots=2, dtype=torch.float64):
    """Every expert but the last gets rows; token 1 has an empty slot, token 2 none at all."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    ids = torch.stack([torch.randperm(experts - 1, generator=generator)[:slots] for _ in range(tokens)]).int()
    ids[1, 0] = -1
    ids[2] = -1
    weights = normal(tokens, slots).sigmoid().to(torch.promote_types(dtype, torch.float32))
    tensors = normal(tokens, hidden), normal(experts, 2 * inner, hidden), normal(experts, hidden, inner)
    return *(t.to(dtype).requires_grad_() for t in tensors), weights.requires_grad_(), ids


def dense(x, w13, w2, weights, ids, limit):
    """Token by token and slot by slot, differentiated by autograd."""
    rows = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for s, e in enumerate(ids[t].tolist()):
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                acted = torch.nn.functional.silu(torch.clamp(gate, max=limit)) * torch.clamp(up, -limit, limit)
                total = total + weights[t, s] * (w2[e] @ acted)
        rows.append(total)
    return torch.stack(rows)


def run(x, w13, w2, weights, ids):
    return grouped_fp8(EXACT, x, w13, w2, weights, ids, LIMIT)


def test_gradcheck_of_input_weights_and_routing():
    *inputs, ids = scene()
    assert torch.autograd.gradcheck(lambda *inputs: run(*inputs, ids), inputs)


def test_gradients_and_value_are_those_of_the_dense_formula():
    *inputs, ids = scene(9, 6, 5)
    out, want = run(*inputs, ids), dense(*inputs, ids, LIMIT)
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    for got, right in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        assert torch.allclose(got, right, rtol=1e-11, atol=1e-12)


def test_expert_and_token_without_rows_get_zero_gradient():
    x, w13, w2, weights, ids = scene()
    run(x, w13, w2, weights, ids).sum().backward()
    assert not w13.grad[-1].any() and not w2.grad[-1].any() and not x.grad[2].any()
    assert not weights.grad[ids < 0].any() and weights.grad[ids >= 0].all()


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_blocks_of_experts_change_no_gradient(experts, monkeypatch):
    *inputs, ids = scene(9, 6, 5)
    grad = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = torch.autograd.grad(run(*inputs, ids), inputs, grad)
    most = int(torch.bincount(ids[ids >= 0]).max())
    monkeypatch.setattr(module, "BLOCK_BYTES", experts * most * 6 * 8)
    for got, want in zip(torch.autograd.grad(run(*inputs, ids), inputs, grad), whole, strict=True):
        assert torch.allclose(got, want, rtol=1e-13, atol=1e-14)


def faults():
    real = module._block_grads

    def unweighted(drows, *rest):  # rows without the routing weight: what forgetting it amounts to
        return real((drows != 0).to(drows.dtype), *rest)

    def wrong_expert(drows, gate_up, x, w13, w2, limit):
        return real(drows, gate_up, x, w13.flip(0), w2.flip(0), limit)

    def transposed(*arguments):
        dx, dw13, dw2 = real(*arguments)
        return dx, dw13.flip(1), dw2

    return {
        "routing weight": (module, "_block_grads", unweighted),
        "expert of a row": (module, "_block_grads", wrong_expert),
        "clamp": (swiglu, "product_grad", lambda x, g, _, real=swiglu.product_grad: real(x, g, 1e9)),
        "weight's transpose": (module, "_block_grads", transposed),
    }  # fmt: skip


@pytest.mark.parametrize("fault", sorted(faults()))
def test_planted_fault_is_caught(fault, monkeypatch):
    monkeypatch.setattr(*faults()[fault])
    *inputs, ids = scene()
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda *inputs: run(*inputs, ids), inputs)


def test_missing_routing_gradient_is_caught():
    """A backward that returns no gradient for the weights leaves the router untrained; gradcheck must see it."""
    *inputs, ids = scene()

    class Faulty(module._GroupedFp8):
        @staticmethod
        def backward(ctx, grad):
            got = list(module._GroupedFp8.backward(ctx, grad))
            got[4] = None
            return tuple(got)

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda *i: Faulty.apply(EXACT, *i, ids, LIMIT, None, None), inputs)


def test_value_is_the_sum_in_slot_order_of_exactly_quantised_experts():
    x, w13, w2, weights, ids = scene(4, 128, 128, 3, 2, torch.bfloat16)

    def plain(matrix):
        full = torch.empty(matrix.shape, dtype=torch.float64)
        for i, j, block in plain_fp8.blocks_of(matrix):
            codes, scale = plain_fp8.quantise(block.flatten().tolist(), quant_fp8.WEIGHT_FLOOR)
            full[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] = torch.tensor(codes).double().view(128, 128) * scale
        return full

    def rows(row):
        codes, scale = plain_fp8.quantise(row.tolist(), quant_fp8.TOKEN_FLOOR)
        return torch.tensor(codes).double() * scale

    used = {e: (plain(w13[e].detach()), plain(w2[e].detach())) for e in range(2)}
    got = grouped_fp8(REFERENCE, x, w13, w2, weights, ids, LIMIT)
    for t in range(4):
        total = torch.zeros(128)
        for s, e in enumerate(ids[t].tolist()):
            if e >= 0:
                hidden = (used[e][0] @ rows(x[t].detach())).bfloat16()
                acted = swiglu.product(hidden, LIMIT).bfloat16()
                total += (used[e][1] @ rows(acted)).bfloat16().float() * weights[t, s].detach()
        assert torch.equal(got[t], total.bfloat16()), t


def test_token_keeps_its_bits_in_any_batch():
    x, w13, w2, weights, ids = scene(6, 128, 128, 4, 2, torch.bfloat16)
    whole = grouped_fp8(REFERENCE, x, w13, w2, weights, ids, LIMIT)
    flipped = grouped_fp8(REFERENCE, x.flip(0), w13, w2, weights.flip(0), ids.flip(0), LIMIT)
    assert torch.equal(flipped.flip(0), whole)
    assert torch.equal(grouped_fp8(REFERENCE, x[3:5], w13, w2, weights[3:5], ids[3:5], LIMIT), whole[3:5])


def test_low_precision_gradients_stay_near_the_dense_formula():
    """BF16 products at FP8 activations against fp64 without any rounding.

    e4m3 puts 2 to 3 per cent of noise on `hidden`, at which the derivative is taken; a wrong factor or a missing term
    costs far more than the 1 per cent of angle allowed here.
    """
    x, w13, w2, weights, ids = scene(32, 128, 128, 4, 2, torch.bfloat16)
    with torch.no_grad():
        w13 *= 128**-0.5
        w2 *= 128**-0.5
    inputs = x, w13, w2, weights
    grad = torch.randn(32, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = torch.autograd.grad(grouped_fp8(REFERENCE, *inputs, ids, 2.0), inputs, grad)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = torch.autograd.grad(dense(*exact, ids, 2.0), exact, grad.double())
    for name, g, w in zip(("x", "w13", "w2", "weights"), got, want, strict=True):
        cosine = torch.nn.functional.cosine_similarity(g.double().flatten(), w.flatten(), dim=0)
        assert cosine > 0.99 and abs(g.double().norm() / w.norm() - 1) < 0.02, f"{name}: {cosine}"


def test_changed_masters_are_refused_in_backward():
    x, w13, w2, weights, ids = scene()
    for weight, name in ((w13, "w13"), (w2, "w2")):
        out = run(x, w13, w2, weights, ids)
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(WeightsChanged, match=f"'{name}' has writes"):
            out.sum().backward()


def test_cache_changes_no_bit():
    x, w13, w2, weights, ids = scene(4, 128, 128, 4, 2, torch.bfloat16)
    cache = OperandCache(WeightGuard(lambda: [("w13", w13), ("w2", w2)]))
    for _ in range(2):
        cached = grouped_fp8(REFERENCE, x, w13, w2, weights, ids, LIMIT, cache=cache)
        assert torch.equal(cached, grouped_fp8(REFERENCE, x, w13, w2, weights, ids, LIMIT))


def test_wrong_input_is_refused_with_a_remedy():
    x, w13, w2, weights, ids = scene()
    with pytest.raises(ValueError, match=r"expected \[T, H\]"):
        grouped_fp8(EXACT, x, w13, w2.mT, weights, ids, LIMIT)
    with pytest.raises(ValueError, match="expected int32"):
        grouped_fp8(EXACT, x, w13, w2, weights, ids.long(), LIMIT)
    with pytest.raises(ValueError, match="multiples of 128"):
        grouped_fp8(REFERENCE, x, w13, w2, weights.float(), ids, LIMIT)
