"""What the patches for vLLM 0.32.0 do otherwise than those for 0.33.0, and that the answer is the same."""
from __future__ import annotations

import ast
import importlib.util
import math
import sys
import types

import pytest
import torch
import upstream_source
from topk_stubs import CANDIDATES, INDEXER, IndexerMetadata, K, envs, run_indexer
from upstream_source import define, patched, stock

from vllm.zero_mismatch import indexer_topk, topk

PLATFORM = "vllm/platforms/interface.py"
GATE = "vllm/model_executor/layers/fused_moe/router/gate_linear.py"


@pytest.fixture(autouse=True)
def release(monkeypatch):
    monkeypatch.setattr(upstream_source, "version", "0.32.0")


def _tiers(source: str, batch_invariant: bool) -> types.SimpleNamespace:
    """GateLinear's switches after what __init__ does for batch invariance, if everything else turns them on."""
    init = next(node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "__init__")
    names = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
             and (node.attr.startswith("allow_") or node.attr.endswith(("_capable", "_eligible")))}
    gate = types.SimpleNamespace(**dict.fromkeys(names, True))
    ours = [statement for statement in init.body if "VLLM_BATCH_INVARIANT" in ast.unparse(statement)]
    scope = {"self": gate, "envs": envs(batch_invariant), "can_use_specialized_kernels": True}
    exec(compile(ast.Module(ours, []), "<upstream>", "exec"), scope)
    gate.allow_specialized_router_gemm = gate.allow_ll_bf16_gemm = scope["can_use_specialized_kernels"]
    return gate


def test_every_tier_of_the_gate_is_off_and_stays_off_when_the_output_type_comes_late():
    gate = _tiers(patched(GATE), batch_invariant=True)
    assert len(vars(gate)) == 8 and not any(vars(gate).values()), vars(gate)
    layer = define(patched(GATE), ["GateLinear.set_out_dtype"], {"torch": torch, "Base": object})["GateLinear"]()
    vars(layer).update(vars(gate), out_dtype=None, weight=torch.empty(2, 2, dtype=torch.bfloat16))
    layer.set_out_dtype(torch.float32)
    assert {name: vars(layer)[name] for name in vars(gate)} == vars(gate)


def test_stock_gate_leaves_its_tiers_on_under_batch_invariance():
    assert all(vars(_tiers(stock(GATE), batch_invariant=True)).values())
    assert all(vars(_tiers(patched(GATE), batch_invariant=False)).values()), "the patch must be free when off"


def _block_alignment(source: str, batch_invariant: bool, mode: str) -> int:
    """The alignment that the platform's rule for hybrid models goes on with, from 96 tokens and chunks of 128."""
    rule = next(node for node in ast.walk(ast.parse(source)) if "mamba_page_size_padded" in ast.unparse(node)
                and isinstance(node, ast.FunctionDef) and "kernel_block_alignment_size" in ast.unparse(node))
    ours = [node for node in rule.body if isinstance(node, ast.If) and "VLLM_BATCH_INVARIANT" in ast.unparse(node.test)]
    scope = {"envs": envs(batch_invariant), "lcm": math.lcm, "kernel_block_alignment_size": 96,
             "cache_config": types.SimpleNamespace(mamba_cache_mode=mode),
             "model_config": types.SimpleNamespace(get_mamba_chunk_size=lambda: 128)}
    exec(compile(ast.Module(ours, []), "<upstream>", "exec"), scope)
    return scope["kernel_block_alignment_size"]


def test_blocks_of_cached_mamba_states_are_multiples_of_chunks():
    assert _block_alignment(patched(PLATFORM), True, "align") == 384
    assert _block_alignment(patched(PLATFORM), True, "none") == 96


def test_stock_blocks_of_cached_mamba_states_ignore_the_chunk():
    assert _block_alignment(stock(PLATFORM), True, "align") == 96
    assert _block_alignment(patched(PLATFORM), False, "align") == 96, "the patch must be free when off"


