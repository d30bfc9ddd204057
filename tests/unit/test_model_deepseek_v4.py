"""The DeepSeek-V4 trainer model on plain PyTorch kernels: gradients against an independent model, and the weights' way.

No compiled kernel runs here: `exact` tables check the derivative of the whole composition, `reference` tables (with the
deployment's quantisers) the export and the independence of packing. prove does the same on a GPU with vLLM's kernels.
"""
import collections

import pytest
import torch
from small_deepseek_v4 import CONFIG, FP8_CONFIG, build, quantised
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zero_mismatch.linear_fp8 import OperandCache
from megatron.zero_mismatch.models.deepseek_v4 import Shape
from megatron.zero_mismatch.packing import Packed, pack
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged
from prove.gradients_deepseek_v4 import _row, noted
from prove.reference_deepseek_v4 import Reference

LENGTHS = (133, 9, 1, 40)


def batch(config=CONFIG, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return pack([torch.randint(0, config["vocab_size"], (n,), generator=generator) for n in lengths])


def by_reference(model, config, tokens, packed, experts, rows, dtype=torch.float64):
    compressed = [i for i, ratio in enumerate(model.shape.ratios) if ratio == 4]
    reference = Reference(config, dict(model.named_parameters()), model.tables, dtype)
    sequences = [tokens[a:b] for a, b in packed.bounds]
    return reference.logprobs(sequences, experts, dict(zip(compressed, rows, strict=True))), reference


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def compared(request):
    model = build(recompute=request.param)
    tokens, packed = batch()
    with noted(model) as (experts, rows, _):
        got = model(tokens, packed)
    want, reference = by_reference(model, CONFIG, tokens, packed, experts, rows)
    return model, packed, got, want, reference


def test_logprobs_are_those_of_the_independent_model(compared):
    _, packed, got, want, _ = compared
    assert torch.allclose(got[packed.positions > 0], want, rtol=1e-9, atol=1e-10)
    assert not got[packed.positions == 0].any()


def test_every_gradient_is_that_of_the_independent_model(compared):
    model, packed, got, want, reference = compared
    signs = torch.randn(len(want), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (got[packed.positions > 0] * signs).sum().backward()
    (want * signs).sum().backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            exact = reference.w[name].grad
            assert exact.norm() > 0, f"{name} plays no part: the comparison shows nothing"
            assert (p.grad - exact).norm() < 1e-8 * exact.norm(), f"{name}: {(p.grad - exact).norm() / exact.norm()}"
        else:
            assert p.grad is None
            assert "indexer" in name or name.endswith(("tid2eid", "e_score_correction_bias"))


def test_planted_fault_in_one_operator_shows_in_the_comparison(compared, monkeypatch):
    """The whole comparison, with the mixing matrix transposed in the backward of mHC's post."""
    from megatron.zero_mismatch import mhc

    model, packed, got, want, reference = compared
    real = mhc._Post.backward

    def transposed(ctx, grad):
        found = list(real(ctx, grad))
        found[4] = found[4].mT
        return tuple(found)

    monkeypatch.setattr(mhc._Post, "backward", staticmethod(transposed))
    got[packed.positions > 0].sum().backward()
    want.sum().backward()
    name = "model.layers.0.hc_ffn_fn"
    error = dict(model.named_parameters())[name].grad - reference.w[name].grad
    assert error.norm() > 1e-3 * reference.w[name].grad.norm()


@pytest.mark.parametrize("config, fp8", [(CONFIG, False), (FP8_CONFIG, True)], ids=["exact", "fp8"])
def test_sequences_in_one_pass_of_the_reference_see_nothing_of_each_other(config, fp8):
    model = build(config)
    tokens, packed = batch(config)
    with noted(model) as (experts, rows, _):
        model(tokens, packed)
    rows = dict(zip([i for i, ratio in enumerate(model.shape.ratios) if ratio == 4], rows, strict=True))
    together, apart = (Reference(config, dict(model.named_parameters()), model.tables, torch.float64) for _ in range(2))
    whole = together.logprobs([tokens[a:b] for a, b in packed.bounds], experts, rows, fp8=fp8)
    each = [apart.logprobs([tokens[a:b]], [e[a:b] for e in experts], {i: r[a:b] for i, r in rows.items()}, fp8=fp8)
            for a, b in packed.bounds]
    torch.testing.assert_close(whole, torch.cat(each), rtol=1e-10, atol=1e-12)
    whole.sum().backward()
    torch.cat(each).sum().backward()
    for name, w in apart.w.items():
        if w.grad is not None:
            torch.testing.assert_close(together.w[name].grad, w.grad, rtol=1e-8, atol=1e-10, msg=name)


class Called(TorchDispatchMode):
    """Names of the operators that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.names[function._schema.name.removeprefix("aten::")] += 1
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_reference_calls_nothing_that_batch_invariance_replaces(dtype):
    """Those kernels know no fp64 or have no derivative (determinism/batch_invariant.py:1357-1380 of 0.33.0)."""
    model = build(FP8_CONFIG)
    tokens, packed = batch(FP8_CONFIG)
    with noted(model) as (experts, rows, _):
        model(tokens, packed)
    reference = Reference(FP8_CONFIG, dict(model.named_parameters()), model.tables, dtype)
    with Called() as called:
        found = reference.logprobs([tokens[a:b] for a, b in packed.bounds], experts, {1: rows[0]}, fp8=True)
        found.sum().backward()
    replaced = {"bmm", "mean", "_softmax", "softmax", "_log_softmax"}
    assert called.names["mm"] > 50 and not replaced & called.names.keys()


def test_the_references_experts_in_one_product_are_the_sum_of_each_alone():
    """Also in their derivatives, which of inputs and weights are taken at what is not rounded, of the shares at what
    is."""
    reference = Reference(FP8_CONFIG, {}, {}, torch.float64)
    reference.fp8 = True
    generator = torch.Generator().manual_seed(3)
    x, w2, share = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
                    for shape in ((7, 5, 128), (5, 6, 128), (7, 5)))
    together = reference._project(x, w2.transpose(0, 1).flatten(1), share[..., None])
    apart = sum(share[:, e:e + 1] * reference._project(x[:, e], w2[e]) for e in range(5))
    assert not torch.allclose(together, torch.einsum("tei,ehi,te->th", x, w2, share), rtol=1e-3), "nothing was rounded"
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-10)
    sign = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    one, other = (torch.autograd.grad((y * sign).sum(), (x, w2, share)) for y in (together, apart))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# ---- with the deployment's quantisers


def test_packing_changes_no_bit():
    model = quantised()
    tokens, packed = batch(FP8_CONFIG, (21, 1, 34, 8))
    with torch.no_grad():
        whole = model(tokens, packed)
        for (a, b), n in zip(packed.bounds, packed.lengths, strict=True):
            if n > 1:
                assert torch.equal(model(tokens[a:b], Packed((n,), packed.device)), whole[a:b])
        backwards = [tokens[a:b] for a, b in packed.bounds[::-1]]
        flipped = torch.cat([model(*pack(backwards))[a:b] for a, b in
                             Packed(packed.lengths[::-1], packed.device).bounds[::-1]])
    assert torch.equal(flipped, whole)


def test_cache_and_recomputation_change_no_bit_and_no_gradient():
    tokens, packed = batch(FP8_CONFIG, (21, 8))
    grads = []
    for more in ({}, {"recompute": True}, {"cache": True}):
        model = quantised(recompute=more.get("recompute", False))
        if more.get("cache"):
            model.run.guard = WeightGuard(model.named_parameters)
            model.run.cache = OperandCache(model.run.guard)
        out = model(tokens, packed)
        out.sum().backward()
        grads.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_export_is_the_operand_of_the_forward_and_take_is_its_inverse():
    model, fresh = quantised(), quantised()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    engine = dict(model.exported())
    assert engine["model.layers.1.attn.wq_b.weight"].dtype == torch.float8_e4m3fn
    assert engine["model.layers.0.ffn.experts.routed_experts.w13_weight_scale_inv"].shape == (5, 2, 1)
    tokens, packed = batch(FP8_CONFIG, (21, 8))
    with torch.no_grad():
        before = model(tokens, packed)
        fresh.take({name: t.clone() for name, t in engine.items()})
        assert torch.equal(fresh(tokens, packed), before), "masters read back from the engine compute other values"
        for name, tensor in fresh.exported():
            if not name.endswith("_scale_inv") and name + "_scale_inv" not in engine:
                assert torch.equal(tensor, engine[name]), name


def test_export_takes_the_operands_that_a_forward_of_the_same_version_kept():
    model = quantised()
    model.run.guard = WeightGuard(model.named_parameters)
    plain = {name: tensor.clone() for name, tensor in model.exported()}
    model.run.cache = OperandCache(model.run.guard)
    with torch.no_grad():
        model(*batch(FP8_CONFIG, (9,)))
    kept = {part.data_ptr() for _, _, operand in model.run.cache._kept.values() for part in operand}
    for name, tensor in model.exported():
        assert torch.equal(tensor.view(torch.uint8), plain[name].view(torch.uint8)), name
        assert (tensor.data_ptr() in kept) == (name.endswith("_scale_inv") or name + "_scale_inv" in plain), name
    with torch.no_grad():
        model.model.layers[1].attn.wo_b.weight.neg_()
    model.run.guard.advance()
    changed = [name for name, tensor in model.exported() if not torch.equal(tensor, plain[name])]
    assert changed == ["model.layers.1.attn.wo_b.weight"]


def test_exported_names_and_dtypes_are_those_the_recipe_fills_in_the_engine():
    """recipes/deepseek-v4/tiny/weights.py has a rule for each of the engine's parameters, FP8 or not, by its name."""
    import importlib.util
    import pathlib
    import re

    path = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "deepseek-v4" / "tiny" / "weights.py"
    spec = importlib.util.spec_from_file_location("tiny_weights", path)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    used = set()
    for name, tensor in quantised().exported():
        pattern, rule = next((p, r) for p, r in recipe.RULES if re.search(p, name))
        used.add(pattern)
        assert (rule is recipe._fp8) == (tensor.dtype == torch.float8_e4m3fn), name
    assert used == {pattern for pattern, _ in recipe.RULES}, "the engine has parameters that the trainer lacks"


def test_a_batch_without_anything_to_predict_is_refused():
    with pytest.raises(ValueError, match="nothing to predict"):
        quantised()(*batch(FP8_CONFIG, (1, 1)))


def test_other_names_are_refused():
    model = quantised()
    engine = dict(model.exported())
    engine.pop("lm_head.weight")
    with pytest.raises(ValueError, match="lm_head.weight"):
        model.take(engine)


def test_update_between_forward_and_backward_is_refused():
    model = quantised()
    tokens, packed = batch(FP8_CONFIG, (9,))
    out = model(tokens, packed)
    with torch.no_grad():
        model.model.layers[1].attn.wo_b.weight.add_(1)
    with pytest.raises(WeightsChanged, match="'master' has writes"):
        out.sum().backward()


@pytest.mark.parametrize("change,match", [
    ({"expert_dtype": "fp4"}, "expert_dtype"), ({"compress_rates": {"csa": 8}}, "ratios"),
    ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe"),
])  # fmt: skip
def test_unknown_architecture_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        Shape.from_hf(CONFIG | change)


def test_tiny_recipe_is_understood():
    import json
    import pathlib

    folder = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "deepseek-v4" / "tiny"
    shape = Shape.from_hf(json.loads((folder / "config.json").read_text()))
    assert shape.pattern == "SCHCH" and shape.hashed == 1 and shape.index_top_k == 512


def test_a_gradient_that_is_expected_to_be_zero_is_over_any_bound():
    row = _row("sink", usual=0.0, want=0.0, error=1.0, own=1.0, dot=0.0)
    assert row["error"] != row["error"] and row["usual_error"] != row["usual_error"] and row["cosine"] == 0
