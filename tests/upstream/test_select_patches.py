"""The two arms of the fixed-selection patches: each test runs upstream's own function, as released and as patched."""
import importlib.util
import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from upstream_source import define, patched, stock

from vllm.zero_mismatch import mhc
from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32

GATE = "vllm/model_executor/layers/fused_moe/router/gate_linear.py"
ATTENTION = [("vllm/models/deepseek_v4/attention.py", 2), ("vllm/models/deepseek_v41/attention.py", 1)]  # call sites
LOGITS = "vllm/model_executor/layers/logits_processor.py"


def _envs(batch_invariant=True):
    return types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant, VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD=1024)


def _operands(m, n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator).bfloat16(), torch.randn(n, k, generator=generator).bfloat16()


def _same_bits(got, want):
    assert got.dtype == want.dtype == torch.float32
    return torch.equal(got.view(torch.int32), want.view(torch.int32))


class _ReplicatedLinear:
    """Upstream's base class under batch invariance: F.linear in the weight's type."""

    return_bias = False

    def forward(self, x):
        return F.linear(x, self.weight)


def _gate_forward(source, x, weight, batch_invariant=True):
    scope = {"torch": torch, "envs": _envs(batch_invariant), "Base": _ReplicatedLinear}
    gate = define(source, ["GateLinear._return", "GateLinear.forward"], scope)["GateLinear"]()
    for tier in ("ll_bf16", "rocm_bf16x3_router", "fp32_router", "ll_fp32w", "bf16x3_router", "cublas_router"):
        setattr(gate, f"allow_{tier}_gemm", False)
    gate.weight, gate.out_dtype = weight, torch.float32
    gate.is_unquantized = gate._router_gemm_no_bias = True
    return gate.forward(x)


def test_patched_gate_keeps_fp32_logits():
    x, weight = _operands(3, 64, 256)
    assert _same_bits(_gate_forward(patched(GATE), x, weight), bi_mm_fp32(x, weight))


def test_stock_gate_rounds_logits_to_bf16():
    x, weight = _operands(3, 64, 256)
    logits = _gate_forward(stock(GATE), x, weight)
    assert _same_bits(logits, logits.bfloat16().float()), "stock logits carry 8 bits of significand"
    assert not _same_bits(logits, bi_mm_fp32(x, weight))


def test_gate_is_untouched_without_batch_invariance():
    x, weight = _operands(3, 64, 256)
    assert _same_bits(_gate_forward(patched(GATE), x, weight, False), _gate_forward(stock(GATE), x, weight, False))


class _CublasCalls:
    """Stands for the torch module: counts mm calls, which the CPU build cannot run with an out_dtype."""

    Tensor, float32 = torch.Tensor, torch.float32

    def __init__(self):
        self.count = 0

    def mm(self, x, weight, out_dtype):
        self.count += 1
        return (x.float() @ weight.float()).to(out_dtype)


class _WeightsProj:
    """The indexer's linear layer: counts its calls."""

    def __init__(self):
        self.weight, self.count = _operands(1, 16, 128, seed=2)[1], 0

    def __call__(self, hidden_states):
        self.count += 1
        return hidden_states @ self.weight.T, None


def _project(source, batch_invariant=True):
    x, weight = _operands(5, 64, 128)
    _, index_weight = _operands(5, 32, 128, seed=1)
    calls = _CublasCalls()
    scope = {
        "torch": calls,
        "envs": _envs(batch_invariant),
        "Base": object,
        "execute_in_parallel": lambda main, aux, *_, **__: (main(), tuple(f() if f else None for f in aux)),
    }
    name = "DeepseekV4Attention"
    layer = define(source, [f"{name}._run_parallel_input_projections"], scope)[name]()

    def compressor(w):
        return types.SimpleNamespace(fused_wkv_wgate=types.SimpleNamespace(weight=w))

    layer.aux_stream_list, layer.ln_events = None, [None] * 4
    layer.compressor = compressor(weight)
    layer.indexer = types.SimpleNamespace(weights_proj=_WeightsProj(), compressor=compressor(index_weight))
    layer._fused_wqa_wkv_gemm = lambda h: h
    out = layer._run_parallel_input_projections(x)
    scores = [t for t in out[1:] if t is not None and t.dtype == torch.float32]
    return calls.count, scores, [(x, weight), (x, index_weight)], (layer.indexer.weights_proj, x, out[-1])


