"""The start-up policy on stand-in configurations: every violation is listed, none is lost, a good engine passes."""
import types

import pytest

from vllm.zero_mismatch import policy
from vllm.zero_mismatch.policy import Facts, PolicyError

HOPPER = Facts(capability=(9, 0), deep_gemm=True, moe_deep_gemm=True)


def _namespace(**fields):
    return types.SimpleNamespace(**fields)


def _config(**changes):
    """A VllmConfig that may start; changes name "section.field" or "field"."""
    config = _namespace(
        use_v2_model_runner=True,
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        watermark_config=None,
        model_config=_namespace(
            architectures=["DeepseekV4ForCausalLM"],
            dtype="torch.bfloat16",
            quantization="deepseek_v4_fp8",
            hf_config=_namespace(expert_dtype="fp8", n_routed_experts=256, num_experts_per_tok=6),
        ),
        parallel_config=_namespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_expert_parallel=False,
            all2all_backend="allgather_reducescatter",
            use_ubatching=False,
            enable_eplb=False,
            enable_elastic_ep=False,
        ),
        attention_config=_namespace(
            backend=None,
            backend_per_kind={},
            indexer_kv_dtype="auto",
            indexer_sparse_logits=False,
            hisparse_config=None,
        ),
        cache_config=_namespace(
            cache_dtype="auto", kv_cache_dtype_skip_layers=[], swa_bounded_replay=False, kv_sharing_fast_prefill=False
        ),
        kernel_config=_namespace(linear_backend="auto", linear_backend_per_quant=None, moe_backend="auto"),
    )
    for path, value in changes.items():
        owner, _, field = path.rpartition("__")
        target = config
        for part in owner.split("__") if owner else ():
            target = getattr(target, part)
        setattr(target, field, value)
    return config


def _settings(config, facts=HOPPER):
    return [violation.setting for violation in policy.violations(config, facts)]


