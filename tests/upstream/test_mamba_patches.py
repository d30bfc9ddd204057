"""Nemotron-H's hooks in upstream's own functions, as released and as patched: both arms of each."""
import dataclasses
import types

import pytest
import torch
from upstream_source import define, patched, stock
from vllm.zero_mismatch import mamba2_mixer

MIXER = "vllm/model_executor/layers/mamba/mamba_mixer2.py"
MODEL = "vllm/model_executor/models/nemotron_h.py"
BACKEND = "vllm/v1/attention/backends/mamba2_attn.py"
GATE = "vllm/model_executor/layers/fused_moe/router/gate_linear.py"
ON, OFF = types.SimpleNamespace(VLLM_BATCH_INVARIANT=True), types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)
CONV, STATE = (3, 3072), (16, 64, 128)
RING = ((32, 1024), (32, 1024), (2, 16, 32))


def _model(name="NemotronHForCausalLM"):
    hf = types.SimpleNamespace(mamba_num_heads=16, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4)
    return types.SimpleNamespace(architectures=[name], hf_config=hf, dtype=torch.bfloat16,
                                 get_mamba_chunk_size=lambda: 128)


def _config(name="NemotronHForCausalLM"):
    return types.SimpleNamespace(
        model_config=_model(name), num_speculative_tokens=0, mamba_config=None,
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
        cache_config=types.SimpleNamespace(use_replayssm=False, mamba_cache_dtype="auto",
                                           mamba_ssm_cache_dtype="float32"))


def _calculators(envs):
    return {"envs": envs,
            "MambaStateShapeCalculator": types.SimpleNamespace(mamba2_state_shape=lambda **_: (CONV, STATE)),
            "MambaStateDtypeCalculator": types.SimpleNamespace(
                mamba2_state_dtype=lambda *_: (torch.bfloat16, torch.float32)),
            "get_tensor_model_parallel_world_size": lambda: 1, "Base": object}


def _layer(name="NemotronHForCausalLM"):
    config = _config(name)
    return types.SimpleNamespace(
        model_config=config.model_config, cache_config=config.cache_config, use_replayssm=False, num_spec=0,
        intermediate_size=1024, n_groups=8, num_heads=16, head_dim=64, ssm_state_size=128, conv_kernel_size=4)


def _declared(source, envs):
    """What the layer and the model say about a slot: ((shapes, dtypes), (shapes, dtypes))."""
    layer = define(source(MIXER), ["MambaMixer2.get_state_shape", "MambaMixer2.get_state_dtype"],
                   _calculators(envs))["MambaMixer2"]
    model = define(source(MODEL), ["NemotronHForCausalLM.get_mamba_state_shape_from_config",
                                   "NemotronHForCausalLM.get_mamba_state_dtype_from_config"],
                   _calculators(envs))["NemotronHForCausalLM"]
    mixer, config = _layer(), _config()
    shape, dtype = model.get_mamba_state_shape_from_config, model.get_mamba_state_dtype_from_config
    return (layer.get_state_shape(mixer), layer.get_state_dtype(mixer)), (shape(None, config), dtype(None, config))


def test_slot_holds_the_ring_in_both_declarations():
    expected = ((CONV, STATE, *RING), (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32))
    assert _declared(patched, ON) == (expected, expected)
    assert _declared(patched, OFF) == _declared(stock, OFF)


def test_stock_slot_holds_no_ring():
    assert _declared(stock, ON) == (((CONV, STATE), (torch.bfloat16, torch.float32)),) * 2


def _copied(source, envs):
    """What is copied of each state of a slot, in the order of its shapes."""
    scope = {"envs": envs, "Base": object, "MambaStateCopyFunc": object, "MambaStateCopyFuncCalculator":
             types.SimpleNamespace(mamba2_state_copy_func=lambda: ("window", "whole"))}
    return define(source(MODEL), ["NemotronHForCausalLM.get_mamba_state_copy_func"],
                  scope)["NemotronHForCausalLM"].get_mamba_state_copy_func(None)


def test_copies_of_a_slot_take_the_ring_along():
    """A chunk of seven cohorts in eight begins before a block does: without its rows a prefix hit would read others."""
    assert _copied(patched, ON) == ("window", "whole", "whole", "whole", "whole")
    assert len(_copied(patched, ON)) == len(_declared(patched, ON)[1][0]), "one a state of the slot"
    assert _copied(patched, OFF) == _copied(stock, ON) == ("window", "whole")


def test_other_models_of_the_layer_are_refused():
    layer = define(patched(MIXER), ["MambaMixer2.get_state_shape"], _calculators(ON))["MambaMixer2"]
    with pytest.raises(ValueError, match="found BambaForCausalLM, expected one of NemotronHForCausalLM"):
        layer.get_state_shape(_layer("BambaForCausalLM"))


def test_a_rounded_state_is_refused():
    with pytest.raises(ValueError, match="expected torch.float32"):
        mamba2_mixer.state_dtypes((torch.bfloat16, torch.bfloat16), _config())