def _packed(rows: int, width: int) -> tuple[IndexerMetadata, torch.Tensor, torch.Tensor]:
    """Two requests whose scores stand side by side in one chunk."""
    starts = torch.tensor([0] * rows + [width] * rows, dtype=torch.int32)
    ends = starts + torch.arange(width - rows + 1, width + 1, dtype=torch.int32).repeat(2)
    chunk = types.SimpleNamespace(
        cu_seqlen_ks=starts, cu_seqlen_ke=ends, local_cu_seq_lens=ends, max_local_total_seq_lens=2 * width,
        local_total_seq_lens=2 * width, skip_kv_gather=False, token_start=0, token_end=2 * rows,
        pcp_deinterleave_idx=None, max_seqlen_k=width, block_table=None)
    metadata = IndexerMetadata(slot_mapping=ends, num_decodes=0, num_prefills=2, num_decode_tokens=0,
                                prefill=types.SimpleNamespace(chunks=[chunk]))
    return metadata, starts, ends


def test_prefill_counts_positions_from_a_rows_start_and_has_room_for_a_chunk(manager):
    rows, width = 5, 4000
    metadata, starts, ends = _packed(rows, width)
    half = torch.randn(rows, width).round(decimals=1)
    logits = half.repeat(2, 2)
    out = torch.full((2 * rows, K), -7, dtype=torch.int32)
    run_indexer(patched(INDEXER), manager, None, logits, out, True, chunk_width=2 * width)
    run_indexer(patched(INDEXER), manager, metadata, logits, out, True)
    assert torch.equal(out, topk.top_k_reference(logits, ends, K, starts=starts))
    assert torch.equal(out[:rows], out[rows:]), "a request is served alike wherever its scores stand"


def _candidate_module(monkeypatch, folder, version: str) -> types.ModuleType:
    """dsa/candidate_blocks.py of a release, patched, under the Triton interpreter."""
    monkeypatch.setattr(upstream_source, "version", version)
    text = patched(CANDIDATES).replace("    assert logits.is_cuda\n", "")
    stubs = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": True}, "vllm.triton_utils": {"tl": topk.tl, "triton": topk.triton},
        "vllm.model_executor.kernels.attention.dsa.sparse_mqa_logits": {"has_deep_select": None},
        "vllm.model_executor.layers.indexer_topk": dict.fromkeys(
            ["deep_select_topk", "get_deep_select_stride_requirement", "is_deep_select_supported"]),
        "vllm.utils.math_utils": {"round_up": None},
    }
    for name, contents in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules["vllm"], "envs", sys.modules["vllm.envs"], raising=False)
    place = folder / f"candidates_{version.replace('.', '_')}.py"
    place.write_text(text)
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_candidate_blocks_are_those_of_0_33(monkeypatch, tmp_path, manager, packed, repeat):
    rows, width, block = 6, 300, 16
    torch.manual_seed(0)
    logits = torch.randn(rows, width).round()  # many ties
    starts = torch.tensor([0, 40, 100, 7, 250, 299][: rows // repeat], dtype=torch.int32) if packed else None
    ends = torch.tensor([300, 290, 100, 23, 400, 300][: rows // repeat], dtype=torch.int32)
    indexer_topk.reserve(width, K, torch.device("cpu"))
    found = []
    for version in ("0.32.0", "0.33.0"):
        module = _candidate_module(monkeypatch, tmp_path, version)
        found.append(torch.full((rows, K), -7, dtype=torch.int32))
        module.select_candidate_blocks(logits, starts, ends, K, block, found[-1], repeat)
    differing = (found[0] != found[1]).nonzero()
    assert not len(differing), f"{len(differing)} differ, first at {differing[0].tolist()}: {found}"
    lengths = (ends.clamp(max=width) - (0 if starts is None else starts)).clamp(min=0)
    counts = ((lengths + block - 1) // block).repeat_interleave(repeat)
    assert (found[0] >= 0).sum(1).tolist() == counts.clamp(max=K).tolist()
