"""On the GPU: the Top-K cases of tests/kernels, graphs, repeated runs, and vLLM's own kernels beside ours.

Widths are multiples of 16: each other stride would compile another binary of Triton's kernels. Odd ones are a case of
tests/kernels/test_topk.py.
"""
import functools
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from topk_cases import NAN, SCORES, as_lengths, assert_same_bits, check, launchers, misleading, normal, select

from vllm.zero_mismatch import topk, topk_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# A binary each, but for the second of a pair, which adds another marking kernel: [K, width, several CTAs a row].
FORMS = [[], [[512, 800, False]], [[2048, 8208, False]],
         [[512, 8208, True], [512, 40000, True]], [[2048, 8208, True], [2048, 40000, True]],
         *([[k, width, split]] for k, width in ((512, 131072), (2048, 131072), (2048, 1 << 20))
           for split in (False, True))]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if torch.cuda.is_available():
        program = pathlib.Path(__file__).with_name("compile_topk.py")
        running = [subprocess.Popen([sys.executable, program, json.dumps(forms)]) for forms in FORMS]
        assert not any([process.wait() for process in running])


def _padded(rows):
    """[rows, width] with NaN behind each row's scores, and their number."""
    width = -(-max(map(len, rows)) // 16) * 16
    logits = torch.full((len(rows), width), NAN, device="cuda")
    for row, scores in enumerate(rows):
        logits[row, :len(scores)] = scores
    return logits, as_lengths(*map(len, rows))


@functools.cache
def _every_kind(n):
    return _padded([make(n) for make in SCORES.values()])


@pytest.mark.parametrize("n", [787, 8192, 8193, 40000, 131072])
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_equals_the_sorted_composite_key(n, k):
    check(*_every_kind(n), k, f"{n} {k}, a row each of {', '.join(SCORES)}:")


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside another stream"])
def test_no_length_of_one_step_rows_slips_in_a_million_decisions(busy):
    """513 to 786 scores, K = 512: what decode sees of 2,052 to 3,147 tokens, decided by one CTA in one piece."""
    logits, lengths = _padded([make(n) for n in range(513, 787) for make in SCORES.values()])
    want = topk.top_k_reference(logits, lengths, 512)
    out = torch.empty_like(want)
    scratch = torch.full((512, topk.scratch_shape(logits.shape[1])[1]), -1, dtype=torch.int32, device="cuda")
    side, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for launch in launchers():
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(-(-1_000_000 // len(lengths))):
            if busy:
                with torch.cuda.stream(side):
                    square @ square
            out.fill_(-7)
            launch(logits, lengths, out, scratch, split=turn % 2 == 0)
            wrong += (out != want).any(1).sum()
        assert int(wrong) == 0, f"{launch.__name__}: {int(wrong)} rows of a million"


@pytest.mark.parametrize("high", [False, True])
def test_misleading_sample_is_still_exact(high):
    for n in (10496, 131072):
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
    for rows, width, k in ((3000, 2512, 512), (600, 12000, 1024), (200, 131072, 2048)):
        scores, lengths = _batch(rows, width)
        for split in (False, True):
            ours = select(scores, lengths, k, split=split)
            theirs = select(scores, lengths, k, split=split, slots=64, launch=topk.triton_top_k)
            assert_same_bits(ours, theirs, f"{rows} rows of {width} split={split}")


def test_launches_on_several_streams_do_not_meet():
    """The CUDA kernel has no workspace; Triton's has one for each caller."""
    batches = [_batch(40, 40000, seed) for seed in range(4)]
    want = [topk.top_k_reference(*batch, 512) for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    outs = [[torch.full_like(wanted, -7) for _ in range(20)] for wanted in want]
    scratch = [torch.full((64, topk.scratch_shape(40000)[1]), -1, dtype=torch.int32, device="cuda") for _ in batches]
    torch.cuda.synchronize()
    for turn in range(20):
        for number, batch in enumerate(batches):
            with torch.cuda.stream(streams[number]):
                topk.top_k(*batch, outs[number][turn], scratch[number], split=True)
    torch.cuda.synchronize()
    for number, wanted in enumerate(want):
        for turn in range(20):
            assert_same_bits(outs[number][turn], wanted, f"stream {number}, launch {turn}")


def test_a_row_of_the_output_ends_where_the_next_buffer_begins():
    scores, lengths = _batch(40, 2512)
    buffer = torch.full((40, 704), -7, dtype=torch.int32, device="cuda")
    scratch = torch.empty(40, topk.scratch_shape(2512)[1], dtype=torch.int32, device="cuda")
    for launch in launchers():
        launch(scores, lengths, buffer[:, 50:562], scratch)
        assert_same_bits(buffer[:, 50:562], topk.top_k_reference(scores, lengths, 512))
        assert bool((buffer[:, :50] == -7).all() and (buffer[:, 562:] == -7).all())


def test_hundred_runs_give_the_same_bits():
    """vllm PR #55122: slots handed out by atomics vary the order in every call, and the set where scores tie."""
    scores, lengths = _batch(64, 40000)
    for launch in launchers():
        first = select(scores, lengths, 2048, split=True, slots=64, launch=launch)
        for _ in range(100):
            assert_same_bits(select(scores, lengths, 2048, split=True, slots=64, launch=launch), first, "run to run")


def test_prefill_equals_decode():
    """A causal chunk of one request against the same rows decoded one at a time in a padded batch."""
    scores, _ = _batch(300, 9312)
    lengths = torch.arange(9001, 9301, dtype=torch.int32, device="cuda")
    prefill = select(scores, lengths, 512)
    for row in (0, 1, 150, 299):
        crowd, crowd_lengths = _batch(33, 16384, seed=row)
        crowd[7, :9312], crowd_lengths[7] = scores[row], lengths[row]
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