def test_layer_hands_over_to_the_replay(monkeypatch):
    seen = []
    monkeypatch.setattr(mamba2_mixer, "forward", lambda *arguments: seen.append(arguments))
    layer = define(patched(MIXER), ["MambaMixer2.conv_ssm_forward"], {"envs": ON, "Base": object})["MambaMixer2"]
    layer.conv_ssm_forward("layer", "projected", "output")
    assert seen == [("layer", "projected", "output")]


def _alignment(source, envs):
    scope = {"envs": envs, "Base": type("Base", (), {"get_prefill_checkpoint_alignment": lambda self: None})}
    layer = define(source(MIXER), ["MambaMixer2.get_prefill_checkpoint_alignment"], scope)["MambaMixer2"]()
    layer.model_config = _model()
    return layer.get_prefill_checkpoint_alignment()


def test_blocks_are_aligned_to_chunks():
    assert _alignment(patched, ON) == 128
    assert _alignment(patched, OFF) is None


@dataclasses.dataclass(frozen=True)
class _Spec:
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None


def _spec(source, envs):
    base = type("Base", (), {"get_kv_cache_spec": lambda self, config: _Spec()})
    scope = {"envs": envs, "MambaSpec": _Spec, "replace": dataclasses.replace, "Base": base}
    return define(source(MIXER), ["MambaMixer2.get_kv_cache_spec"], scope)["MambaMixer2"]().get_kv_cache_spec(None)


def test_no_checkpoint_inside_a_prefill():
    assert _spec(patched, ON) == _Spec()
    assert _spec(patched, OFF) == _spec(stock, OFF)


def test_stock_checkpoints_at_any_token():
    assert _spec(stock, ON) == _Spec(1, 1)
    assert "get_prefill_checkpoint_alignment" not in stock(MIXER)


def _norm(source, envs, groups):
    """(what runs, with which group size) for a norm of 1024 channels."""
    calls = []
    scope = {"envs": envs, "Base": object, "nn": torch.nn, "torch": torch,
             "rms_norm_gated": lambda *_, group_size=None, **__: calls.append(("kernel", group_size))}
    norm = define(source(MIXER), ["Mixer2RMSNormGated.forward_cuda"], scope)["Mixer2RMSNormGated"]()
    norm.__dict__.update(use_rms_norm=True, n_groups=groups, tp_size=1, group_size=1024 // groups,
                         variance_epsilon=1e-5, weight=torch.nn.Parameter(torch.ones(1024)))
    norm.forward_native = lambda *_: calls.append(("torch", None))
    x = torch.zeros(2, 1024, dtype=torch.bfloat16)
    norm.forward_cuda(x, x)
    return calls


def test_grouped_norm_runs_the_kernel():
    assert _norm(patched, ON, 8) == [("kernel", 128)]
    assert _norm(patched, ON, 1) == [("kernel", 1024)]
    assert _norm(patched, OFF, 8) == [("torch", None)] and _norm(patched, OFF, 1) == [("kernel", None)]


def test_stock_grouped_norm_runs_torch_ops():
    assert _norm(stock, ON, 8) == [("torch", None)]


def _condition(source, weight):
    """Whether the last tier but one of GateLinear.forward, the exact product, takes a gate of this weight."""
    text = source(GATE)
    if "zero_mismatch" not in text:
        return False
    condition = text[:text.index("from vllm.zero_mismatch.mm_fp32")].rsplit("if (", 1)[1].rsplit("):", 1)[0]
    gate = types.SimpleNamespace(_router_gemm_no_bias=True, out_dtype=torch.float32,
                                 weight=torch.zeros(4, 4, dtype=weight))
    return bool(eval(f"({condition})", {"envs": ON, "self": gate, "torch": torch,
                                        "x": torch.zeros(1, 4, dtype=torch.bfloat16)}))


def test_gate_with_fp32_weights_is_exact():
    assert _condition(patched, torch.float32)
    assert _condition(patched, torch.bfloat16), "DeepSeek-V4's gate keeps the branch it had"
    assert not _condition(patched, torch.float16)


def test_stock_gate_with_fp32_weights_calls_f_linear():
    assert not _condition(stock, torch.float32)


def _supports(source):
    text = source(BACKEND)
    body = text[text.index("class Mamba2AttentionBackend"):text.index("@dataclass\nclass Mamba2AttentionMetadata")]
    if "supports_batch_invariance" not in body:
        return None
    scope = {"Base": object}
    return define(text, ["Mamba2AttentionBackend.supports_batch_invariance"],
                  scope)["Mamba2AttentionBackend"].supports_batch_invariance(None)


def test_mamba2_declares_support():
    assert _supports(patched) is True


def test_stock_mamba2_declares_none():
    assert _supports(stock) is None


@pytest.mark.parametrize("backend", ["gdn_attn", "mamba1_attn", "short_conv_attn", "linear_attn"])
def test_other_recurrent_layers_stay_refused(backend):
    """vllm #48613: with the support flag alone GDN passes start-up and one request differs from eight. No flag here."""
    path = f"vllm/v1/attention/backends/{backend}.py"
    assert "supports_batch_invariance" not in patched(path)
