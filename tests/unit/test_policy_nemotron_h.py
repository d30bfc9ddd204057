"""Nemotron-H's start-up policy on stand-in configurations: every violation is listed alone, a good engine passes."""
import dataclasses
import sys
import types

import pytest
from vllm.zero_mismatch import policy
from vllm.zero_mismatch.policy import Facts, PolicyError
from vllm.zero_mismatch.policy_nemotron_h import NEMOTRON_H

HOPPER = Facts(capability=(9, 0), deep_gemm=False, moe_deep_gemm=True)  # humming-kernels is not installed
QUANTISED = {"model_config__quantization": "modelopt_mixed", "cache_config__cache_dtype": "fp8",
             "kernel_config__linear_backend": "cutlass", "kernel_config__moe_backend": "humming"}


def _config(**changes):
    """A VllmConfig that may start; changes name "section__field" or "field"."""
    space = types.SimpleNamespace
    config = space(
        use_v2_model_runner=True, speculative_config=None, lora_config=None, kv_transfer_config=None,
        watermark_config=None,
        model_config=space(
            architectures=["NemotronHForCausalLM"], dtype="torch.bfloat16", quantization=None,
            get_mamba_chunk_size=lambda: 128,
            hf_config=space(mamba_num_heads=64, mamba_head_dim=64, n_groups=8, ssm_state_size=128)),
        parallel_config=space(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, use_ubatching=False, enable_eplb=False, enable_elastic_ep=False),
        mamba_config=space(backend=space(name="TRITON"), enable_stochastic_rounding=False),
        cache_config=space(
            use_replayssm=False, mamba_ssm_cache_dtype="float32", mamba_cache_dtype="auto", block_size=16,
            user_specified_block_size=False, prefix_match_unit=None, cache_dtype="auto"),
        attention_config=space(backend=space(name="TRITON_ATTN")),
        compilation_config=space(mode=0, custom_ops=["all"]),
        kernel_config=space(linear_backend="auto", linear_backend_per_quant=None, moe_backend="auto"),
    )  # fmt: skip
    for path, value in changes.items():
        *owner, field = path.split("__")
        target = config
        for part in owner:
            target = getattr(target, part)
        setattr(target, field, value)
    return config


BROKEN = {
    "VLLM_USE_V2_MODEL_RUNNER": {"use_v2_model_runner": False},
    "--tensor-parallel-size": {"parallel_config__tensor_parallel_size": 2},
    "--pipeline-parallel-size": {"parallel_config__pipeline_parallel_size": 2},
    "--data-parallel-size": {"parallel_config__data_parallel_size": 2},
    "--decode-context-parallel-size": {"parallel_config__decode_context_parallel_size": 2},
    "--prefill-context-parallel-size": {"parallel_config__prefill_context_parallel_size": 2},
    "--enable-dbo / --ubatch-size": {"parallel_config__use_ubatching": True},
    "--enable-eplb": {"parallel_config__enable_eplb": True},
    "--enable-elastic-ep": {"parallel_config__enable_elastic_ep": True},
    "--speculative-config": {"speculative_config": "mtp"},
    "--enable-lora": {"lora_config": "any"},
    "--kv-transfer-config / --kv-offloading-size": {"kv_transfer_config": "any"},
    "watermarking": {"watermark_config": "any"},
    "--mamba-backend": {"mamba_config__backend": types.SimpleNamespace(name="FLASHINFER")},
    "--enable-mamba-cache-stochastic-rounding": {"mamba_config__enable_stochastic_rounding": True},
    "--use-replayssm": {"cache_config__use_replayssm": True},
    "--mamba-ssm-cache-dtype": {"cache_config__mamba_ssm_cache_dtype": "float16"},
    "--mamba-cache-dtype": {"cache_config__mamba_cache_dtype": "float16"},
    "--block-size": {"cache_config__user_specified_block_size": True, "cache_config__block_size": 1000},
    "--prefix-match-unit": {"cache_config__prefix_match_unit": 32},
    "Mamba-2 sizes": {"model_config__hf_config__mamba_head_dim": 80},
    "--attention-backend": {"attention_config__backend": None},
    "--kv-cache-dtype": {"cache_config__cache_dtype": "fp8_e5m2"},
    "torch.compile": {"compilation_config__mode": 3},
    "custom_ops": {"compilation_config__custom_ops": ["all", "-rms_norm"]},
    "--linear-backend": {"kernel_config__linear_backend": "marlin"},
    "--moe-backend": {"kernel_config__moe_backend": "humming"},
    "Humming": QUANTISED,
    "--dtype": {"model_config__dtype": "torch.float16"},
    "quantization": {**QUANTISED, "model_config__quantization": "modelopt_fp4"},
}