@pytest.mark.parametrize("path,sites", ATTENTION)
def test_patched_compressors_project_with_bi_mm_fp32(path, sites):
    cublas, scores, operands, _ = _project(patched(path))
    assert cublas == 0 and len(scores) == sites
    assert all(_same_bits(score, bi_mm_fp32(*pair)) for score, pair in zip(scores, operands, strict=False))


@pytest.mark.parametrize("path,sites", ATTENTION)
def test_stock_compressors_project_with_cublas(path, sites):
    assert _project(stock(path))[0] == sites, "batch invariance does not reach the out_dtype overload"
    assert _project(patched(path), batch_invariant=False)[0] == sites, "the patch must be free when off"


@pytest.mark.parametrize("path", [path for path, _ in ATTENTION])
def test_patched_indexer_weights_are_bi_mm_fp32_rounded_once(path):
    layer, x, weights = _project(patched(path))[3]
    assert layer.count == 0 and weights.dtype == x.dtype == torch.bfloat16
    assert torch.equal(weights.view(torch.int16), bi_mm_fp32(x, layer.weight).bfloat16().view(torch.int16))


@pytest.mark.parametrize("path", [path for path, _ in ATTENTION])
def test_stock_indexer_weights_call_the_linear_layer(path):
    assert _project(stock(path))[3][0].count == 1
    assert _project(patched(path), batch_invariant=False)[3][0].count == 1, "the patch must be free when off"


class _OnCuda(torch.Tensor):
    """A CPU tensor that says it is on the GPU, to reach the branch."""

    is_cuda = True


def _head(source, batch_invariant=True):
    x, weight = _operands(6, 96, 128)
    calls = _CublasCalls()
    scope = {"torch": calls, "F": F, "envs": _envs(batch_invariant), "Base": object,
             "UnquantizedEmbeddingMethod": types.SimpleNamespace, "UnquantizedLinearMethod": types.SimpleNamespace,
             "current_platform": types.SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False)}
    processor = define(source, ["LogitsProcessor._apply_head"], scope)["LogitsProcessor"]()
    processor.head_dtype = torch.float32
    lm_head = types.SimpleNamespace(weight=weight, quant_method=types.SimpleNamespace())
    logits = processor._apply_head(lm_head, x.view(2, 3, -1).as_subclass(_OnCuda), None)
    return calls.count, logits.as_subclass(torch.Tensor), bi_mm_fp32(x, weight).view(2, 3, -1)


def test_patched_fp32_head_is_bi_mm_fp32():
    cublas, logits, want = _head(patched(LOGITS))
    assert cublas == 0 and _same_bits(logits, want)


def test_stock_fp32_head_is_cublas():
    assert _head(stock(LOGITS))[0] == 1
    assert _head(patched(LOGITS), batch_invariant=False)[0] == 1, "the patch must be free when off"


KERNELS = "vllm/model_executor/kernels/mhc/tilelang_kernels.py"
H200_SMS = 132
TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 1024, 8192)


def _stub(monkeypatch, name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, module)


