"""The two arms of the expert patches: each test runs upstream's own function, as released and as patched."""
import enum
import types

import pytest
import torch
from upstream_source import define, patched, stock

from vllm.zero_mismatch.experts_deepgemm import MASKED_EXPECTED_M
from vllm.zero_mismatch.silu_mul_quant import gated_silu_quant_contiguous, gated_silu_quant_masked

MOE = "vllm/model_executor/layers/fused_moe/"
ORACLE = MOE + "oracle/fp8.py"
CONTIGUOUS = MOE + "experts/deep_gemm_moe.py"
MASKED = MOE + "experts/batched_deep_gemm_moe.py"
ALL2ALL = MOE + "all2all_utils.py"

Backend = enum.Enum("Backend", """AITER FLASHINFER_TRTLLM FLASHINFER_CUTLASS DEEPGEMM VLLM_CUTLASS TRITON MARLIN HUMMING
    BATCHED_DEEPGEMM BATCHED_VLLM_CUTLASS BATCHED_TRITON XPU CPU_W8A8 CPU HPC""")
Scale = enum.Enum("DeepGemmQuantScaleFMT", "FLOAT32 FLOAT32_CEIL_UE8M0 UE8M0")
Activation = enum.Enum("MoEActivation", "SILU SWIGLUOAI_UNINTERLEAVE SWIGLUSTEP")
HOPPER = types.SimpleNamespace(
    is_cuda=lambda: True, is_xpu=lambda: False, is_cpu=lambda: False, fp8_dtype=lambda: torch.float8_e4m3fn,
    is_device_capability=lambda c: c == 90, is_device_capability_family=lambda c: c == 90,
)


def _envs(batch_invariant=True):
    return types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)


def _first_backend(source, ep_size=1, batch_invariant=True, weight="block"):
    scope = {
        "envs": _envs(batch_invariant), "Fp8MoeBackend": Backend, "current_platform": HOPPER, "FusedMoEConfig": object,
        "QuantKey": object, "kFp8Dynamic128Sym": "act", "kFp8Static128BlockSym": "block",
        "prioritize_humming": lambda backends: backends,
    }
    parallel = types.SimpleNamespace(use_deepep_v2_kernels=False, ep_size=ep_size)
    config = types.SimpleNamespace(moe_parallel_config=parallel)
    return define(source, ["_get_priority_backends"], scope)["_get_priority_backends"](config, weight, "act")


@pytest.mark.parametrize("ep_size", [1, 8])
def test_deepgemm_comes_first(ep_size):
    assert _first_backend(patched(ORACLE), ep_size)[:2] == [Backend.DEEPGEMM, Backend.BATCHED_DEEPGEMM]


@pytest.mark.parametrize("ep_size,first", [(1, Backend.TRITON), (8, Backend.FLASHINFER_CUTLASS)])
def test_stock_order_depends_on_expert_parallelism(ep_size, first):
    """Counter-test: as released, SM90 prefers another backend, and which one depends on the layout."""
    assert _first_backend(stock(ORACLE), ep_size)[0] == first
    assert _first_backend(patched(ORACLE), ep_size, batch_invariant=False) == _first_backend(stock(ORACLE), ep_size)


def test_other_quantisations_keep_their_order():
    assert _first_backend(patched(ORACLE), weight="tensor") == _first_backend(stock(ORACLE), weight="tensor")


def _declares(source, name):
    method = f"{name}._supports_batch_invariance"
    if "_supports_batch_invariance" not in source:
        return False  # modular_kernel.py: the base class answers False
    return define(source, [method], {"Base": object})[name]._supports_batch_invariance()


@pytest.mark.parametrize("path,name", [(CONTIGUOUS, "DeepGemmExperts"), (MASKED, "BatchedDeepGemmExperts")])
def test_deepgemm_declares_batch_invariance(path, name):
    assert _declares(patched(path), name)
    assert not _declares(stock(path), name)


