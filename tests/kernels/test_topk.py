"""Deterministic Top-K against its PyTorch reference; on a CPU machine through Triton's interpreter."""
import pytest
import torch
from topk_cases import (
    DEVICE,
    INF,
    NAN,
    SCORES,
    as_lengths,
    assert_same_bits,
    check,
    misleading,
    normal,
    select,
    stub_workspaces,
)

from vllm.zero_mismatch import indexer_topk, topk

@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("n,k", [(700, 512), (9000, 512), (20000, 2048)])
def test_equals_the_sorted_composite_key(kind, n, k):
    chosen = check(SCORES[kind](n)[None], as_lengths(n), k, f"{kind} {n} {k}")
    assert bool((chosen[:, 1:] < chosen[:, :-1]).all()), "descending"


@pytest.mark.parametrize("n", [0, 1, 2, 31, 511, 512, 513, 4096, 8191, 8192, 8193, 16384, 24577])
def test_every_length_around_the_edges(n):
    logits = normal(2, max(n, 1) + 3)
    logits[:, n:] = NAN
    chosen = check(logits, as_lengths(n, max(n - 1, 0)), 512, f"n={n}")
    assert int((chosen[0] >= 0).sum()) == min(n, 512) and bool((chosen[0, min(n, 512):] == -1).all()), "-1 last"


@pytest.mark.parametrize("kind", ["normal", "quantised to bf16", "plateau at the threshold", "all equal"])
def test_longest_row(kind):
    check(SCORES[kind](131072)[None], as_lengths(131072), 2048, kind)


def test_k_equal_to_the_length_takes_every_position():
    assert check(normal(1, 512), as_lengths(512), 512)[0].tolist() == list(range(511, -1, -1))


def test_small_and_odd_k():
    for k in (1, 3, 100, 600):
        check(normal(2, 9000), as_lengths(9000, 700), k, f"k={k}")


def test_ties_go_to_the_larger_position():
    logits = torch.zeros(1, 1000, device=DEVICE)
    logits[0, 3] = 1.0
    chosen = check(logits, as_lengths(1000), 512)
    assert chosen[0].tolist() == [*range(999, 488, -1), 3]


def test_torch_topk_breaks_the_contract_on_ties():
    """The counter-test: the library's Top-K neither prefers the larger position nor orders by it."""
    logits = torch.zeros(1, 1000, device=DEVICE)
    logits[0, 3] = 1.0
    theirs = logits.topk(512, dim=1).indices.to(torch.int32)
    ours = select(logits, as_lengths(1000), 512)
    assert not torch.equal(theirs, ours) and not torch.equal(theirs.sort(1, descending=True).values, ours)


def test_nan_ranks_first_whatever_its_bits_and_minus_zero_equals_zero():
    logits = torch.full((1, 600), -1.0, device=DEVICE)
    bits = logits.view(torch.int32)
    bits[0, 10], bits[0, 20], bits[0, 30] = 0x7FC00001, -0x400000, 0x7F800001  # quiet, negative, signalling
    logits[0, 40], logits[0, 50], logits[0, 60] = INF, 0.0, -0.0
    want = {1: [30], 2: [30, 20], 4: [40, 30, 20, 10], 5: [60, 40, 30, 20, 10]}
    for k, positions in want.items():
        assert check(logits, as_lengths(600), k)[0].tolist() == positions


def test_row_does_not_see_its_neighbours_or_its_padding():
    n, k = 9001, 512
    row = normal(n)
    alone = select(row[None].contiguous(), as_lengths(n), k)[0]
    for poison in (NAN, INF, -INF, 3e38):
        crowd = torch.full((5, 12000), poison, device=DEVICE)
        crowd[3, :n] = row
        for split in (False, True):
            for slots in (1, 4) if poison == INF else (3,):
                got = select(crowd, as_lengths(12000, 0, 400, n, 9000), k, split=split, slots=slots)[3]
                assert_same_bits(got, alone, f"poison {poison} split={split} slots={slots}")


def test_several_ctas_a_row_change_nothing():
    lengths = as_lengths(40000, 8193, 8192, 100, 0, 16385)
    logits = normal(6, 40000).bfloat16().float()
    assert_same_bits(select(logits, lengths, 1024, split=True), select(logits, lengths, 1024, split=False))


def test_shuffled_scores_choose_the_same_scores():
    n, k = 20000, 512
    row = normal(n)  # no ties, so the set of positions must follow the permutation
    assert row.unique().numel() > n - 50
    order = normal(n).argsort()
    first = select(row[None].contiguous(), as_lengths(n), k)[0].long()
    second = select(row[order][None].contiguous(), as_lengths(n), k)[0].long()
    assert torch.equal(row[first].sort().values, row[order][second].sort().values)


def test_bounds_are_relative_to_the_request():
    logits = normal(4, 30000)
    starts = as_lengths(0, 5, 12345, 29000)
    ends = as_lengths(30000, 5, 25000, 29400)
    chosen = check(logits, ends, 512, starts=starts)
    moved = select(logits[2:3, 12345:].contiguous(), as_lengths(25000 - 12345), 512)
    assert_same_bits(chosen[2:3], moved, "the request's place in the batch")


def test_draft_rows_share_one_length():
    check(normal(6, 9100), as_lengths(9050, 1), 512, next_n=3)