def _settings(config, facts=HOPPER):
    return [violation.setting for violation in policy.violations(config, facts)]


def test_a_supported_engine_may_start():
    assert _settings(_config()) == []


def test_every_rule_has_a_case_here():
    assert [rule.setting for rule in NEMOTRON_H.rules] == ["GPU", *BROKEN]


@pytest.mark.parametrize("setting", BROKEN)
def test_each_violation_is_found_alone(setting):
    facts = dataclasses.replace(HOPPER, humming="usable") if setting == "quantization" else HOPPER
    assert _settings(_config(**BROKEN[setting]), facts) == [setting]


def test_another_gpu_is_refused():
    assert _settings(_config(), Facts((8, 0), False, True)) == ["GPU"]


def test_all_violations_come_in_one_error(monkeypatch):
    monkeypatch.setattr(policy, "_facts", lambda: Facts(None, False, False))
    with pytest.raises(PolicyError) as error:
        changes = {path: value for case in BROKEN.values() for path, value in case.items()}
        policy.enforce(_config(**changes | BROKEN["--linear-backend"] | {"kernel_config__moe_backend": "marlin",
                                                                         "cache_config__cache_dtype": "fp8_e5m2"}))
    text = str(error.value)
    assert len(error.value.violations) == len(NEMOTRON_H.rules)
    for rule in NEMOTRON_H.rules:
        assert f"{rule.setting}: found" in text and rule.expected in text and rule.remedy in text


@pytest.mark.parametrize("changes", [
    {"cache_config__user_specified_block_size": True, "cache_config__block_size": 1024},
    {"cache_config__prefix_match_unit": 256},
    {"kernel_config__moe_backend": "triton"},
])
def test_aligned_blocks_are_welcome(changes):
    assert _settings(_config(**changes)) == []


USABLE = dataclasses.replace(HOPPER, humming="usable")


def test_the_quantised_checkpoint_is_welcome_on_its_proven_kernels():
    assert _settings(_config(**QUANTISED), USABLE) == []


@pytest.mark.parametrize("experts", ["auto", "marlin", "triton", "emulation"])
def test_quantised_experts_run_on_humming_alone(experts):
    assert _settings(_config(**QUANTISED | {"kernel_config__moe_backend": experts}), USABLE) == ["--moe-backend"]


@pytest.mark.parametrize("linear", ["auto", "marlin", "humming"])
def test_fp8_projections_run_on_cutlass_alone(linear):
    assert _settings(_config(**QUANTISED | {"kernel_config__linear_backend": linear}), USABLE) == ["--linear-backend"]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("attention", ["FLASH_ATTN", "FLASHINFER"])
def test_other_attention_is_refused_for_either_cache(cache, attention):
    changes = {"cache_config__cache_dtype": cache, "attention_config__backend": types.SimpleNamespace(name=attention)}
    assert _settings(_config(**changes)) == ["--attention-backend"]


def _humming(installed=True, **changes):
    envs = types.SimpleNamespace(VLLM_HUMMING_USE_F16_ACCUM=False, VLLM_HUMMING_INPUT_QUANT_CONFIG=None,
                                 VLLM_HUMMING_MOE_GEMM_TYPE=None)
    vars(envs).update(changes)
    module = types.ModuleType("vllm.utils.import_utils")
    module.has_humming = lambda: installed
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm.utils", types.ModuleType("vllm.utils"))
        patch.setitem(sys.modules, "vllm.utils.import_utils", module)
        return policy._humming(envs)


def test_humming_is_usable_at_its_defaults_alone():
    assert _humming() == _humming(VLLM_HUMMING_MOE_GEMM_TYPE="indexed") == "usable"
    assert _humming(installed=False) == "not installed"
    assert _humming(VLLM_HUMMING_USE_F16_ACCUM=True) == "VLLM_HUMMING_USE_F16_ACCUM"
    assert _humming(VLLM_HUMMING_INPUT_QUANT_CONFIG={"dtype": "int8"}) == "VLLM_HUMMING_INPUT_QUANT_CONFIG"
    assert _humming(VLLM_HUMMING_MOE_GEMM_TYPE="grouped") == "VLLM_HUMMING_MOE_GEMM_TYPE"