def _expected_m(source, tokens, batch_invariant=True):
    step = types.SimpleNamespace(dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([tokens])))
    scope = {
        "envs": _envs(batch_invariant), "Base": object, "get_forward_context": lambda: step,
        "is_forward_context_available": lambda: True, "round_up": lambda n, m: -(-n // m) * m,
    }
    experts = define(source, ["BatchedDeepGemmExperts.estimate_expected_m"], scope)["BatchedDeepGemmExperts"]()
    return experts.estimate_expected_m(global_num_experts=8, max_tokens_per_expert=1024, topk=6)


def test_expected_rows_do_not_follow_the_step():
    assert {_expected_m(patched(MASKED), tokens) for tokens in (1, 64, 900)} == {MASKED_EXPECTED_M}


def test_stock_expected_rows_follow_the_step():
    stock_values = [_expected_m(stock(MASKED), tokens) for tokens in (1, 64, 900)]
    assert len(set(stock_values)) == 3
    assert [_expected_m(patched(MASKED), tokens, False) for tokens in (1, 64, 900)] == stock_values


def _contiguous_activation(source, rows, batch_invariant=True):
    """(what _act_mul_quant returns, the upstream kernel it would call)"""
    own = []
    scope = {
        "torch": torch, "envs": _envs(batch_invariant), "Base": object, "MoEActivation": Activation,
        "DeepGemmQuantScaleFMT": types.SimpleNamespace(
            from_oracle=lambda: Scale.FLOAT32_CEIL_UE8M0, UE8M0=Scale.UE8M0,
            FLOAT32_CEIL_UE8M0=Scale.FLOAT32_CEIL_UE8M0,
        ),
        "silu_mul_per_token_group_quant_fp8_colmajor": lambda **kwargs: own.append(kwargs["clamp_limit"]),
    }
    experts = define(source, ["DeepGemmExperts._act_mul_quant"], scope)["DeepGemmExperts"]()
    experts.block_shape, experts.gemm1_clamp_limit = [128, 128], 10.0
    experts.gemm1_alpha, experts.gemm1_beta = 1.0, 0.0
    experts.adjust_N_for_activation = lambda n, _: n // 2
    codes = torch.empty(len(rows), rows.shape[1] // 2, dtype=torch.float8_e4m3fn)
    return experts._act_mul_quant(rows, codes, Activation.SILU), own


def _rows(*shape):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()


def test_contiguous_experts_call_the_one_activation():
    rows = _rows(8, 512)
    (codes, scales), own = _contiguous_activation(patched(CONTIGUOUS), rows)
    want_codes, want_scales = gated_silu_quant_contiguous(rows, scale_format="FLOAT32_CEIL_UE8M0", limit=10.0)
    assert own == [] and torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert torch.equal(scales, want_scales)


def test_stock_contiguous_experts_call_upstreams_activation():
    for source, batch_invariant in ((stock(CONTIGUOUS), True), (patched(CONTIGUOUS), False)):
        assert _contiguous_activation(source, _rows(8, 512), batch_invariant)[1] == [10.0]


def _masked_apply(source, rows, counts, batch_invariant=True):
    """BatchedDeepGemmExperts.apply with GEMMs that pass: (second GEMM's input, calls of upstream's activation)."""
    own, gemms = [], []

    def gemm(lhs, weights, out, num_tokens, expected):
        gemms.append(lhs)
        if len(gemms) == 1:
            out.copy_(rows)

    def activation(y, tokens, quant_scale_fmt):
        own.append(quant_scale_fmt.name)
        return None, None

    scope = {
        "torch": torch, "envs": _envs(batch_invariant), "Base": object, "MoEActivation": Activation,
        "mk": types.SimpleNamespace(ExpertTokensMetadata=object), "_resize_cache": lambda _, shape: torch.empty(
            shape, dtype=torch.bfloat16),
        "DeepGemmQuantScaleFMT": types.SimpleNamespace(from_oracle=lambda: Scale.FLOAT32_CEIL_UE8M0),
        "fp8_m_grouped_gemm_nt_masked": gemm, "persistent_masked_m_silu_mul_quant": activation,
    }
    experts = define(source, ["BatchedDeepGemmExperts.apply"], scope)["BatchedDeepGemmExperts"]()
    experts.block_shape, experts.w1_scale, experts.w2_scale = [128, 128], None, None
    experts.estimate_expected_m = lambda **_: 64
    experts.moe_problem_size = lambda *_: (*rows.shape, 256, None)
    experts.quant_config = types.SimpleNamespace(gemm1_clamp_limit=10.0)
    experts.apply(
        None, torch.empty(*rows.shape[:2], 256), torch.empty(len(rows), rows.shape[2], 256),
        torch.empty(len(rows), 256, rows.shape[2] // 2), None, torch.zeros(1, 6), Activation.SILU, len(rows), None,
        None,
        None, None, None, types.SimpleNamespace(expert_num_tokens=counts), False,
    )
    return gemms[1], own


COUNTS = torch.tensor([3, 0, 4], dtype=torch.int32)


def test_masked_experts_call_the_one_activation_with_the_clamp():
    rows = _rows(3, 4, 512)
    (codes, _), own = _masked_apply(patched(MASKED), rows, COUNTS)
    want, _ = gated_silu_quant_masked(rows, COUNTS, scale_format="FLOAT32_CEIL_UE8M0", limit=10.0)
    live = torch.arange(4)[None, :] < COUNTS[:, None]
    assert own == [] and torch.equal(codes.view(torch.uint8)[live], want.view(torch.uint8)[live])


def test_stock_masked_experts_call_upstreams_activation():
    for source, batch_invariant in ((stock(MASKED), True), (patched(MASKED), False)):
        assert _masked_apply(source, _rows(3, 4, 512), COUNTS, batch_invariant)[1] == ["FLOAT32_CEIL_UE8M0"]


def _low_latency_fp8(source, batch_invariant=True):
    made = {}
    scope = {
        "envs": _envs(batch_invariant), "Any": object, "current_platform": HOPPER,
        "DEEPEP_QUANT_BLOCK_SHAPE": [128, 128],
        "DeepEPLLPrepareAndFinalize": lambda *_, **kwargs: made.update(kwargs), "FusedMoEConfig": object,
        "FusedMoEQuantConfig": object, "FusedMoEPrepareAndFinalize": object, "torch": torch,
    }
    parallel = types.SimpleNamespace(use_passthrough_all2all=False, use_all2all_kernels=True)
    moe = types.SimpleNamespace(
        moe_parallel_config=parallel, use_deepep_ht_kernels=False, use_deepep_ll_kernels=True, max_num_tokens=64,
        hidden_dim=4096, num_experts=256,
    )
    quant = types.SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])
    manager = types.SimpleNamespace(world_size=8, get_handle=lambda args: None)
    define(source, ["maybe_make_prepare_finalize"], scope)["maybe_make_prepare_finalize"](
        moe, quant, all2all_manager=manager
    )
    return made["use_fp8_dispatch"]


def test_low_latency_dispatches_bf16():
    assert _low_latency_fp8(patched(ALL2ALL)) is False
    assert _low_latency_fp8(patched(ALL2ALL), batch_invariant=False) is True


def test_stock_low_latency_quantises_while_dispatching():
    assert _low_latency_fp8(stock(ALL2ALL)) is True