def _mhc_kernels(monkeypatch, tmp_path, source, batch_invariant=True):
    """Upstream's whole module, with upstream's own warm-up tracer and stand-ins for TileLang and the platform."""
    platform = types.SimpleNamespace(
        is_arch_support_pdl=lambda: False,
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        has_device_capability=lambda capability: False,
    )
    _stub(monkeypatch, "vllm.envs", **vars(_envs(batch_invariant)))
    monkeypatch.setattr(sys.modules["vllm"], "envs", sys.modules["vllm.envs"], raising=False)
    _stub(monkeypatch, "vllm.platforms", current_platform=platform)
    _stub(monkeypatch, "vllm.tilelang_utils", T=None, tilelang=None, tilelang_jit=lambda kernel: kernel)
    _stub(monkeypatch, "vllm.utils.math_utils", cdiv=lambda a, b: -(-a // b))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=H200_SMS)
    )
    warmup = "vllm.model_executor.warmup"
    for name in (f"{warmup}.jit_warmup", f"{warmup}.jit_warmup_tilelang_helper"):
        _load(monkeypatch, tmp_path, name, stock(name.replace(".", "/") + ".py"))
    return _load(monkeypatch, tmp_path, "mhc_under_test", source)


def _load(monkeypatch, folder, name, source):
    """From a real file: upstream's warm-up tracer reads the source of what it traces."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def _splits(module, k=16384):
    return {module.compute_num_split(64, k, -(-tokens // 64)) for tokens in TOKENS}


def test_patched_mhc_split_ignores_the_number_of_tokens(monkeypatch, tmp_path):
    module = _mhc_kernels(monkeypatch, tmp_path, patched(KERNELS))
    assert _splits(module, 16384) == _splits(module, 4096) == {mhc.SPLITS}


def test_stock_mhc_split_follows_the_number_of_tokens(monkeypatch, tmp_path):
    assert _splits(_mhc_kernels(monkeypatch, tmp_path, stock(KERNELS))) == {64, 44, 33, 8, 1}
    off = _mhc_kernels(monkeypatch, tmp_path, patched(KERNELS), batch_invariant=False)
    assert len(_splits(off)) > 1, "the patch must be free when off"


def _paths(module):
    return {tokens: module.mhc_fused_post_pre_split_config(tokens, 4096, 4) is not None for tokens in TOKENS}


def test_patched_mhc_never_takes_the_small_batch_path(monkeypatch, tmp_path):
    module = _mhc_kernels(monkeypatch, tmp_path, patched(KERNELS))
    assert not any(_paths(module).values())
    assert module.mhc_fused_post_pre_splits(4096, 4) == ()


def test_stock_mhc_changes_path_at_33_tokens(monkeypatch, tmp_path):
    expected = {tokens: tokens <= 32 for tokens in TOKENS}
    assert _paths(_mhc_kernels(monkeypatch, tmp_path, stock(KERNELS))) == expected
    assert _paths(_mhc_kernels(monkeypatch, tmp_path, patched(KERNELS), batch_invariant=False)) == expected


def _warmup_keys(module):
    config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8192))
    epilogue = module._MHC_PRE_BIG_FUSE_TILELANG_KERNEL.get_warmup_keys(
        config, hidden_size=4096, hc_mult=4, use_norm_weight=True, include_pre_gemm_splits=True,
        include_broadcast_splits=True, rms_eps=1e-6, hc_pre_eps=1e-6, hc_sinkhorn_eps=1e-6, hc_post_mult_value=2.0,
        sinkhorn_repeat=20, norm_eps=(1e-6, 1e-6), broadcast_norm_eps=1e-6,
    )  # fmt: skip
    fused = module._MHC_FUSED_TILELANG_KERNEL.get_warmup_keys(config, hidden_size=4096, hc_mult=4)
    return epilogue, fused


def test_patched_mhc_warmup_compiles_only_what_runs(monkeypatch, tmp_path):
    epilogue, fused = _warmup_keys(_mhc_kernels(monkeypatch, tmp_path, patched(KERNELS)))
    assert {key.n_splits for key in epilogue} == {mhc.SPLITS}
    assert fused == []
    before, fused_before = _warmup_keys(_mhc_kernels(monkeypatch, tmp_path, stock(KERNELS)))
    assert len(epilogue) == 2 and len(before) == 36 and len(fused_before) == 2, "minutes of start-up at 5 to 20 s each"


V41_MHC, V41_MEGA = (f"vllm/models/deepseek_v41/nvidia/ops/{name}.py" for name in ("mhc", "mega_mhc"))


def _v41_paths_on_blackwell(read, batch_invariant=True):
    """(overlap on a side stream, Mega-mHC) as upstream's predicates answer on SM100 with DeepGEMM."""
    config = types.SimpleNamespace(hidden_size=5120, hc_mult=4)
    vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=config),
        parallel_config=types.SimpleNamespace(use_ubatching=False),
    )
    scope = {
        "envs": _envs(batch_invariant),
        "current_platform": types.SimpleNamespace(is_device_capability_family=lambda family: family == 100),
        "is_deep_gemm_supported": lambda: True,
        "_import_deep_gemm": lambda: types.SimpleNamespace(mega_mhc=lambda: None),
    }
    overlap = define(read(V41_MHC), ["supports_mhc_overlap"], dict(scope))["supports_mhc_overlap"]
    mega = define(read(V41_MEGA), ["is_mega_mhc_supported"], dict(scope))["is_mega_mhc_supported"]
    return overlap(vllm_config), mega(config.hidden_size, config.hc_mult)


