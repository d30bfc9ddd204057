"""On the GPU: the Top-K cases of tests/kernels, graphs, repeated runs, and vLLM's own kernels beside ours."""
import functools

import pytest
import torch
from topk_cases import SCORES, as_lengths, assert_same_bits, check, launchers, misleading, normal, select

from vllm.zero_mismatch import topk, topk_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("n", [787, 8192, 8193, 40000, 131072])
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_equals_the_sorted_composite_key(kind, n, k):
    check(SCORES[kind](n)[None], as_lengths(n), k, f"{kind} {n} {k}")


@pytest.mark.parametrize("high", [False, True])
def test_misleading_sample_is_still_exact(high):
    for n in (10500, 131072):
        check(misleading(n, high)[None], as_lengths(n), 2048)


def test_a_million_scores():
    check(SCORES["quantised to bf16"](1 << 20)[None], as_lengths(1 << 20), 2048)


def _batch(rows, width, seed=3):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.randn(rows, width, device="cuda", generator=generator).bfloat16().float()
    lengths = torch.randint(0, width + 1, (rows,), device="cuda", generator=generator, dtype=torch.int32)
    return scores, lengths


def test_many_rows_in_turns():
    scores, lengths = _batch(1500, 12000)
    check(scores, lengths, 1024, slots=512)


def test_cuda_equals_triton_on_every_length():
    if not topk_cuda.supports(torch.device("cuda")):
        pytest.skip("needs a GPU with clusters (SM90)")
    for rows, width, k in ((3000, 2500, 512), (600, 20000, 1024), (200, 140000, 2048)):
        scores, lengths = _batch(rows, width)
        for split in (False, True):
            ours = select(scores, lengths, k, split=split)
            theirs = select(scores, lengths, k, split=split, slots=64, launch=topk.triton_top_k)
            assert_same_bits(ours, theirs, f"{rows} rows of {width} split={split}")


def test_a_row_of_the_output_ends_where_the_next_buffer_begins():
    scores, lengths = _batch(40, 3000)
    buffer = torch.full((40, 700), -7, dtype=torch.int32, device="cuda")
    scratch = torch.empty(40, topk.scratch_shape(3000)[1], dtype=torch.int32, device="cuda")
    for launch in launchers():
        launch(scores, lengths, buffer[:, 50:562], scratch)
        assert_same_bits(buffer[:, 50:562], topk.top_k_reference(scores, lengths, 512))
        assert bool((buffer[:, :50] == -7).all() and (buffer[:, 562:] == -7).all())


def test_hundred_runs_give_the_same_bits():
    scores, lengths = _batch(64, 40000)
    first = select(scores, lengths, 2048, split=True, slots=64)
    for _ in range(100):
        assert_same_bits(select(scores, lengths, 2048, split=True, slots=64), first, "run to run")


def test_prefill_equals_decode():
    """A causal chunk of one request against the same rows decoded one at a time in a padded batch."""
    scores, _ = _batch(300, 9300)
    lengths = torch.arange(9001, 9301, dtype=torch.int32, device="cuda")
    prefill = select(scores, lengths, 512)
    for row in (0, 1, 150, 299):
        crowd, crowd_lengths = _batch(33, 16384, seed=row)
        crowd[7, :9300], crowd_lengths[7] = scores[row], lengths[row]
        assert_same_bits(select(crowd, crowd_lengths, 512, split=True, slots=33)[7], prefill[row], f"row {row}")


