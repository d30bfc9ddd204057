"""The BF16 tiny Nemotron-H's checkpoint through vLLM's own loader: every parameter of the engine is written once.

The loader's code is upstream's (names, stacks, nesting, experts). The modules are bare: names and shapes are those by
which the trainer takes an engine's weights. At one rank a parameter takes what it is given, but for q, k and v, which
share one, and A, an exponential.
"""
import ast
import dataclasses
import itertools
import json
import pathlib
import types

import pytest
import torch
import upstream_source
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape
from torch import nn

from prove import recipe
from prove.scripts import load

RECIPE = recipe.load("nemotron-3.5-lightning", tiny="tiny-checkpoint")
CONFIG = json.loads(pathlib.Path(RECIPE.model, "config.json").read_text())
MODELS, EXPERTS = "vllm/model_executor/models/", "vllm/model_executor/layers/fused_moe/"


def refuse(text, *rest):
    """The loader warns of a dtype that does not fit; nothing here may make it warn."""
    raise ValueError(text % rest)


QUIET = types.SimpleNamespace(debug=lambda *a: None, warning=refuse, warning_once=refuse)


def loader() -> types.SimpleNamespace:
    """AutoWeightsLoader, the model's own mapper, and the two classes that experts go through."""
    utils = upstream_source.stock(f"{MODELS}utils.py")
    scope = {"logger": QUIET, "nn": nn, "torch": torch, "itertools": itertools, "VocabParallelEmbedding": (),
             "field": dataclasses.field, "StageMissingLayer": (), "PPMissingLayer": (), "Base": nn.Module,
             "support_quantized_model_reload_from_hp_weights": lambda method: method,
             "default_weight_loader": put, "FusedMoeWeightScaleSupported": None}
    upstream_source.define(utils, ["WeightsMapper"], scope)
    scope["WeightsMapper"] = dataclasses.dataclass(scope["WeightsMapper"])
    upstream_source.define(utils, ["_get_tied_embedding_params", "maybe_prefix", "AutoWeightsLoader"], scope)
    upstream_source.define(upstream_source.stock(f"{EXPERTS}routed_experts.py"), [
        "_index_expert_mapping", "RoutedExperts.load_weights", "RoutedExperts.get_expert_mapping",
        "RoutedExperts.build_expert_params_mapping"], scope)
    upstream_source.define(upstream_source.stock("vllm/distributed/eplb/eplb_state.py"),
                           ["EplbState.build_initial_global_physical_to_logical_map"], scope)
    experts = scope["RoutedExperts"]
    experts.build_expert_params_mapping = staticmethod(experts.build_expert_params_mapping)  # define drops decorators
    upstream_source.define(upstream_source.stock(f"{EXPERTS}runner/moe_runner.py"), ["MoERunner.load_weights"], scope)
    model = next(node for node in ast.parse(upstream_source.stock(f"{MODELS}nemotron_h.py")).body
                 if getattr(node, "name", None) == "NemotronHForCausalLM")
    mapper = next(node.value for node in model.body if isinstance(node, ast.Assign)
                  and node.targets[0].id == "hf_to_vllm_mapper")
    return types.SimpleNamespace(auto=scope["AutoWeightsLoader"], runner=scope["MoERunner"], experts=experts,
                                 mapper=eval(ast.unparse(mapper), scope))


def put(param, given, rows=slice(None)):
    if param.data[rows].shape != given.shape:
        raise ValueError(f"{tuple(given.shape)} for {tuple(param.data[rows].shape)}")
    param.data[rows] = given
    param.times[rows] += 1
    param.puts += 1


