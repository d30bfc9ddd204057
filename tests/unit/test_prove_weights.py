"""The tiny model's weights: the same bytes every time, every parameter ruled, values that make operators decide."""
import pytest
import torch

from prove import recipe
from prove.scripts import load

WEIGHTS = load(recipe.load("deepseek-v4", tiny="tiny").weights_script)
FP8 = torch.float8_e4m3fn
# Names and dtypes as vLLM 0.33.0 builds the model; the shapes are smaller where only the row length matters.
PARAMETERS = {
    "model.embed_tokens.weight": ((64, 256), torch.bfloat16),
    "lm_head.weight": ((64, 4096), torch.bfloat16),
    "model.norm.weight": ((4096,), torch.bfloat16),
    "model.hc_head_fn": ((4, 16384), torch.float32),
    "model.hc_head_scale": ((1,), torch.float32),
    "model.hc_head_base": ((4,), torch.float32),
    "model.layers.1.hc_attn_fn": ((24, 16384), torch.float32),
    "model.layers.1.hc_ffn_scale": ((3,), torch.float32),
    "model.layers.1.attn.attn_sink": ((64,), torch.float32),
    "model.layers.1.attn.fused_wqa_wkv.weight": ((256, 4096), FP8),
    "model.layers.1.attn.fused_wqa_wkv.weight_scale_inv": ((2, 32), torch.float32),
    "model.layers.1.attn.compressor.ape": ((4, 1024), torch.float32),
    "model.layers.1.attn.compressor.fused_wkv_wgate.weight": ((64, 4096), torch.bfloat16),
    "model.layers.1.attn.indexer.weights_proj.weight": ((64, 4096), torch.bfloat16),
    "model.layers.1.ffn.gate.weight": ((256, 4096), torch.bfloat16),
    "model.layers.1.ffn.gate.e_score_correction_bias": ((256,), torch.float32),
    "model.layers.0.ffn.gate.tid2eid": ((50, 6), torch.int32),
    "model.layers.1.ffn.experts.routed_experts.w13_weight": ((3, 256, 512), FP8),
    "model.layers.1.ffn.experts.routed_experts.w13_weight_scale_inv": ((3, 2, 4), torch.float32),
    "model.layers.1.ffn.experts.routed_experts.w2_weight": ((3, 512, 128), FP8),
    "model.layers.1.ffn.experts.routed_experts.w2_weight_scale_inv": ((3, 4, 1), torch.float32),
}


class Model:
    def __init__(self, parameters=PARAMETERS):
        self.parameters = {name: torch.nn.Parameter(torch.full(shape, 7).to(dtype), requires_grad=False)
                           for name, (shape, dtype) in parameters.items()}

    def named_parameters(self):
        return self.parameters.items()


def filled():
    model = Model()
    WEIGHTS.fill(model)
    return model.parameters


def test_the_same_bytes_at_every_start_whatever_the_default_dtype():
    one = filled()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM's loader has it
    try:
        two = filled()
    finally:
        torch.set_default_dtype(torch.float32)
    for name in one:
        assert torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)), name


def test_every_value_is_finite_and_none_is_left_as_it_was():
    for name, value in filled().items():
        value = value.float()
        assert value.isfinite().all(), name
        assert value.numel() == 1 or value.std() > 0, name


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(ValueError, match="no rule for model.layers.0.new_thing"):
        WEIGHTS.fill(Model({"model.layers.0.new_thing": ((3,), torch.float32)}))
    with pytest.raises(ValueError, match="no rule for x.weight"):  # an unquantised matrix where FP8 is expected
        WEIGHTS.fill(Model({"x.weight": ((3, 3), torch.bfloat16)}))


def test_each_token_of_the_hash_layer_has_distinct_experts():
    table = filled()["model.layers.0.ffn.gate.tid2eid"]
    assert all(len(set(row)) == 6 for row in table.tolist()) and table.min() >= 0 and table.max() < 256


def _dequantised(weight, scale):
    return weight.float() * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)


def test_projections_keep_unit_variance_and_the_clamp_is_reached():
    made = filled()
    qkv = _dequantised(made["model.layers.1.attn.fused_wqa_wkv.weight"],
                       made["model.layers.1.attn.fused_wqa_wkv.weight_scale_inv"])
    assert qkv.std() * 4096 ** 0.5 == pytest.approx(1.0, rel=0.05)
    experts = "model.layers.1.ffn.experts.routed_experts."
    up = _dequantised(made[experts + "w13_weight"], made[experts + "w13_weight_scale_inv"])
    assert up.std() * 512 ** 0.5 == pytest.approx(4.0, rel=0.1)  # gate of deviation 4 against swiglu_limit 10
    assert made["lm_head.weight"].float().std() * 64 == pytest.approx(2.5, rel=0.05)


def test_block_scales_are_no_powers_of_two():
    scale = filled()["model.layers.1.attn.fused_wqa_wkv.weight_scale_inv"]
    assert (scale.log2().frac() != 0).all()
