"""The quantised Nemotron-H actor on a CPU, plain PyTorch in the kernels' place: weights there and back, values,
gradients. The engine's own bits are a matter of the GPU (tests/gpu/test_trainer_nemotron_quantised.py)."""
import pytest
import tiny_nemotron
import tiny_nemotron_quantised as tiny
import torch
from megatron.zero_mismatch import kernels, linear_fp8_static, quant_nvfp4
from megatron.zero_mismatch.linear_fp8 import OperandCache
from megatron.zero_mismatch.models import nemotron_h_weights
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape
from megatron.zero_mismatch.packing import pack
from megatron.zero_mismatch.version_guard import WeightGuard, WeightsChanged
from megatron.zero_mismatch.weight_sync import Manifest, WeightReceiver

LENGTHS = (5, 33, 16, 1, 48)


@pytest.fixture(scope="module")
def weights():
    return tiny.engine_weights()


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def learned(model, seed=1):
    tokens, packed = pack(tiny_nemotron.sequences(*LENGTHS))
    found = model(tokens, packed)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))
    (found * weight).sum().backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_formats_are_those_of_the_checkpoint_by_the_engines_modules():
    shape = Shape.from_hf(tiny.CONFIG)
    assert shape.fp8_cache
    assert {name for name, kind in shape.formats.items() if kind == "NVFP4"} == {
        f"model.layers.{i}.mixer.experts" for i in (1, 5)}
    assert {name for name, kind in shape.formats.items() if kind == "FP8"} == {
        f"model.layers.{i}.mixer.{name}" for i, names in {
            0: ("in_proj", "out_proj"), 1: ("shared_experts.up_proj", "shared_experts.down_proj"),
            2: ("qkv_proj", "o_proj"), 3: ("in_proj", "out_proj"), 4: ("up_proj", "down_proj"),
            5: ("shared_experts.up_proj", "shared_experts.down_proj")}.items() for name in names}


