"""The two arms of the expert patches: each test runs upstream's own function, as released and as patched."""
import contextlib
import enum
import importlib.util
import pathlib
import sys
import types

import pytest
import torch
import triton
import triton.language as tl
from upstream_source import define, patched, stock

from vllm.zero_mismatch.experts_deepgemm import MASKED_EXPECTED_M
from vllm.zero_mismatch.experts_permute import places_reference
from vllm.zero_mismatch.silu_mul_quant import gated_silu_quant_contiguous, gated_silu_quant_masked

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "kernels"))
from permute_cases import EXPERTS, capacity, routing, rows_of  # noqa: E402

MOE = "vllm/model_executor/layers/fused_moe/"
ORACLE = MOE + "oracle/fp8.py"
CONTIGUOUS = MOE + "experts/deep_gemm_moe.py"
MASKED = MOE + "experts/batched_deep_gemm_moe.py"
ALL2ALL = MOE + "all2all_utils.py"
UTILS = MOE + "deep_gemm_utils.py"
mk = types.SimpleNamespace(ExpertTokensMetadata=object)

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


def _aligner(source, family=90, batch_invariant=True):
    """tokens -> (padded rows, alignment) with top-6 of 256 experts."""
    scope = {
        "envs": _envs(batch_invariant), "mk": types.SimpleNamespace(ExpertTokensMetadata=object), "round_up":
        lambda n, m: -(-n // m) * m, "current_platform": types.SimpleNamespace(
            is_device_capability_family=lambda wanted: wanted == family),
    }
    function = define(source, ["compute_aligned_M_and_alignment"], scope)["compute_aligned_M_and_alignment"]
    return lambda tokens: function(tokens, 6, 256, 128, None)


@pytest.mark.parametrize("tokens,tile", [(1, 16), (256, 16), (1024, 32), (2048, 64), (8192, 128)])
def test_experts_start_at_multiples_of_the_tile(tokens, tile):
    rows, alignment = _aligner(patched(UTILS))(tokens)
    assert alignment == tile and rows % tile == 0
    assert rows >= 6 * tokens + min(6 * tokens, 256) * (tile - 1), "the worst routing must fit"
    assert _aligner(patched(UTILS), family=100)(tokens) == _aligner(stock(UTILS))(tokens)


def test_more_tokens_never_take_less_workspace():
    """vLLM sizes the workspace by the largest step while profiling; no smaller step may want more."""
    aligned = _aligner(patched(UTILS))
    rows = [aligned(tokens)[0] for tokens in range(1, 8193)]
    assert rows == sorted(rows)


def test_stock_pads_every_expert_to_128_rows():
    """Counter-test: 1,536 rows become 34,048."""
    for source, batch_invariant in ((stock(UTILS), True), (patched(UTILS), False)):
        assert _aligner(source, batch_invariant=batch_invariant)(256) == (34048, 128)


def _grouped_arguments(source, batch_invariant=True):
    """What the contiguous experts hand to their two GEMMs."""
    seen = []
    rows = torch.zeros(64, 256)
    ends = torch.zeros(4, dtype=torch.int32)
    scope = {
        "torch": torch, "envs": _envs(batch_invariant), "Base": object, "MoEActivation": Activation, "mk": mk,
        "current_platform": HOPPER, "mk_alignment_scope": contextlib.nullcontext,
        "compute_aligned_M_and_alignment": lambda **_: (64, 16),
        "_resize_cache": lambda _, shape: rows.new_empty(shape),
        "get_mk_alignment_for_contiguous_layout": lambda: [128, 128],
        "deepgemm_moe_permute": lambda **_: (rows, None, ends, None, 16),
        "deepgemm_unpermute_and_reduce": lambda **_: None,
        "m_grouped_fp8_gemm_nt_contiguous": lambda *_, **kwargs: seen.append(kwargs),
    }
    experts = define(source, ["DeepGemmExperts.apply"], scope)["DeepGemmExperts"]()
    experts.block_shape, experts.w1_scale, experts.w2_scale, experts.mxfp8 = [128, 128], 1, 1, False
    experts.adjust_N_for_activation = lambda n, _: n // 2
    experts._act_mul_quant = lambda **_: (None, None)
    experts.apply(
        None, rows, torch.empty(4, 256, 256), torch.empty(4, 256, 128), None, torch.zeros(8, 6), Activation.SILU, 4,
        None, 1, None, torch.empty(1), torch.empty(1), None, False,
    )
    return seen


