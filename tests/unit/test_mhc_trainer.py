"""mHC's hand-written derivatives, on plain PyTorch kernels (TileLang and DeepGEMM are not here; tests/gpu has them)."""
import functools

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import mhc
from megatron.zero_mismatch.mhc import Settings
from megatron.zero_mismatch.mhc_kernels import REFERENCE
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged

# Fast: random projections of the Jacobian. Every entry is compared with the independent model's below.
gradcheck = functools.partial(torch.autograd.gradcheck, fast_mode=True)
STREAMS, HIDDEN = 3, 5
SETTINGS = Settings(rms_eps=1e-3, hc_eps=1e-2, norm_eps=1e-3, iterations=4)  # epsilons large enough to matter
MIX = STREAMS * (STREAMS + 2)


def operands(tokens=3, dtype=torch.float64, streams=STREAMS, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, shift=0.0, spread=1.0, dtype=dtype):
        return (torch.randn(*shape, generator=generator) * spread + shift).to(dtype).requires_grad_()

    wide, mix = torch.promote_types(dtype, torch.float32), streams * (streams + 2)
    return {
        "residual": normal(tokens, streams, hidden),
        "fn": normal(mix, streams * hidden, spread=0.5, dtype=wide),
        "scale": normal(3, shift=1.0, spread=0.1, dtype=wide),
        "base": normal(mix, spread=0.5, dtype=wide),
        "norm": normal(hidden, shift=1.0, spread=0.1),
        "x": normal(tokens, hidden),
        "post": normal(tokens, streams, shift=1.0, dtype=wide),
        "comb": normal(tokens, streams, streams, dtype=wide),
        "head_fn": normal(streams, streams * hidden, spread=0.5, dtype=wide),
        "head_scale": normal(1, shift=1.0, dtype=wide),
        "head_base": normal(streams, dtype=wide),
    }


def pick(data, *names):
    return tuple(data[name] for name in names)


def pre(*inputs):
    return mhc.pre(REFERENCE.pre, *inputs, SETTINGS)


def pre_broadcast(*inputs):
    return mhc.pre_broadcast(REFERENCE.pre_broadcast, *inputs, SETTINGS)


def post(*inputs):
    return mhc.post(REFERENCE.post, *inputs)


def head(*inputs):
    return mhc.head(REFERENCE.head, *inputs, SETTINGS)


OPERATORS = {
    "pre": (pre, ("residual", "fn", "scale", "base", "norm")),
    "pre_broadcast": (pre_broadcast, ("x", "fn", "scale", "base", "norm")),
    "post": (post, ("x", "residual", "post", "comb")),
    "head": (head, ("residual", "head_fn", "head_scale", "head_base")),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck_of_every_input(name):
    operator, names = OPERATORS[name]
    assert gradcheck(operator, pick(operands(), *names))


# ---- an independent model: one token at a time, sums written out, differentiated by autograd


def plain_pre(residual, fn, scale, base, norm):
    outputs = []
    for streams in residual:
        flat = streams.flatten()
        rms = (sum(v * v for v in flat) / len(flat) + SETTINGS.rms_eps) ** -0.5
        m = [sum(f * v for f, v in zip(row, flat, strict=True)) * rms for row in fn]
        s = len(streams)
        collapse = [1 / (1 + torch.exp(-(m[j] * scale[0] + base[j]))) + SETTINGS.hc_eps for j in range(s)]
        out = [SETTINGS.post_scale / (1 + torch.exp(-(m[s + j] * scale[1] + base[s + j]))) for j in range(s)]
        comb = [[torch.exp(m[2 * s + i * s + o] * scale[2] + base[2 * s + i * s + o]) for o in range(s)]
                for i in range(s)]
        comb = [[v / sum(row) + SETTINGS.hc_eps for v in row] for row in comb]
        for iteration in range(SETTINGS.iterations):
            if iteration:
                comb = [[v / (sum(row) + SETTINGS.hc_eps) for v in row] for row in comb]
            columns = [sum(comb[i][o] for i in range(s)) + SETTINGS.hc_eps for o in range(s)]
            comb = [[comb[i][o] / columns[o] for o in range(s)] for i in range(s)]
        mixed = sum(a * stream for a, stream in zip(collapse, streams, strict=True))
        layer_input = mixed * (sum(v * v for v in mixed) / len(mixed) + SETTINGS.norm_eps) ** -0.5 * norm
        outputs.append((layer_input, torch.stack(out), torch.stack([torch.stack(row) for row in comb])))
    return tuple(torch.stack(part) for part in zip(*outputs, strict=True))


def plain_post(x, residual, post, comb):
    return torch.stack([
        torch.stack([post[t, o] * x[t] + sum(comb[t, i, o] * residual[t, i] for i in range(STREAMS))
                     for o in range(STREAMS)]) for t in range(len(x))
    ])  # fmt: skip


def plain_head(residual, fn, scale, base):
    rows = []
    for streams in residual:
        flat = streams.flatten()
        rms = (flat.square().mean() + SETTINGS.rms_eps) ** -0.5
        gates = [1 / (1 + torch.exp(-((f @ flat) * rms * scale[0] + b))) for f, b in zip(fn, base, strict=True)]
        rows.append(sum((g + SETTINGS.hc_eps) * stream for g, stream in zip(gates, streams, strict=True)))
    return torch.stack(rows)


def plain_pre_broadcast(x, *weights):
    residual = torch.stack([x] * STREAMS, 1)
    return residual, *plain_pre(residual, *weights)


PLAIN = {"pre": plain_pre, "pre_broadcast": plain_pre_broadcast, "post": plain_post, "head": plain_head}


@pytest.mark.parametrize("name", OPERATORS)
def test_value_and_gradient_are_those_of_the_independent_model(name):
    operator, names = OPERATORS[name]
    inputs = pick(operands(4), *names)
    got, want = operator(*inputs), PLAIN[name](*inputs)
    got, want = (out if isinstance(out, tuple) else (out,) for out in (got, want))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in want]
    for g, w in zip(got, want, strict=True):
        assert torch.allclose(g, w, rtol=1e-11, atol=1e-12)
    got_grads, want_grads = torch.autograd.grad(got, inputs, grads), torch.autograd.grad(want, inputs, grads)
    for label, g, w in zip(names, got_grads, want_grads, strict=True):
        assert torch.allclose(g, w, rtol=1e-9, atol=1e-11), label


