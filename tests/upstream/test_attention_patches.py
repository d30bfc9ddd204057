"""The two arms of the attention patches: each test runs upstream's own function, as released and as patched."""
import types
from typing import cast

import pytest
import torch
from upstream_source import define, patched, stock

V4 = "vllm/models/deepseek_v4/nvidia/flashmla.py"
V41 = "vllm/models/deepseek_v41/nvidia/flashmla.py"
SPARSE = "vllm/models/deepseek_v4/sparse_mla.py"
CACHE = "vllm/config/cache.py"
LAYER = "DeepseekV4FlashMLAAttention"


def _envs(batch_invariant=True):
    return types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)


class _Decode:
    """Stands for zero_mismatch's PrefillDecode: notes what the layer hands over."""

    def __init__(self):
        self.calls = []

    def reserve(self):
        self.calls.append("reserve")

    def run(self, q, positions, output, cache, metadata, swa_metadata):
        self.calls.append((len(q), len(positions), len(output), cache, metadata))


def _forward(source, prefill_decode, decode_tokens, prefill_tokens, ratio, profiling=False):
    """Which parts of forward_mqa run for a mixed batch; (calls of PrefillDecode, calls of upstream's own methods)."""
    swa = types.SimpleNamespace(
        num_decodes=decode_tokens, num_prefills=min(prefill_tokens, 1),
        num_decode_tokens=decode_tokens, num_prefill_tokens=prefill_tokens,
    )
    context = types.SimpleNamespace(attn_metadata=None if profiling else {"layer": "meta", "swa": swa})
    manager = types.SimpleNamespace(get_simultaneous=lambda *shapes: shapes)
    scope = {
        "torch": torch, "cast": cast, "Base": object, "get_forward_context": lambda: context,
        "DeepseekV4FlashMLAMetadata": str, "round_up": lambda n, m: -(-n // m) * m,
        "current_workspace_manager": lambda: manager,
    }
    layer = define(source, [f"{LAYER}.forward_mqa"], scope)[LAYER]()
    own = []
    layer._forward_decode = lambda q, **_: own.append(("decode", len(q)))
    layer._forward_prefill = lambda q, **_: own.append(("prefill", len(q)))
    layer._prefill_decode = prefill_decode
    layer.prefix = layer.compressed_cache_prefix = "layer"
    layer.compress_ratio, layer.kv_cache, layer._compressed_kv_cache = ratio, "cache", lambda: "cache"
    layer.swa_cache_layer = types.SimpleNamespace(prefix="swa", kv_cache="window")
    layer.use_pcp, layer.window_size, layer.max_image_tokens, layer.PREFILL_CHUNK_SIZE = False, 128, 0, 4
    layer.max_model_len, layer.max_num_batched_tokens = 4096, 512
    layer.topk_indices_buffer = torch.empty(8, 512)
    tokens = decode_tokens + prefill_tokens
    q = torch.empty(tokens, 64, 512)
    layer.forward_mqa(q, q, torch.arange(tokens), torch.empty_like(q))
    return prefill_decode.calls if prefill_decode else [], own


@pytest.mark.parametrize("path,ratio", [(V4, 4), (V4, 128), (V41, 1), (V41, 2)])
def test_decode_tokens_run_through_prefill(path, ratio):
    calls, own = _forward(patched(path), _Decode(), decode_tokens=5, prefill_tokens=7, ratio=ratio)
    assert calls == [(5, 5, 5, "cache", "meta")] and own == [("prefill", 7)]


@pytest.mark.parametrize("path,ratio", [(V4, 1), (V41, 0)])
def test_sliding_layers_decode_through_prefill(path, ratio):
    calls, own = _forward(patched(path), _Decode(), decode_tokens=5, prefill_tokens=0, ratio=ratio)
    assert [call[:4] for call in calls] == [(5, 5, 5, None)] and own == []


@pytest.mark.parametrize("path", [V4, V41])
def test_workspace_is_reserved_while_profiling(path):
    assert _forward(patched(path), _Decode(), 3, 0, ratio=1, profiling=True)[0] == ["reserve"]


@pytest.mark.parametrize("path,ratio", [(V4, 4), (V41, 1)])
def test_stock_decodes_with_another_kernel(path, ratio):
    """Counter-test: as released, and without batch invariance, decode has its own method."""
    for source in (stock(path), patched(path)):
        calls, own = _forward(source, None, decode_tokens=5, prefill_tokens=7, ratio=ratio)
        assert calls == [] and sorted(own) == [("decode", 5), ("prefill", 7)]


def _list_width(source, max_seq_len, batch_invariant=True):
    """The width that the ratio-128 metadata is built with."""
    seen = {}

    def build(*args, max_compressed_tokens, **_):
        seen["width"] = max_compressed_tokens
        return torch.empty(2, max_compressed_tokens), torch.empty(2), torch.empty(0)

    scope = {
        "torch": torch, "envs": _envs(batch_invariant), "Base": object, "_C128A_TOPK_ALIGNMENT": 128,
        "triton": types.SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length()),
        "split_decodes_and_prefills": lambda *_, **__: (2, 0, 2, 0), "build_c128a_topk_metadata": build,
        "CommonAttentionMetadata": object,
    }
    name = "DeepseekV4SparseMLAMetadataBuilder"
    builder = define(source, [f"{name}._build_c128a_metadata"], scope)[name]()
    builder.reorder_batch_threshold, builder.compress_ratio, builder.c128a_max_compressed = 1, 128, 8192
    builder.kv_cache_spec = types.SimpleNamespace(block_size=256)
    builder.c128a_global_decode_buffer = builder.c128a_decode_lens_buffer = builder.c128a_prefill_buffer = None
    step = types.SimpleNamespace(
        max_seq_len=max_seq_len, positions=torch.arange(2), block_table_tensor=torch.zeros(2, 4), slot_mapping=None
    )
    builder._build_c128a_metadata(step, None)
    return seen["width"]


LENGTHS = [100, 40_000, 300_000, 1_000_000]


def test_patched_c128a_width_is_a_model_limit():
    assert {_list_width(patched(SPARSE), length) for length in LENGTHS} == {8192}


def test_stock_c128a_width_follows_the_batch():
    """Counter-test: a longer neighbour widens the list; FlashMLA's SM100 kernel changes at 1280."""
    widths = [_list_width(stock(SPARSE), length) for length in LENGTHS]
    assert widths[0] < 1280 < widths[-1]
    assert [_list_width(patched(SPARSE), length, False) for length in LENGTHS] == widths


def _replay(source, batch_invariant=True):
    name = "CacheConfig"
    methods = ["_recompute_no_window_after_a_hit"] if "_recompute_no_window_after_a_hit" in source else []
    scope = {"envs": _envs(batch_invariant), "Base": object}
    config = define(source, [f"{name}.{method}" for method in methods], scope).get(name, types.SimpleNamespace)()
    config.swa_bounded_replay = True
    for method in methods:
        getattr(config, method)()
    return config.swa_bounded_replay


def test_replay_is_off_under_batch_invariance():
    assert _replay(patched(CACHE)) is False
    assert _replay(patched(CACHE), batch_invariant=False) is True


def test_stock_replays_under_batch_invariance():
    assert _replay(stock(CACHE)) is True