def test_kernel_does_not_follow_the_padded_rows():
    assert _grouped_arguments(patched(CONTIGUOUS)) == [{"use_psum_layout": True, "expected_m_for_psum_layout": 16}] * 2
    for source, batch_invariant in ((stock(CONTIGUOUS), True), (patched(CONTIGUOUS), False)):
        assert _grouped_arguments(source, batch_invariant) == [{"use_psum_layout": True}] * 2


def _permute(source, ids, batch_invariant=True):
    """deepgemm_moe_permute on the CPU: (place of each slot, the scatter of upstream was called)"""
    own = []
    scope = {
        "torch": torch, "envs": _envs(batch_invariant), "mk": mk, "current_platform": HOPPER,
        "get_mk_alignment_for_contiguous_layout": lambda: [128, 128],
        "compute_aligned_M_and_alignment": lambda **_: (capacity(ids.numel(), EXPERTS, 16), 16),
        "count_expert_num_tokens": lambda *_: None, "ep_scatter": lambda **_: own.append(True),
    }
    codes, scales = rows_of(len(ids), 256)
    function = define(source, ["deepgemm_moe_permute"], scope)["deepgemm_moe_permute"]
    _, _, ends, place, _ = function(codes, scales, ids, EXPERTS, None, None, use_psum_layout=True)
    return place, ends, bool(own)


def test_rows_go_to_fixed_places():
    ids = routing(9, "empty slots")[0]
    place, ends, scattered = _permute(patched(UTILS), ids)
    want_place, want_ends = places_reference(ids, EXPERTS, 16)
    assert not scattered and torch.equal(place, want_place) and torch.equal(ends, want_ends)
    for source, batch_invariant in ((stock(UTILS), True), (patched(UTILS), False)):
        assert _permute(source, ids, batch_invariant)[2]


def test_stock_places_follow_the_order_of_arrival(monkeypatch, tmp_path):
    """Counter-test: two orders in which a GPU may run the scatter's programs give a row two places."""
    stubs = {"vllm.triton_utils": {"tl": tl, "triton": triton}, "vllm.utils.math_utils": {"round_up": None},
             "vllm.utils.deep_gemm": {"get_mk_alignment_for_contiguous_layout": None},
             "vllm.model_executor.layers.fused_moe.utils": {"count_expert_num_tokens": None}}
    fused_moe = "vllm.model_executor.layers.fused_moe"
    for name in ("vllm.model_executor", "vllm.model_executor.layers", fused_moe, f"{fused_moe}.modular_kernel"):
        stubs[name] = {"modular_kernel": mk, "ExpertTokensMetadata": object}
    for name, contents in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    path = tmp_path / "stock_deep_gemm_utils.py"
    path.write_text(stock(UTILS))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    ids = routing(5, "one expert")[0]
    tokens, top_k = ids.shape
    codes, scales = torch.zeros(tokens, 128, dtype=torch.uint8), torch.zeros(tokens, 1)
    places = []
    for order in (range(tokens), reversed(range(tokens))):
        place = torch.full(ids.shape, -1, dtype=torch.int32)
        start = torch.zeros(EXPERTS, dtype=torch.int32)  # what the atomic counters begin with
        out, out_scales = torch.zeros(ids.numel(), 128, dtype=torch.uint8), torch.zeros(ids.numel(), 1)
        for token in order:  # one program a token
            one = slice(token, token + 1)
            module._fwd_kernel_ep_scatter_2[(1,)](
                1, start, codes[one], 128, 1, scales[one], 1, 1, ids[one], top_k, 1, out, 128, 1, out_scales, 1, 1,
                place[one], top_k, 1, topk_num=top_k, expert_map=None, HAS_EXPERT_MAP=False, HIDDEN_SIZE=128,
                HIDDEN_SIZE_PAD=128, SCALE_HIDDEN_SIZE=1, SCALE_HIDDEN_SIZE_PAD=1, PACK_UE8M0=False,
                SCALE_PACKED_SIZE=1, SCALE_PACKED_SIZE_PAD=1,
            )
        places.append(place)
    assert sorted(places[0].flatten().tolist()) == sorted(places[1].flatten().tolist())
    assert not torch.equal(*places)