def test_patched_v41_mhc_has_one_path_on_blackwell():
    assert _v41_paths_on_blackwell(patched) == (False, False)


def test_stock_v41_mhc_has_three_paths_on_blackwell():
    assert _v41_paths_on_blackwell(stock) == (True, True)
    assert _v41_paths_on_blackwell(patched, batch_invariant=False) == (True, True), "the patch must be free when off"


LINEAR = "vllm/model_executor/kernels/linear/__init__.py"


def _dense_fp8_kernel(source, installed, linear_backend="auto", batch_invariant=True):
    """The name of the kernel that upstream's own selector takes for a [1024, 4096] block-FP8 weight on CUDA."""
    order = ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel", "CutlassKernel")

    def kernel(name):
        supported = name in installed, "is not installed"
        return type(name, (types.SimpleNamespace,), {
            "is_supported": staticmethod(lambda capability: supported),
            "can_implement": staticmethod(lambda config: (True, None)),
        })  # fmt: skip

    kernels = {name: kernel(name) for name in order}
    per_group = types.SimpleNamespace(scale=types.SimpleNamespace(group_shape=types.SimpleNamespace(
        is_per_group=lambda: True)))  # fmt: skip
    envs = _envs(batch_invariant)
    envs.VLLM_DISABLED_KERNELS = []
    scope = {
        "envs": envs,
        "current_platform": types.SimpleNamespace(
            is_cuda=lambda: True, is_rocm=lambda: False, _enum="cuda", get_device_capability=lambda: (9, 0)
        ),
        "logger": types.SimpleNamespace(info_once=lambda *a, **k: None, warning_once=lambda *a, **k: None),
        "FP8ScaledMMLinearLayerConfig": types.SimpleNamespace,
        "FP8ScaledMMLinearKernel": type("FP8ScaledMMLinearKernel", (), {}),
        "_POSSIBLE_FP8_BLOCK_KERNELS": {"cuda": list(kernels.values())},
        "_LINEAR_BACKEND_KERNEL_MAP": {"deep_gemm": {kernels[order[1]]}, "cutlass": {kernels[order[2]]}},
        "prioritize_humming": lambda possible, capability: possible,
        "_get_linear_backend": lambda quantization: linear_backend,
        **kernels,
    }
    names = ["init_fp8_linear_kernel", "choose_scaled_mm_linear_kernel", "is_supported_and_can_implement_kernel",
             "_resolve_backend_kernels", "_filter_kernels_by_backend"]  # fmt: skip
    choose = define(source, names, scope)["init_fp8_linear_kernel"]
    kernels[order[0]].__init__ = kernels[order[1]].__init__ = kernels[order[2]].__init__ = lambda self, config: None
    return type(choose(per_group, None, torch.bfloat16, torch.bfloat16, (1024, 4096))).__name__


