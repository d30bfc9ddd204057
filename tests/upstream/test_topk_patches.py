"""The two arms of the Top-K patches: each test runs upstream's own function, as released and as patched."""
import types

import pytest
import torch
from topk_stubs import CANDIDATES, INDEXER, Called, IndexerMetadata, K, envs, run_indexer, stops
from upstream_source import define, patched, stock

from vllm.zero_mismatch import indexer_topk, topk

DECODE = "vllm/model_executor/layers/indexer_topk.py"
ATTENTION = ["vllm/models/deepseek_v4/attention.py", "vllm/models/deepseek_v41/attention.py"]
COOPERATIVE = "vllm/models/deepseek_v41/nvidia/specialized_decode/attention/candidate_topk.py"


def _prefill_metadata(rows, width):
    ends = torch.arange(width - rows + 1, width + 1, dtype=torch.int32)
    chunk = types.SimpleNamespace(
        cu_seqlen_ks=torch.zeros_like(ends), cu_seqlen_ke=ends, local_cu_seq_lens=ends, max_local_total_seq_lens=width,
        local_total_seq_lens=width, skip_kv_gather=False, token_start=0, token_end=rows, pcp_deinterleave_idx=None,
        max_seqlen_k=width, block_table=None)
    prefill = types.SimpleNamespace(chunks=[chunk])
    metadata = IndexerMetadata(slot_mapping=ends, num_decodes=0, num_prefills=1, num_decode_tokens=0, prefill=prefill)
    return metadata, ends


def test_patched_prefill_calls_the_deterministic_top_k(manager):
    logits = torch.randn(5, 40).round()
    metadata, ends = _prefill_metadata(5, 40)
    out = torch.full((5, K), -7, dtype=torch.int32)
    run_indexer(patched(INDEXER), manager, None, logits, out, True)  # the profiling run reserves the workspace
    run_indexer(patched(INDEXER), manager, metadata, logits, out, True)
    assert torch.equal(out, topk.top_k_reference(logits, ends, K))


def test_stock_prefill_calls_vllms_kernel(manager):
    logits, (metadata, _) = torch.randn(5, 40), _prefill_metadata(5, 40)
    for source, batch_invariant in ((stock(INDEXER), True), (patched(INDEXER), False)):
        out = torch.full((5, K), -7, dtype=torch.int32)
        run_indexer(source, manager, None, logits, out, batch_invariant)
        assert not manager.resources, "off, nothing is reserved"
        with pytest.raises(Called, match="top_k_per_row_prefill"):
            run_indexer(source, manager, metadata, logits, out, batch_invariant)


def _decode(source, batch_invariant, logits, lengths, next_n=1):
    out = torch.full((logits.shape[0], K), -7, dtype=torch.int32)
    scope = {"torch": torch, "envs": envs(batch_invariant), "Base": object}
    layer = define(source, ["SparseIndexerTopk.forward"], scope)["SparseIndexerTopk"]()
    layer.resolve_backend = stops("resolve_backend")
    layer.forward(logits, lengths, next_n, out, K, 40)
    return out


def test_patched_decode_calls_the_deterministic_top_k(manager):
    indexer_topk.reserve(40, K, torch.device("cpu"))
    logits, lengths = torch.randn(6, 40).round(), torch.tensor([[40], [9]], dtype=torch.int32)
    want = topk.top_k_reference(logits, lengths, K, next_n=3)
    assert torch.equal(_decode(patched(DECODE), True, logits, lengths, next_n=3), want)


def test_stock_decode_picks_a_kernel_by_the_number_of_rows(manager):
    scope = {"torch": torch, "envs": envs(True), "Base": object, "AUTO_COOPERATIVE_MAX_ROWS": 64}
    layer = define(stock(DECODE), ["SparseIndexerTopk._resolve_auto", "SparseIndexerTopk._cooperative_constraints"],
                   scope)["SparseIndexerTopk"]()
    layer._is_cuda = layer._cooperative_capable = True
    assert {rows: layer._resolve_auto(torch.zeros(rows, 8), 512, rows) for rows in (64, 65)} == {
        64: "cooperative", 65: "persistent"}
    for source, batch_invariant in ((stock(DECODE), True), (patched(DECODE), False)):
        with pytest.raises(Called):
            _decode(source, batch_invariant, torch.randn(2, 40), torch.tensor([40, 9], dtype=torch.int32))


