"""The written tiny Nemotron-H models: the same bytes every time; the quantised one in ModelOpt's layout, its values
close to the BF16 one's. What vLLM's loader makes of the BF16 one: tests/upstream/test_nemotron_loader.py.
"""
import json
import pathlib
import sys
import types

import pytest
import torch

from prove import recipe
from prove.scripts import load

QUANTISED, PLAIN = (recipe.load("nemotron-3.5-lightning", tiny=tiny) for tiny in ("tiny-quantised", "tiny-checkpoint"))
WEIGHTS, BF16 = load(QUANTISED.weights_script), load(PLAIN.weights_script)
CONFIG = json.loads(pathlib.Path(QUANTISED.model, "config.json").read_text())
SMALL = CONFIG | {"hybrid_override_pattern": "ME*-*", "n_routed_experts": 3, "vocab_size": 64}
EXPERT, MIXER = "backbone.layers.1.mixer.experts.2.", "backbone.layers.0.mixer."


@pytest.fixture(scope="module")
def checkpoint():
    return WEIGHTS.tensors(SMALL)


@pytest.fixture(scope="module")
def plain():
    return BF16.tensors(SMALL)


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("script,before", [(WEIGHTS, "checkpoint"), (BF16, "plain")])
def test_the_same_bytes_at_every_start_whatever_the_default_dtype(script, before, request):
    before = request.getfixturevalue(before)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = script.tensors(SMALL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert before.keys() == again.keys()
    for name in before:
        assert torch.equal(_bytes(before[name]), _bytes(again[name])), name


def test_what_is_not_quantised_is_the_bf16_checkpoints_to_the_bit(checkpoint, plain):
    same = {name for name in plain if checkpoint[name].dtype == plain[name].dtype}
    assert plain.keys() - same == {f"{module}.weight" for module in WEIGHTS.quantised(SMALL)}
    for name in same:
        assert torch.equal(_bytes(checkpoint[name]), _bytes(plain[name])), name


@pytest.mark.parametrize("name,shape,dtype", [
    (EXPERT + "up_proj.weight", (256, 256), torch.uint8),
    (EXPERT + "up_proj.weight_scale", (256, 32), torch.float8_e4m3fn),
    (EXPERT + "up_proj.weight_scale_2", (), torch.float32), (EXPERT + "down_proj.weight", (512, 128), torch.uint8),
    (MIXER + "in_proj.weight", (4112, 512), torch.float8_e4m3fn), (MIXER + "in_proj.weight_scale", (), torch.float32),
    (MIXER + "in_proj.input_scale", (), torch.float32), (MIXER + "conv1d.weight", (3072, 1, 4), torch.bfloat16),
    (MIXER + "A_log", (16,), torch.float32), ("backbone.layers.2.mixer.k_proj.k_scale", (), torch.float32),
    ("backbone.layers.4.mixer.q_proj.weight", (1024, 512), torch.bfloat16),
    ("backbone.layers.4.mixer.v_proj.v_scale", (), torch.float32), ("lm_head.weight", (64, 512), torch.bfloat16),
])  # fmt: skip
def test_names_shapes_and_dtypes_are_modelopts(checkpoint, name, shape, dtype):
    assert (tuple(checkpoint[name].shape), checkpoint[name].dtype) == (shape, dtype)


def test_every_value_is_finite_and_no_tensor_is_constant(checkpoint, plain):
    for name, tensor in [*checkpoint.items(), *plain.items()]:
        assert tensor.float().isfinite().all(), name
        assert tensor.numel() == 1 or tensor.float().std() > 0, name


def _fp4(checkpoint, module):
    packed = checkpoint[f"{module}.weight"].long()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = WEIGHTS.FP4_VALUES[codes & 7] * torch.where(codes & 8 > 0, -1, 1)
    scales = checkpoint[f"{module}.weight_scale"].float() * checkpoint[f"{module}.weight_scale_2"]
    return values * scales.repeat_interleave(16, -1)


def _error(found, name):
    expected = WEIGHTS.CHECKPOINT.value(name, tuple(found.shape))
    return float((found - expected).norm() / expected.norm())


def test_quantised_weights_are_the_bf16_models_within_their_format(checkpoint):
    for module in (EXPERT + "up_proj", EXPERT + "down_proj"):
        assert _error(_fp4(checkpoint, module), f"{module}.weight") < 0.11  # four bits, a scale every 16 columns
    for module in (MIXER + "in_proj", "backbone.layers.2.mixer.k_proj", "backbone.layers.3.mixer.down_proj"):
        found = checkpoint[f"{module}.weight"].float() * checkpoint[f"{module}.weight_scale"]
        assert _error(found, f"{module}.weight") < 0.03


def test_codes_round_to_the_nearest_and_ties_to_even():
    values = torch.tensor([0.0, 0.25, 0.2501, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 6.0, 7.0])
    codes = torch.tensor([0, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 7], dtype=torch.uint8)
    assert torch.equal(WEIGHTS._codes(values), codes)
    assert torch.equal(WEIGHTS._codes(-values)[1:], codes[1:] | 8)


def test_fused_projections_share_their_scale(checkpoint):
    scales = {float(checkpoint[f"backbone.layers.2.mixer.{part}_proj.weight_scale"]) for part in "qkv"}
    assert len(scales) == 1


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Calls a script's `write` where no safetensors is installed: (config.json, the tensors of each file)."""
    def call(script):
        saved = {}
        library = types.ModuleType("safetensors.torch")
        library.save_file = lambda tensors, path, metadata: saved.update({path.name: tensors})
        monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))
        monkeypatch.setitem(sys.modules, "safetensors.torch", library)
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "config.json").write_text(json.dumps(SMALL))
        script.write(str(tmp_path / "small"), str(tmp_path))
        return json.loads((tmp_path / "config.json").read_text()), saved
    return call


def test_the_bf16_folder_has_the_models_own_configuration_and_one_file(write, plain):
    config, saved = write(BF16)
    assert config == SMALL
    assert {name: tensors.keys() for name, tensors in saved.items()} == {"model.safetensors": plain.keys()}


def test_the_configuration_lists_each_projection_once(write):
    config, saved = write(WEIGHTS)
    section = config["quantization_config"]
    listed, ignored = set(section["quantized_layers"]), set(section["ignore"])
    projections = {name.removesuffix(".weight") for name in saved["model.safetensors"] if name.endswith("_proj.weight")}
    assert not listed & ignored and listed | ignored == projections | {"lm_head"}
    assert section["quantized_layers"][EXPERT + "up_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    for module in listed:
        assert f"{module}.weight_scale" in saved["model.safetensors"]


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match="no rule for backbone.layers.0.mixer.extra"):
        WEIGHTS.CHECKPOINT.value("backbone.layers.0.mixer.extra", (3,))