ALL_INSTALLED = {"FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel", "CutlassKernel"}
NO_FLASHINFER = ALL_INSTALLED - {"FlashInferFp8DeepGEMMDynamicBlockScaledKernel"}


def test_patched_dense_fp8_is_deepgemm():
    chosen = {_dense_fp8_kernel(patched(LINEAR), installed) for installed in (ALL_INSTALLED, NO_FLASHINFER)}
    assert chosen == {"DeepGemmFp8BlockScaledMMKernel"}
    explicit = _dense_fp8_kernel(patched(LINEAR), ALL_INSTALLED, linear_backend="cutlass")
    assert explicit == "CutlassKernel", "a user's choice is kept; the start-up policy judges it"


def test_stock_dense_fp8_depends_on_installed_packages():
    chosen = [_dense_fp8_kernel(stock(LINEAR), installed) for installed in (ALL_INSTALLED, NO_FLASHINFER)]
    assert len(set(chosen)) == 2
    off = _dense_fp8_kernel(patched(LINEAR), ALL_INSTALLED, batch_invariant=False)
    assert off == chosen[0], "the patch must be free when off"


INDEXER_Q = "vllm/models/deepseek_v4/nvidia/ops/fused_indexer_q_cutedsl.py"
INDEXER_Q_KERNELS = ("IndexerQFp8Kernel", "IndexerQMxFp4Kernel")


def _indexer_q_coarsen(source, name, batch_invariant=True):
    """(heads a thread at each number of tokens, heads a thread that the warm-up compiles)."""
    scope = {"envs": _envs(batch_invariant), "Base": object, "torch": torch,
             "torch_to_cute_dtype": lambda dtype: dtype, "Float32": None, "BFloat16": None}  # fmt: skip
    methods = [f"{name}.{method}" for method in ("dispatch", "get_warmup_keys", "__call__")]
    kernel = define(source, methods, scope)[name]()
    kernel.CompileKey = types.SimpleNamespace
    launched = {}
    for tokens in (1, 511, 512, 8192):
        tensor = torch.empty(tokens, 64, 128, dtype=torch.float8_e4m3fn, device="meta")
        wanted = inspect.signature(kernel.__call__).parameters
        arguments = {key: 1.0 if key.endswith("_scale") and key.startswith("weights") else tensor for key in wanted}
        launched[tokens] = kernel(**arguments)[0].coarsen
    warmed = {}
    kernel._trace_dispatch = lambda dispatch: lambda **fields: warmed.update(fields) or []
    _warm(kernel)
    return launched, warmed["coarsen"]


def _warm(kernel):
    config = types.SimpleNamespace(index_n_heads=64, index_head_dim=128, qk_rope_head_dim=64)
    indexer = types.ModuleType("vllm.v1.attention.backends.mla.indexer")
    uses_fp4 = type(kernel).__name__ == "IndexerQMxFp4Kernel"
    indexer.dsa_indexer_uses_fp4 = lambda vllm_config: uses_fp4
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.backends.mla"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, indexer.__name__, indexer)
        kernel.get_warmup_keys(types.SimpleNamespace(
            model_config=types.SimpleNamespace(hf_config=config),
            attention_config=types.SimpleNamespace(indexer_sparse_logits=False),
        ))  # fmt: skip


@pytest.mark.parametrize("name", INDEXER_Q_KERNELS)
def test_patched_indexer_q_has_one_kernel(name):
    launched, warmed = _indexer_q_coarsen(patched(INDEXER_Q), name)
    assert set(launched.values()) == {1} and warmed == 1, "and start-up compiles no other"


@pytest.mark.parametrize("name", INDEXER_Q_KERNELS)
def test_stock_indexer_q_changes_kernel_at_512_tokens(name):
    expected = ({1: 1, 511: 1, 512: 4, 8192: 4}, (1, 4))
    assert _indexer_q_coarsen(stock(INDEXER_Q), name) == expected
    assert _indexer_q_coarsen(patched(INDEXER_Q), name, batch_invariant=False) == expected