@pytest.mark.parametrize("change, said", [
    ({"quant_algo": "NVFP4"}, "expected modelopt MIXED_PRECISION"),
    ({"quantized_layers": {"backbone.layers.0.mixer.in_proj": {"quant_algo": "MXFP8"}}}, "in_proj in MXFP8"),
    ({"quantized_layers": {"backbone.layers.1.mixer.experts.0.up_proj": {"quant_algo": "FP8"}}}, "experts in FP8"),
    ({"quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}, "lm_head in FP8"),
    ({"quantized_layers": {"backbone.layers.1.mixer.gate": {"quant_algo": "FP8"}}}, "gate in FP8"),
    ({"kv_cache_scheme": {"type": "float", "num_bits": 4, "dynamic": False}}, "kv_cache_scheme"),
])
def test_formats_that_are_not_written_are_refused(change, said):
    config = tiny.CONFIG | {"quantization_config": tiny.CONFIG["quantization_config"] | change}
    with pytest.raises(ValueError, match=said):
        Shape.from_hf(config)


def test_a_quantised_module_that_the_model_lacks_is_named():
    layers = {"backbone.layers.99.mixer.in_proj": {"quant_algo": "FP8"}}
    config = tiny.CONFIG | {"quantization_config": tiny.CONFIG["quantization_config"] | {"quantized_layers": layers}}
    with pytest.raises(ValueError, match="layers.99.mixer.in_proj, expected a module of these 7 layers"):
        NemotronH(Shape.from_hf(config), kernels.reference())


def test_masters_start_from_the_values_that_the_engine_holds(weights):
    multiplied = nemotron_h_weights.multiplied(tiny.model(weights=weights))
    for name, master in ((n, p) for n, p in tiny.model(weights=weights).named_parameters() if p.ndim > 1):
        engine = name.replace(".experts.w", ".experts.routed_experts.w")
        held, again = master.float(), multiplied[engine]
        assert (held - again).norm() <= 2**-4 * held.norm(), f"{name}: quantised again, it stays near"
        if f"{engine}_scale" in weights and ".experts." not in name:
            assert torch.equal(master, (weights[engine].t().float() * weights[f"{engine}_scale"]).bfloat16())


def test_export_has_the_engines_names_shapes_and_dtypes_and_a_second_trip_changes_nothing(weights):
    exported = dict(tiny.model(weights=weights).exported())
    assert exported.keys() == weights.keys()
    for name, theirs in weights.items():
        assert (exported[name].shape, exported[name].dtype) == (theirs.shape, theirs.dtype), name
    scales = [name for name in weights if name.endswith(("input_scale", "_k_scale", "_v_scale", "_q_scale"))]
    assert len(scales) == 12 + 6
    assert all(torch.equal(exported[name], weights[name]) for name in scales), "calibrated once, and kept"


def test_a_sync_writes_into_the_engines_own_tensors(weights):
    engine = {name: t.clone() for name, t in weights.items()}
    made = tiny.model(weights=weights)
    guard = WeightGuard(made.named_parameters)
    places = {name: t.data_ptr() for name, t in engine.items()}
    receiver = WeightReceiver(engine.items)
    exported = list(made.exported())
    receiver.begin(Manifest.of(guard, exported))
    for name, tensor in exported:
        receiver.put(name, tensor)
    receiver.commit()
    assert places == {name: t.data_ptr() for name, t in engine.items()}
    assert all(torch.equal(bits(engine[name]), bits(tensor)) for name, tensor in exported)


def test_an_unquantised_engine_is_refused(weights):
    with pytest.raises(ValueError, match="names are on one side only"):
        tiny.model(weights={n: t for n, t in weights.items() if not n.endswith("_scale")})


def test_recomputation_and_cached_operands_change_no_bit(weights):
    plain = learned(tiny.model(weights=weights))
    other = tiny.model(weights=weights, recompute=True)
    other.guard = WeightGuard(other.named_parameters)
    other.cache = OperandCache(other.guard)
    again = learned(other)
    assert torch.equal(plain[0].view(torch.int32), again[0].view(torch.int32))
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def test_export_takes_the_operands_that_a_forward_of_the_same_version_kept(weights):
    model = tiny.model(weights=weights)
    model.guard = WeightGuard(model.named_parameters)
    plain = {name: bits(t) for name, t in model.exported()}
    model.cache = OperandCache(model.guard)
    with torch.no_grad():
        model(*pack(tiny_nemotron.sequences(9)))
    operands = [operand for _, _, operand in model.cache._kept.values()]
    kept = {part.data_ptr() for operand in operands for part in getattr(operand, "resident", {"": operand[0]}).values()}
    sent = dict(model.exported())
    assert all(torch.equal(bits(t), plain[name]) for name, t in sent.items())
    codes = {name for name, t in sent.items() if t.dtype in (torch.float8_e4m3fn, torch.uint8)}
    assert codes and all(sent[name].data_ptr() in kept for name in codes)
    with torch.no_grad():
        model.model.layers[4].mixer.up_proj.weight.neg_()
    model.guard.advance()
    changed = [name for name, t in model.exported() if not torch.equal(bits(t), plain[name])]
    assert changed == ["model.layers.4.mixer.up_proj.weight"]


def test_every_master_learns_and_no_scale_does(weights):
    model = tiny.model(weights=weights)
    _, grads = learned(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in dict(model.named_parameters()) if n.endswith(("_scale", "e_score_correction_bias"))}
    assert grads.keys() == dict(model.named_parameters()).keys() - frozen
    assert all(g.isfinite().all() and g.any() for g in grads.values())


def test_values_follow_the_masters_through_their_quantisers(weights):
    """A step smaller than a code changes nothing; one of several codes does."""
    model = tiny.model(weights=weights)
    tokens = pack(tiny_nemotron.sequences(*LENGTHS))
    weight = model.model.layers[4].mixer.up_proj.weight
    with torch.no_grad():
        before = model(*tokens)
        flat, largest = weight.view(-1), int(weight.abs().argmax())
        place = 0 if largest else 1
        code = linear_fp8_static.cast(weight).codes.view(-1)[place].clone()
        flat[place] = code.float() * (weight.float().abs().amax() / 448)
        same = model(*tokens)
        flat[place] += weight.abs().amax() / 2
        after = model(*tokens)
    assert torch.equal(before, same) and not torch.equal(before, after)


def test_a_backward_behind_a_changed_master_is_refused(weights):
    model = tiny.model(weights=weights)
    out = model(*pack(tiny_nemotron.sequences(8)))
    with torch.no_grad():
        model.model.layers[1].mixer.experts.w2_weight[0, 0, 0] += 1
    with pytest.raises(WeightsChanged, match="w2"):
        out.sum().backward()


def test_exact_kernels_are_the_plain_model_at_the_masters(weights):
    """Without quantisers the quantised model is the BF16 one: same operators, same places."""
    model = tiny.model(torch.float64, table=kernels.exact(), weights=weights)
    plain = tiny_nemotron.NemotronH(Shape.from_hf(
        {k: v for k, v in tiny.CONFIG.items() if k != "quantization_config"}), kernels.reference(), torch.float64)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(named[name])
    found, want = learned(model), learned(plain)
    assert torch.allclose(found[0], want[0], rtol=0, atol=1e-12)
    assert found[1].keys() == want[1].keys()
    for name, gradient in found[1].items():
        assert (gradient - want[1][name]).norm() <= 1e-10 * want[1][name].norm(), name


def test_the_writers_codes_are_the_trainers():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 48, 64, generator=generator).mul(0.1).bfloat16()
    for matrix, *ours in zip(weight, *quant_nvfp4.quantise(weight), strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, tiny.WRITER.to_fp4(matrix.float()), strict=True))
        codes, scale = tiny.WRITER.to_fp8(matrix.float(), matrix.float().abs().amax())
        made = linear_fp8_static.cast(matrix)
        assert torch.equal(bits(codes), bits(made.codes)) and torch.equal(scale, made.scale)