BROKEN = {
    # sglang PR #24654: each rank runs the Top-K, and ranks that choose differently add up sums of different rows
    "--tensor-parallel-size": {"parallel_config__tensor_parallel_size": 8},
    "--pipeline-parallel-size": {"parallel_config__pipeline_parallel_size": 2},
    "--decode-context-parallel-size": {"parallel_config__decode_context_parallel_size": 2},
    "--prefill-context-parallel-size": {"parallel_config__prefill_context_parallel_size": 2},
    "--all2all-backend": {
        "parallel_config__data_parallel_size": 8,
        "parallel_config__enable_expert_parallel": True,
        "parallel_config__all2all_backend": "nixl_ep",
    },
    "--enable-dbo / --ubatch-size": {"parallel_config__use_ubatching": True},
    "--enable-eplb": {"parallel_config__enable_eplb": True},
    "--enable-elastic-ep": {"parallel_config__enable_elastic_ep": True},
    "VLLM_USE_V2_MODEL_RUNNER": {"use_v2_model_runner": False},
    "--speculative-config": {"speculative_config": "mtp"},
    "--enable-lora": {"lora_config": "any"},
    "--kv-transfer-config / --kv-offloading-size": {"kv_transfer_config": "any"},
    "watermarking": {"watermark_config": "any"},
    "--attention-backend": {"attention_config__backend": _namespace(name="FLASHINFER_MLA_SPARSE_DSV4")},
    "attention_config.backend_per_kind": {"attention_config__backend_per_kind": {"full": "TRITON_ATTN"}},
    "--kv-cache-dtype": {"cache_config__cache_dtype": "bfloat16"},
    "--kv-cache-dtype-skip-layers": {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
    "--swa-bounded-replay": {"cache_config__swa_bounded_replay": True},
    "--kv-sharing-fast-prefill": {"cache_config__kv_sharing_fast_prefill": True},
    "attention_config.indexer_kv_dtype": {"attention_config__indexer_kv_dtype": "mxfp4"},
    "attention_config.indexer_sparse_logits": {"attention_config__indexer_sparse_logits": True},
    "attention_config.hisparse_config": {"attention_config__hisparse_config": "any"},
    "--linear-backend": {"kernel_config__linear_backend": "cutlass"},
    "--moe-backend": {"kernel_config__moe_backend": "triton"},
    "--dtype": {"model_config__dtype": "torch.float16"},
    "quantization": {"model_config__quantization": "fp8"},
    "expert_dtype": {"model_config__hf_config__expert_dtype": "fp4"},
    "n_routed_experts, num_experts_per_tok": {"model_config__hf_config__n_routed_experts": 128},
    "vision_n_layers": {"model_config__hf_config__vision_n_layers": 4},
}
BROKEN_MACHINE = {
    "GPU": Facts(capability=(8, 0), deep_gemm=True, moe_deep_gemm=True),
    "DeepGEMM": Facts(capability=(9, 0), deep_gemm=False, moe_deep_gemm=True),
    "VLLM_MOE_USE_DEEP_GEMM": Facts(capability=(9, 0), deep_gemm=True, moe_deep_gemm=False),
}


def test_a_supported_engine_may_start():
    assert _settings(_config()) == []


def test_every_rule_has_a_case_here():
    assert {rule.setting for rule in policy.DEEPSEEK_V4.rules} == {*BROKEN, *BROKEN_MACHINE}
    assert len({rule.setting for rule in policy.DEEPSEEK_V4.rules}) == len(policy.DEEPSEEK_V4.rules)


@pytest.mark.parametrize("setting", BROKEN)
def test_each_violation_is_found_alone(setting):
    assert _settings(_config(**BROKEN[setting])) == [setting]


@pytest.mark.parametrize("setting", BROKEN_MACHINE)
def test_each_machine_violation_is_found_alone(setting):
    assert _settings(_config(), BROKEN_MACHINE[setting]) == [setting]


def test_all_violations_come_in_one_error_with_found_expected_and_remedy(monkeypatch):
    changes = {path: value for case in BROKEN.values() for path, value in case.items()}
    nothing = Facts(capability=None, deep_gemm=False, moe_deep_gemm=False)
    monkeypatch.setattr(policy, "_facts", lambda: nothing)
    with pytest.raises(PolicyError) as error:
        policy.enforce(_config(**changes))
    text = str(error.value)
    assert len(error.value.violations) == len(policy.DEEPSEEK_V4.rules) == text.count("expected ")
    for rule in policy.DEEPSEEK_V4.rules:
        assert f"{rule.setting}: found" in text and rule.expected in text and rule.remedy in text
    assert f"{len(policy.DEEPSEEK_V4.rules)} setting(s)" in text


def test_a_setting_that_this_vllm_lacks_is_a_violation_not_a_pass():
    config = _config()
    del config.attention_config.indexer_sparse_logits
    (violation,) = policy.violations(config, HOPPER)
    assert violation.setting == "attention_config.indexer_sparse_logits" and "nothing to read" in violation.found


@pytest.mark.parametrize("backend", ["deep_gemm", "auto"])
def test_deepgemm_is_welcome_by_name(backend):
    config = _config(kernel_config__linear_backend=backend, kernel_config__moe_backend=backend,
                     kernel_config__linear_backend_per_quant={"fp8_block_w8a8": backend})  # fmt: skip
    assert _settings(config) == []


def test_an_override_for_one_scheme_is_seen():
    config = _config(kernel_config__linear_backend_per_quant={"fp8_block_w8a8": "triton"})
    assert _settings(config) == ["--linear-backend"]


def test_expert_parallel_over_low_latency_deepep_may_start():
    config = _config(parallel_config__data_parallel_size=8, parallel_config__enable_expert_parallel=True,
                     parallel_config__all2all_backend="deepep_low_latency")  # fmt: skip
    assert _settings(config) == []
    config.parallel_config.enable_expert_parallel = False
    assert _settings(config) == ["--all2all-backend"], "without expert parallelism ranks hold slices of each expert"


def test_v41_on_blackwell_must_name_its_attention_backend():
    blackwell = Facts(capability=(10, 0), deep_gemm=True, moe_deep_gemm=True)
    config = _config(model_config__architectures=["DeepseekV41ForCausalLM"])
    assert _settings(config, HOPPER) == []
    assert _settings(config, blackwell) == ["--attention-backend"]
    config.attention_config.backend = _namespace(name="FLASHMLA_SPARSE_DSV41")
    assert _settings(config, blackwell) == []


@pytest.mark.parametrize("model", [None, _namespace(architectures=["Qwen3ForCausalLM"])])
def test_other_models_are_left_to_upstream(model):
    config = _namespace(model_config=model)  # no other field is read
    assert policy.violations(config, HOPPER) == []
    policy.enforce(config)