def _shortcut(source, batch_longest, model_longest, batch_invariant):
    """What the indexer layer writes without scoring, or None if it goes on to score."""
    positions = torch.tensor([3, 30, 12])
    buffer = torch.full((3, K), -7, dtype=torch.int32)

    class Fill:
        def __getitem__(self, grid):
            def launch(out, at, TOP_K, COMPRESS_RATIO, **_):
                rank = torch.arange(TOP_K)
                out.copy_(torch.where(rank < ((at + 1) // COMPRESS_RATIO)[:, None], rank, -1))

            return launch

    metadata = types.SimpleNamespace(max_seq_len=batch_longest, num_decode_tokens=3, num_prefill_tokens=0)
    eager = types.SimpleNamespace(is_current_stream_capturing=lambda: False)
    scope = {"torch": types.SimpleNamespace(cuda=eager), "envs": envs(batch_invariant), "Base": object,
             "cast": lambda _, value: value,
             "get_forward_context": lambda: types.SimpleNamespace(attn_metadata={"cache": metadata}),
             "_fill_short_context_topk_indices": Fill(), "triton": topk.triton,
             "Any": None}
    layer = define(source, ["DeepseekV4Indexer.forward"], scope)["DeepseekV4Indexer"]()
    layer.k_cache, layer.compress_ratio, layer.topk_tokens = types.SimpleNamespace(prefix="cache"), 4, K
    layer.max_model_len, layer.topk_indices_buffer = model_longest // 4, buffer
    layer.owns_k, layer.compressor = False, None
    layer.forward_q = layer._wq_b_proj = stops("scoring")
    given = {"qr": None, "indexer_weights": None, "positions": positions, "rotary_emb": None}
    v4 = {"hidden_states": None, "compressed_kv_score": None, "skip_compressor": True}
    try:
        layer.forward(**given, **({"latent": None} if "latent" in layer.forward.__annotations__ else v4))
    except Called:
        return None
    return buffer


LENGTHS = torch.tensor([1, 7, 3], dtype=torch.int32)  # (position + 1) // 4


@pytest.mark.parametrize("path", ATTENTION)
def test_patched_shortcut_ignores_the_batch(path):
    for batch_longest in (31, 400):
        filled = _shortcut(patched(path), batch_longest, model_longest=35, batch_invariant=True)
        assert torch.equal(filled, topk.top_k_reference(torch.zeros(3, K), LENGTHS, K)), "the order of Top-K"
        assert _shortcut(patched(path), batch_longest, model_longest=400, batch_invariant=True) is None


@pytest.mark.parametrize("path", ATTENTION)
def test_stock_shortcut_follows_the_batch(path):
    for source, batch_invariant in ((stock(path), True), (patched(path), False)):
        filled = _shortcut(source, 31, model_longest=400, batch_invariant=batch_invariant)
        assert filled[1].tolist() == [0, 1, 2, 3, 4, 5, 6, -1], "ascending"
        assert _shortcut(source, 400, model_longest=400, batch_invariant=batch_invariant) is None


class _BlockScores:
    """Stands for upstream's kernel: the maximum of each block, the newest block first. 0.32.0's counts no blocks."""

    def __init__(self, block):
        self.block = block

    def __getitem__(self, grid):
        return self.launch

    def launch(self, x, starts, ends, scores, *rest, **options):
        valid = (ends + self.block - 1) // self.block
        if isinstance(rest[0], torch.Tensor):
            rest[0].copy_(valid)
        padded = torch.where(torch.arange(x.shape[1]) < ends[:, None], x, -float("inf"))
        padded = torch.nn.functional.pad(padded, (0, -x.shape[1] % self.block), value=-float("inf"))
        scores.copy_(padded.view(x.shape[0], -1, self.block).amax(2))
        scores[torch.arange(x.shape[0]), valid.long() - 1] = float("inf")


def _candidates(source, batch_invariant, logits, ends, block):
    out = torch.full((logits.shape[0], K), -7, dtype=torch.int32)
    on_cuda = logits.as_subclass(type("OnCuda", (torch.Tensor,), {"is_cuda": True}))
    scope = {"torch": types.SimpleNamespace(Tensor=torch.Tensor, empty=torch.empty, int32=torch.int32),
             "envs": envs(batch_invariant), "triton": topk.triton, "has_deep_select": lambda: False,
             "_block_scores_kernel": _BlockScores(block), "_store_candidates_kernel": {(3, 1): stops("torch.topk")}}
    define(source, ["select_candidate_blocks"], scope)["select_candidate_blocks"](on_cuda, None, ends, K, block, out)
    return out


def test_patched_candidate_blocks_call_the_deterministic_top_k(manager):
    indexer_topk.reserve(200, K, torch.device("cpu"))
    ends = torch.tensor([200, 160, 3], dtype=torch.int32)
    out = _candidates(patched(CANDIDATES), True, torch.zeros(3, 200), ends, 16)
    assert out.tolist() == [list(range(12, 4, -1)), list(range(9, 1, -1)), [0] + [-1] * 7]


def test_stock_candidate_blocks_call_torch_topk(manager):
    ends = torch.tensor([200, 160, 3], dtype=torch.int32)
    for source, batch_invariant in ((stock(CANDIDATES), True), (patched(CANDIDATES), False)):
        with pytest.raises(Called, match=r"torch\.topk"):
            _candidates(source, batch_invariant, torch.zeros(3, 200), ends, 16)


def test_patched_specialised_decode_never_takes_the_approximate_kernel():
    scope = {"AUTO_COOPERATIVE_MAX_ROWS": 64}
    for batch_invariant, taken in ((True, False), (False, True)):
        scope["envs"] = envs(batch_invariant)
        supports = define(patched(COOPERATIVE), ["supports_cooperative_candidates"], scope)
        assert supports["supports_cooperative_candidates"](8, 64, 512) is taken
    stock_supports = define(stock(COOPERATIVE), ["supports_cooperative_candidates"], dict(scope))
    assert stock_supports["supports_cooperative_candidates"](8, 64, 512)