def put_qkv(param, given):
    query, key = (CONFIG[heads] * CONFIG["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    start = {"q": 0, "k": query, "v": query + key}[given.shard_id]
    put(param, given, slice(start, start + (query if given.shard_id == "q" else key)))


def put_expert(param, loaded_weight, weight_name, shard_id, expert_id, return_success):
    assert ("w13" in weight_name) == (shard_id == "w1") and return_success
    put(param, loaded_weight, expert_id)
    return True


SPECIAL = {"qkv_proj.weight": put_qkv, "mixer.A": lambda param, given: put(param, -given.float().exp()),
           "w13_weight": put_expert, "w2_weight": put_expert}


def engine(parts: types.SimpleNamespace) -> nn.Module:
    """Bare modules with the engine's parameters; `times` counts the writes of each element, `puts` the tensors."""
    root = nn.Module()
    for name, like in NemotronH(Shape.from_hf(CONFIG), kernels.reference()).exported():
        *path, leaf = name.split(".")
        module = root
        for depth, part in enumerate(path):
            if part not in module._modules:
                module.add_module(part, _module(parts, part, ".".join(path[:depth])))
            module = module.get_submodule(part)
        param = nn.Parameter(torch.full_like(like, float("nan")), requires_grad=False)
        param.times, param.puts = torch.zeros(like.shape, dtype=torch.int32), 0
        param.weight_loader = next((put for end, put in SPECIAL.items() if name.endswith(end)), put)
        module.register_parameter(leaf, param)
    return root


def _module(parts: types.SimpleNamespace, name: str, prefix: str) -> nn.Module:
    if name == "experts":
        return parts.runner()
    if name != "routed_experts":
        return nn.Module()
    made, many = parts.experts(), CONFIG["n_routed_experts"]
    made.layer_name, made.lora_base_layer_prefix = prefix, ""
    made.ckpt_gate_proj_name, made.ckpt_down_proj_name, made.ckpt_up_proj_name = "up_proj", "down_proj", None
    made.moe_config = types.SimpleNamespace(num_experts=many, num_logical_experts=many, is_act_and_mul=False)
    made.expert_map_manager = types.SimpleNamespace(num_fused_shared_experts=0)
    return made


@pytest.fixture(scope="module")
def checkpoint():
    return load(RECIPE.weights_script).tensors(CONFIG)


def loaded(checkpoint: dict[str, torch.Tensor]) -> nn.Module:
    """Raises ValueError where a tensor has no place, another shape or a dtype that would be rounded."""
    parts = loader()
    model = engine(parts)
    parts.auto(model).load_weights(checkpoint.items(), mapper=parts.mapper)
    if odd := [name for name, param in model.named_parameters() if not (param.times == 1).all() or param.isnan().any()]:
        raise ValueError(f"not written once: {odd}")
    if (taken := sum(param.puts for param in model.parameters())) != len(checkpoint):
        raise ValueError(f"{len(checkpoint) - taken} tensors were passed over")
    return model


def test_every_tensor_is_read_and_every_parameter_written_once(checkpoint):
    loaded(checkpoint)


def test_values_are_spread_as_in_the_filled_model(checkpoint):
    model = loaded(checkpoint)
    filled = engine(loader())
    load(recipe.load("nemotron-3.5-lightning", tiny="tiny").weights_script).fill(filled)
    for (name, one), two in zip(model.named_parameters(), filled.parameters(), strict=True):
        if one.numel() >= 512:  # per-head parameters have 16
            one, two = one.double(), two.double()
            assert float(one.std() / two.std()) == pytest.approx(1, abs=0.2), name
            assert abs(float(one.mean() - two.mean())) < 0.2 * float(two.std()), name


EXPERT, BF16 = "backbone.layers.1.mixer.experts", torch.bfloat16
FAULTS = {
    "not written once: .'model.layers.1.mixer.experts.routed_experts.w2_weight'.":
        lambda c: c.pop(f"{EXPERT}.3.down_proj.weight"),
    "1 tensors were passed over": lambda c: c.update({f"{EXPERT}.16.up_proj.weight": torch.ones(256, 512).to(BF16)}),
    r"\(1,\) for \(512,\)": lambda c: c.update({"backbone.norm_f.weight": torch.zeros(1, dtype=BF16)}),
    "lm_head.weight with dtype torch.float32": lambda c: c.update({"lm_head.weight": c["lm_head.weight"].float()}),
    "no module or parameter named 'model.layers.8'": lambda c: c.update({"backbone.layers.8.D": torch.zeros(16)}),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_wrong_checkpoint_would_be_found(message, checkpoint):
    broken = dict(checkpoint)
    FAULTS[message](broken)
    with pytest.raises(ValueError, match=message):
        loaded(broken)