def test_bf16_scores_equal_their_fp32_values():
    scores = normal(2, 9000).bfloat16()
    want = select(scores.float(), as_lengths(9000, 600), 512)
    assert_same_bits(check(scores, as_lengths(9000, 600), 512), want)


@pytest.mark.parametrize("high", [False, True])
def test_misleading_sample_is_still_exact(high, monkeypatch):
    """The list overflows or runs short, and the row is searched in memory."""
    calls = []
    if DEVICE == "cpu":  # a compiled kernel cannot be watched
        in_memory = topk._select_in_memory
        monkeypatch.setattr(topk, "_select_in_memory", lambda *a, **k: (calls.append(1), in_memory(*a, **k)))
    check(misleading(10500, high)[None], as_lengths(10500), 2048)
    assert DEVICE == "cuda" or len(calls) == 2, "the sample did not mislead: the case tests nothing"


def test_short_context_fill_equals_top_k():
    k, ratio = 512, 4
    positions = torch.tensor([0, 2, 3, 511, 2046, 2047, 7], device=DEVICE)
    filled = torch.full((8, k), -7, dtype=torch.int32, device=DEVICE)
    topk.fill_all(filled, positions, 7, k, ratio)
    lengths = ((positions + 1) // ratio).to(torch.int32)
    assert_same_bits(filled[:7], select(normal(7, 512), lengths, k))
    assert bool((filled[7] == -7).all()), "rows beyond the tokens are left alone"


@pytest.fixture
def workspace(monkeypatch):
    return stub_workspaces(monkeypatch, slots=4)


def test_decode_and_prefill_agree_and_share_one_workspace(workspace):
    n, k = 9000, 512
    indexer_topk.reserve(n, k, torch.device(DEVICE))
    address = indexer_topk._scratch().data_ptr()
    indexer_topk.reserve(n - 100, k, torch.device(DEVICE))
    logits, lengths = normal(6, n), as_lengths(9000, 8999, 8998, 10, 9, 8)
    prefill, decode = (torch.full((6, k), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    indexer_topk.prefill_top_k(logits, None, lengths, prefill)
    indexer_topk.decode_top_k(logits, as_lengths(9000, 10)[:, None], 3, decode)
    assert_same_bits(decode, topk.top_k_reference(logits, as_lengths(8998, 8999, 9000, 8, 9, 10), k))
    indexer_topk.decode_top_k(logits, lengths.view(2, 3), 3, decode)
    assert_same_bits(decode, prefill, "one length a row")
    assert indexer_topk._scratch().data_ptr() == address, "nothing is allocated after profiling"


def test_a_model_that_reserves_nothing_is_refused(workspace):
    with pytest.raises(ValueError, match="expected one from the profiling run"):
        indexer_topk.decode_top_k(normal(1, 600), as_lengths(600), 1, torch.empty(1, 512, dtype=torch.int32))


def test_candidate_blocks_keep_the_newest_and_settle_ties_by_position(workspace):
    rows, width, block = 3, 1000, 16
    logits = normal(rows, width)
    logits[1] = 0.0
    ends, k = as_lengths(1000, 777, 0), 8
    indexer_topk.reserve(width, 512, torch.device(DEVICE))

    class Scores:  # stands for upstream's kernel, whose launch the module makes
        def __getitem__(self, grid):
            assert grid == (rows, 32)
            return self.launch

        def launch(self, x, starts, ends, scores, valid, *rest, **options):
            valid.copy_((ends + block - 1) // block)
            padded = torch.where(torch.arange(width, device=DEVICE) < ends[:, None], x, -INF)
            scores.copy_(torch.nn.functional.pad(padded, (0, -width % block), value=-INF).view(rows, -1, block).amax(2))
            for row, count in enumerate(valid.tolist()):
                if count:
                    scores[row, count - 1] = INF

    out = torch.full((rows, k), -7, dtype=torch.int32, device=DEVICE)
    indexer_topk.candidate_blocks(Scores(), logits, None, ends, block, out, 1)
    assert int(out[0, 0]) == 62, "the newest block is always kept"
    assert out[1].tolist() == list(range(48, 40, -1)), "ties go to the newer block"
    assert out[2].tolist() == [-1] * k


@pytest.mark.parametrize("change,message", [
    ({"logits": torch.zeros(2, 64, dtype=torch.float16)}, "float16"),
    ({"logits": torch.zeros(64, 2).t()}, "contiguous rows"),
    ({"lengths": torch.zeros(3, dtype=torch.int32)}, "expected 2 int32"),
    ({"lengths": torch.zeros(2, dtype=torch.int64)}, "int64"),
    ({"out": torch.zeros(2, 8, dtype=torch.int64)}, "expected int32"),
    ({"out": torch.zeros(2, topk.LIST, dtype=torch.int32)}, "expected 1 to"),
    ({"starts": torch.zeros(1, dtype=torch.int32)}, "starts"),
    ({"scratch": torch.zeros(4, 64, dtype=torch.int32)}, "reserve scratch_shape"),
])
def test_unsupported_inputs_are_refused_with_what_was_found(change, message):
    good = {"logits": torch.zeros(2, 64), "lengths": torch.zeros(2, dtype=torch.int32), "starts": None,
            "out": torch.zeros(2, 8, dtype=torch.int32),
            "scratch": torch.zeros(4, topk.scratch_shape(64)[1], dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        topk.top_k(**(good | change))