MODEL = "vllm/models/deepseek_v4/nvidia/model.py"


def _mega_moe_gates(source, batch_invariant=True):
    """Which gate a native MegaMoE layer runs at each number of tokens."""
    taken = {}
    routed = (None, None)
    scope = {
        "envs": _envs(batch_invariant),
        "Base": object,
        "fused_topk_bias": lambda **_: taken.update({tokens: "GateLinear"}) or routed,
        "bf16_mega_gate": lambda *_, **__: taken.update({tokens: "bf16_mega_gate"}) or routed,
    }
    layer = define(source, ["DeepseekV4MoE.forward"], scope)["DeepseekV4MoE"]()

    class Gate:
        tid2eid = bias_vl = e_score_correction_bias = None
        weight = torch.empty(256, 64)

        def __call__(self, hidden_states):
            return hidden_states, None

    layer.gate, layer.use_native_mega_moe, layer.shared_experts = Gate(), True, None
    for name in ("scoring_func", "n_activated_experts", "renormalize", "hash_indices_dtype", "routed_scaling_factor",
                 "image_sentinel_lo", "ep_rank"):  # fmt: skip
        setattr(layer, name, None)

    class Experts:  # with 0.32.0's backend, which has the gate there
        has_fused_shared_experts = True
        _backend = types.SimpleNamespace(supports_bf16_mega_gate=lambda: True, bf16_mega_gate=scope["bf16_mega_gate"])
        _ensure_backend = staticmethod(lambda: None)

        def __call__(self, hidden_states, *_, **__):
            return hidden_states

    layer.experts, layer.swiglu_limit = Experts(), None
    metadata = types.SimpleNamespace(image_token_mask=None)
    for tokens in (1, 16, 17, 256):
        layer.forward(torch.zeros(tokens, 64), mega_gate_metadata=metadata)
    return taken


def test_patched_mega_moe_gate_has_one_path():
    assert set(_mega_moe_gates(patched(MODEL)).values()) == {"GateLinear"}


def test_stock_mega_moe_gate_changes_path_at_17_tokens():
    expected = {1: "GateLinear", 16: "GateLinear", 17: "bf16_mega_gate", 256: "bf16_mega_gate"}
    assert _mega_moe_gates(stock(MODEL)) == expected
    assert _mega_moe_gates(patched(MODEL), batch_invariant=False) == expected, "the patch must be free when off"


O_PROJ = "vllm/models/deepseek_v41/nvidia/ops/o_proj.py"


def _wo_a_fusable(source, batch_invariant=True):
    class Cutedsl:
        pass

    scope = {
        "envs": _envs(batch_invariant),
        "current_platform": types.SimpleNamespace(is_device_capability_family=lambda family: family == 100),
        "get_input_quant_key": lambda layer: "mxfp8",
        "kMxfp8Dynamic": "mxfp8",
        "FlashInferCutedslMxfp8LinearKernel": Cutedsl,
    }
    layer = types.SimpleNamespace(
        wo_b=types.SimpleNamespace(scheme=types.SimpleNamespace(kernel=Cutedsl()), quant_method=None),
        _einsum_recipe=(1, 1, 32), n_local_heads=64, n_local_groups=8, nope_head_dim=448, rope_head_dim=64,
        o_lora_rank=1024,
    )  # fmt: skip
    return define(source, ["_can_fuse_wo_a"], scope)["_can_fuse_wo_a"](layer)


def test_patched_wo_a_is_never_fused():
    assert _wo_a_fusable(patched(O_PROJ)) is False


def test_stock_wo_a_is_fused_for_small_batches():
    assert _wo_a_fusable(stock(O_PROJ)) is True
    assert _wo_a_fusable(patched(O_PROJ), batch_invariant=False) is True, "the patch must be free when off"
