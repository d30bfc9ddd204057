"""The grouped output projection on plain PyTorch kernels: DeepGEMM's einsum is on the GPU."""
import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import o_proj_fp8 as module
from megatron.zero_mismatch import quant_fp8
from megatron.zero_mismatch.linear_fp8 import OperandCache
from megatron.zero_mismatch.o_proj_fp8 import EXACT, REFERENCE, o_proj_fp8
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged


def scene(tokens=3, groups=2, per_group=2, dim=6, rank=3, turned=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(tokens, groups * per_group, dim, generator=generator).to(dtype).requires_grad_()
    wo_a = torch.randn(groups * rank, per_group * dim, generator=generator).to(dtype).requires_grad_()
    angle = torch.randn(20, turned // 2, generator=generator)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    return heads, wo_a, torch.randint(0, 20, (tokens,), generator=generator), cos_sin, groups


def plain(heads, wo_a, positions, cos_sin, groups):
    """Token by token, head by head, pair by pair."""
    turned, rank = cos_sin.shape[1], len(wo_a) // groups
    per_group = heads.shape[1] // groups
    rows = []
    for t, position in enumerate(positions.tolist()):
        for g in range(groups):
            parts = []
            for h in range(g * per_group, (g + 1) * per_group):
                first = heads.shape[2] - turned
                values = list(heads[t, h])
                for i in range(turned // 2):
                    even, odd = values[first + 2 * i], values[first + 2 * i + 1]
                    cos, sin = cos_sin[position, i].double(), cos_sin[position, turned // 2 + i].double()
                    values[first + 2 * i], values[first + 2 * i + 1] = even * cos + odd * sin, odd * cos - even * sin
                parts += values
            rows.append(wo_a[g * rank : (g + 1) * rank] @ torch.stack(parts))
    return torch.stack(rows).unflatten(0, (len(positions), groups))


def run(heads, wo_a, *rest):
    return o_proj_fp8(EXACT, heads, wo_a, *rest)


def test_gradcheck():
    heads, wo_a, *rest = scene()
    assert torch.autograd.gradcheck(lambda h, w: run(h, w, *rest), (heads, wo_a))


def test_value_and_gradient_are_those_of_the_formula():
    heads, wo_a, *rest = scene()
    got, want = run(heads, wo_a, *rest), plain(heads, wo_a, *rest)
    assert torch.allclose(got, want, rtol=1e-12)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for g, w in zip(torch.autograd.grad(got, (heads, wo_a), grad), torch.autograd.grad(want, (heads, wo_a), grad),
                    strict=True):
        assert torch.allclose(g, w, rtol=1e-11, atol=1e-13)


def test_turning_the_wrong_way_in_backward_is_caught(monkeypatch):
    heads, wo_a, *rest = scene()
    real = module.rotate
    monkeypatch.setattr(module, "rotate", lambda x, p, c, back=False: real(x, p, c, back=True))
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda h, w: run(h, w, *rest), (heads, wo_a))


def test_quantised_value_is_near_and_rows_are_independent():
    heads, wo_a, positions, cos_sin, groups = scene(5, 2, 2, 128, 128, 64, torch.bfloat16)
    whole = o_proj_fp8(REFERENCE, heads, wo_a, positions, cos_sin, groups)
    exact = run(heads.double(), wo_a.double(), positions, cos_sin, groups)
    assert whole.dtype == torch.bfloat16 and (whole - exact).norm() / exact.norm() < quant_fp8.TOLERANCE
    assert torch.equal(o_proj_fp8(REFERENCE, heads[3:], wo_a, positions[3:], cos_sin, groups), whole[3:])
    cache = OperandCache(WeightGuard(lambda: [("wo_a", wo_a)]))
    assert torch.equal(o_proj_fp8(REFERENCE, heads, wo_a, positions, cos_sin, groups, cache=cache), whole)


def test_changed_master_is_refused_in_backward():
    heads, wo_a, *rest = scene()
    out = run(heads, wo_a, *rest)
    with torch.no_grad():
        wo_a.add_(1)
    with pytest.raises(WeightsChanged, match="'wo_a' has writes"):
        out.sum().backward()


def test_wrong_shapes_are_refused():
    heads, wo_a, positions, cos_sin, _ = scene()
    with pytest.raises(ValueError, match=r"expected \[T, G \* M, D\]"):
        run(heads, wo_a, positions, cos_sin, 3)