def test_graph_replay_equals_eager():
    """Captured with short rows, replayed with long ones and with padding: the grid must not depend on the content."""
    rows, width, k = 70, 40000, 512
    scores, _ = _batch(rows, width)
    lengths = torch.full((rows,), 10, dtype=torch.int32, device="cuda")
    out = torch.full((rows, k), -7, dtype=torch.int32, device="cuda")
    scratch = torch.full((64, topk.scratch_shape(width)[1]), -1, dtype=torch.int32, device="cuda")
    topk.top_k(scores, lengths, out, scratch, split=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk.top_k(scores, lengths, out, scratch, split=True)
    for seed in range(5):
        fresh, fresh_lengths = _batch(rows, width, seed)
        fresh_lengths[60:] = 0
        scores.copy_(fresh)
        lengths.copy_(fresh_lengths)
        graph.replay()
        assert_same_bits(out, topk.top_k_reference(fresh, fresh_lengths, k), f"replay {seed}")


@functools.cache
def _vllm():
    pytest.importorskip("vllm._custom_ops", reason="needs vLLM's compiled kernels")
    if not hasattr(torch.ops._C, "top_k_per_row_prefill"):
        pytest.skip("this vLLM has no indexer Top-K kernels")
    return torch.ops._C


def _stock(phase, scores, lengths, k):
    rows = scores.shape[0]
    out = torch.full((rows, k), -1, dtype=torch.int32, device="cuda")
    if phase == "prefill":
        _vllm().top_k_per_row_prefill(scores, torch.zeros_like(lengths), lengths, out, rows, scores.stride(0), 1, k)
    else:
        workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        kernel = _vllm().cooperative_topk if rows <= 64 else _vllm().persistent_topk
        kernel(scores, lengths, out, workspace, k, scores.shape[1])
    return out


@pytest.mark.parametrize("phase,rows", [("prefill", 40), ("decode", 40), ("decode", 100)])
def test_set_equals_vllms_where_nothing_ties(phase, rows):
    scores = torch.stack([torch.randperm(20000, device="cuda") for _ in range(rows)]).float()  # exact, distinct
    lengths = as_lengths(*range(20000 - rows, 20000))
    theirs = _stock(phase, scores, lengths, 512).sort(1, descending=True).values
    assert_same_bits(select(scores, lengths, 512), theirs, "the set")


def _breaks_the_contract(phase, rows):
    scores = normal(rows, 20000).bfloat16().float()
    lengths = as_lengths(*[20000] * rows)
    theirs = _stock(phase, scores, lengths, 512)
    want = topk.top_k_reference(scores, lengths, 512)
    assert not torch.equal(theirs, want), "the order is not by position"
    assert not torch.equal(theirs.sort(1, descending=True).values, want), "ties do not go to the larger position"


def test_stock_prefill_breaks_the_contract():
    _breaks_the_contract("prefill", 40)


def test_stock_decode_breaks_the_contract():
    _breaks_the_contract("decode", 40)
    _breaks_the_contract("decode", 100)


@pytest.mark.parametrize("heads", [32, 64])
def test_paged_scores_equal_contiguous_scores(heads):
    """The scores that Top-K orders: upstream's prefill and decode kernels must give them the same bits (SM90)."""
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm", reason="needs vLLM's DeepGEMM")
    if torch.cuda.get_device_capability()[0] != 9 or not deep_gemm.has_deep_gemm():
        pytest.skip("reads the FP8 indexer cache layout of SM90 through DeepGEMM")
    n, page, rows = 9001, 64, 37
    pages = (n + page - 1) // page
    keys = normal(pages * page, 128).to(torch.float8_e4m3fn)
    scales = normal(pages * page).abs() + 0.01
    cache = torch.empty(pages, page * 132, dtype=torch.uint8, device="cuda")
    cache[:, : page * 128] = keys.view(torch.uint8).view(pages, -1)
    cache[:, page * 128:] = scales.view(torch.uint8).view(pages, -1)
    shuffled = torch.randperm(pages, device="cuda")
    stored = torch.empty_like(cache)
    stored[shuffled] = cache
    stored = stored.view(pages, page, 1, 132)
    queries = normal(rows, heads, 128).to(torch.float8_e4m3fn)
    weights = normal(rows, heads)
    ends = as_lengths(*range(n - rows + 1, n + 1))
    contiguous = deep_gemm.fp8_fp4_mqa_logits((queries, None), (keys[:n], scales[:n]), weights, torch.zeros_like(ends),
                                              ends, n)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for batch in (1, 5, rows):
        lengths = ends[-batch:, None].contiguous()
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, page, sms)
        table = shuffled.to(torch.int32).expand(batch, pages).contiguous()
        paged = deep_gemm.fp8_fp4_paged_mqa_logits((queries[-batch:, None].contiguous(), None), stored,
                                                   weights[-batch:].contiguous(), lengths, table, plan, max_model_len=n)
        for row in range(batch):
            end = int(lengths[row])
            assert_same_bits(paged[row, :end].view(torch.int32),
                             contiguous[rows - batch + row, :end].view(torch.int32), f"batch {batch} row {row}")
