"""Humming's experts as released and as patched: what becomes of a kernel table that splits K by the batch."""
import json
import sys
import types

import pytest
from upstream_source import define, patched, stock

FILE = "vllm/model_executor/layers/fused_moe/experts/fused_humming_moe.py"
SPLIT = [[0, 48, {"block_shape": (8, 128, 128), "warp_shape": (8, 32, 64), "use_stream_k": True, "mma_type": "wgmma"}]]
WHOLE = [[0, 48, {"block_shape": (8, 128, 64), "warp_shape": (8, 32, 64), "use_stream_k": False, "mma_type": "wgmma"}]]


def _tables(source, table, monkeypatch, invariant=True):
    """Runs the method that makes the tables, Humming's answer being `table`."""
    humming = types.ModuleType("vllm.utils.humming")
    humming.get_heuristics_config = lambda **_: table
    monkeypatch.setitem(sys.modules, "vllm.utils", types.ModuleType("vllm.utils"))
    monkeypatch.setitem(sys.modules, "vllm.utils.humming", humming)
    envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=invariant, VLLM_HUMMING_USE_F16_ACCUM=False)
    made = define(source(FILE), ["HummingExpertsBase.init_humming_moe"], {"envs": envs, "json": json, "Base": object})
    experts = made["HummingExpertsBase"]()
    experts.humming_configs = {"w13": None, "w2": None}
    experts.humming_gemm_type = lambda: types.SimpleNamespace(value="indexed")
    experts.init_humming_moe()
    return experts


def test_experts_refuse_a_table_that_splits_k(monkeypatch):
    with pytest.raises(ValueError, match="Humming's kernels for w13 do not add in one order"):
        _tables(patched, SPLIT, monkeypatch)
    assert _tables(patched, WHOLE, monkeypatch).w13_tuning_config == WHOLE
    assert _tables(patched, SPLIT, monkeypatch, invariant=False).w2_tuning_config == SPLIT


def test_stock_experts_accept_a_table_that_splits_k(monkeypatch):
    assert _tables(stock, SPLIT, monkeypatch).w13_tuning_config == SPLIT