def test_twenty_sinkhorn_iterations_of_four_streams_pass_gradcheck():
    """DeepSeek-V4's own numbers; the epsilons are too small for finite differences to notice."""
    settings = Settings(1e-6, 1e-6, 1e-6, 20)
    data = operands(2, streams=4)
    inputs = pick(data, "residual", "fn", "scale", "base", "norm")
    assert gradcheck(lambda *inputs: mhc.pre(REFERENCE.pre, *inputs, settings), inputs)


def test_mixing_matrix_is_nearly_doubly_stochastic():
    data = operands(6, streams=4)
    *_, comb = mhc.pre(REFERENCE.pre, *pick(data, "residual", "fn", "scale", "base", "norm"),
                       Settings(1e-6, 1e-6, 1e-6, 20))
    assert torch.allclose(comb.sum(-1), torch.ones(6, 4, dtype=torch.float64), atol=2e-2)
    assert torch.allclose(comb.sum(-2), torch.ones(6, 4, dtype=torch.float64), atol=1e-5)


# ---- planted faults


class TransposedPost(mhc._Post):
    @staticmethod
    def backward(ctx, grad):
        _, dx, dresidual, dpost, dcomb = mhc._Post.backward(ctx, grad)
        comb = ctx.saved_tensors[3]
        return None, dx, dresidual + (comb.mT - comb) @ grad, dpost, dcomb  # C.T where C belongs


class TransposedCombGradient(mhc._Post):
    @staticmethod
    def backward(ctx, grad):
        *others, dcomb = mhc._Post.backward(ctx, grad)
        return *others, dcomb.mT


@pytest.mark.parametrize("fault", [TransposedPost, TransposedCombGradient])
def test_transposed_mixing_matrix_is_caught(fault):
    inputs = pick(operands(), "x", "residual", "post", "comb")
    with pytest.raises(GradcheckError):
        gradcheck(lambda *inputs: fault.apply(REFERENCE.post, *inputs), inputs)


FAULTS = {
    "sinkhorn stops early": ("_sinkhorn_grad", lambda soft, steps, grad, real=mhc._sinkhorn_grad:
                             real(soft, steps[:-2], grad)),
    "sinkhorn without its softmax": ("_sinkhorn_grad", lambda soft, steps, grad, real=mhc._sinkhorn_grad:
                                     real(soft, steps, grad) / soft),
    "sums transposed": ("_sinkhorn_grad", lambda soft, steps, grad, real=mhc._sinkhorn_grad:
                        real(soft.mT, [(-3 - dim, total.mT, quotient.mT) for dim, total, quotient in steps], grad)),
    "rms taken for a constant": ("_mixes_grad", lambda x, fn, m, r, grad: ((grad * r) @ fn, (grad * r).T @ x)),
    "norm taken for a constant": ("rms_grad", lambda grad, u, w, eps, real=mhc.rms_grad:
                                  (grad * w * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps),
                                   real(grad, u, w, eps)[1])),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault, monkeypatch):
    monkeypatch.setattr(mhc, *FAULTS[fault])
    with pytest.raises(GradcheckError):
        gradcheck(pre, pick(operands(), "residual", "fn", "scale", "base", "norm"))


# ---- what else must hold


@pytest.mark.parametrize("name", OPERATORS)
def test_blocks_of_tokens_do_not_change_the_gradient(name, monkeypatch):
    operator, names = OPERATORS[name]

    def grads():
        inputs = pick(operands(7), *names)
        out = operator(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(sum((o * o).sum() for o in out), inputs)

    whole = grads()
    monkeypatch.setattr(mhc, "BLOCK", 3)
    for a, b in zip(whole, grads(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_low_precision_gradients_have_the_inputs_dtypes():
    data = operands(4, torch.bfloat16)
    for operator, names in OPERATORS.values():
        inputs = pick(data, *names)
        out = operator(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        for tensor, grad in zip(inputs, torch.autograd.grad(sum(o.float().sum() for o in out), inputs), strict=True):
            assert grad.dtype == tensor.dtype and grad.isfinite().all()


@pytest.mark.parametrize("name,weight,label", [
    ("pre", "fn", "fn"), ("pre", "norm", "norm"), ("head", "head_base", "base"), ("pre_broadcast", "scale", "scale"),
])  # fmt: skip
def test_changed_weight_is_refused_in_backward(name, weight, label):
    operator, names = OPERATORS[name]
    data = operands()
    out = operator(*pick(data, *names))
    with torch.no_grad():
        data[weight].add_(1)
    with pytest.raises(WeightsChanged, match=f"'{label}' has writes"):
        (out if isinstance(out, torch.Tensor) else out[-1]).sum().backward()


def test_advanced_version_is_refused_in_backward():
    data = operands()
    guard = WeightGuard(lambda: [("fn", data["head_fn"])])
    out = mhc.head(REFERENCE.head, *pick(data, "residual", "head_fn", "head_scale", "head_base"), SETTINGS, guard)
    guard.advance()
    with pytest.raises(WeightsChanged, match="version 1, expected version 0"):
        out.sum().backward()
