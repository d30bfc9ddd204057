"""The two arms of the fixed-selection patches: each test runs upstream's own function, as released and as patched."""
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parameter import Parameter
from upstream_source import define, patched, stock

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
    scope = {"torch": torch, "Parameter": Parameter, "envs": _envs(batch_invariant), "Base": _ReplicatedLinear}
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


def _project(source, batch_invariant=True):
    x, weight = _operands(5, 64, 128)
    _, index_weight = _operands(5, 32, 128, seed=1)
    calls = _CublasCalls()
    scope = {
        "torch": calls,
        "envs": _envs(batch_invariant),
        "Base": object,
        "Callable": Callable,
        "Any": Any,
        "execute_in_parallel": lambda main, aux, *_, **__: (main(), tuple(f() if f else None for f in aux)),
    }
    name = "DeepseekV4Attention"
    layer = define(source, [f"{name}._run_parallel_input_projections"], scope)[name]()

    def compressor(w):
        return types.SimpleNamespace(fused_wkv_wgate=types.SimpleNamespace(weight=w))

    layer.aux_stream_list, layer.ln_events = None, [None] * 4
    layer.compressor = compressor(weight)
    layer.indexer = types.SimpleNamespace(weights_proj=lambda h: (h, None), compressor=compressor(index_weight))
    layer._fused_wqa_wkv_gemm = lambda h: h
    out = layer._run_parallel_input_projections(x)
    return calls.count, [t for t in out[1:] if t.dtype == torch.float32], [(x, weight), (x, index_weight)]


@pytest.mark.parametrize("path,sites", ATTENTION)
def test_patched_compressors_project_with_bi_mm_fp32(path, sites):
    cublas, scores, operands = _project(patched(path))
    assert cublas == 0 and len(scores) == sites
    assert all(_same_bits(score, bi_mm_fp32(*pair)) for score, pair in zip(scores, operands, strict=False))


@pytest.mark.parametrize("path,sites", ATTENTION)
def test_stock_compressors_project_with_cublas(path, sites):
    assert _project(stock(path))[0] == sites, "batch invariance does not reach the out_dtype overload"
    assert _project(patched(path), batch_invariant=False)[0] == sites, "the patch must be free when off"


class _OnCuda(torch.Tensor):
    """A CPU tensor that says it is on the GPU, to reach the branch."""

    is_cuda = True


def _head(source, batch_invariant=True):
    x, weight = _operands(6, 96, 128)
    calls = _CublasCalls()
    scope = {"torch": calls, "F": F, "envs": _envs(batch_invariant), "Base": object, "VocabParallelEmbedding": object,
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
