"""Decode reads the FP8 cache through the prefill's arithmetic: same rows, same order, same bits."""
import copy
import functools
import types

import pytest
import torch
from kv_scene import LAYERS, WINDOW, Scene, assert_same_bits, selected
from vllm.zero_mismatch import fp8_kv_gather as gather_module
from vllm.zero_mismatch.fp8_kv_gather import HEAD_DIM, RECORDS, Window, gather, gather_reference
from vllm.zero_mismatch.prefill_decode import PrefillDecode

# Softmax over at most 640 BF16 rows with fp32 accumulation: two ulp of BF16 (2**-8) on outputs below 4.
ATTENTION_TOLERANCE = 4 * 2.0**-7


# Window not full, full, and past the point where top-k drops rows; chunk edges of ratio 4 and 128.
POSITIONS = [0, 2, 3, 126, 127, 128, 255, 511, 700]


@functools.cache
def built(kind: str, record_bytes: int) -> Scene:
    return Scene(RECORDS[record_bytes], kind, POSITIONS, window_page=16)


def scene(kind: str, record_bytes: int = 584) -> Scene:
    return copy.deepcopy(built(kind, record_bytes))


@pytest.mark.parametrize("record_bytes", sorted(RECORDS))
@pytest.mark.parametrize("kind", LAYERS)
def test_gather_has_the_bits_of_the_reference(kind, record_bytes):
    case = scene(kind, record_bytes)
    rows, indices, lengths = case.run()
    want_rows, want_indices, want_lengths = gather_reference(
        case.positions, case.request, case.window, case.topk, case.width
    )
    assert_same_bits(indices, want_indices, "indices")
    assert_same_bits(lengths, want_lengths, "lengths")
    live = want_indices >= 0
    assert_same_bits(rows[live], want_rows[live], "rows")


@pytest.mark.parametrize("kind", LAYERS)
def test_only_selected_rows_are_written(kind):
    rows, indices, _ = scene(kind).run()
    assert rows[indices < 0].isnan().all()


def prefill_rows(case: Scene, token: int) -> torch.Tensor:
    """What the prefill attends to: it dequantises the whole request, then indexes (top-k, then window)."""
    position, page = int(case.positions[token]), case.window.cache.shape[1]
    everything = [
        gather_module.dequantise(case.window.cache, int(case.window_table[token, p // page]), p % page)
        for p in range(position + 1)
    ]
    chosen = []
    if case.topk is not None:
        page = case.topk.cache.shape[1]
        compressed = [
            gather_module.dequantise(case.topk.cache, int(case.topk.block_table[token, c // page]), c % page)
            for c in range((position + 1) // case.topk.ratio)
        ]
        count = min(len(compressed), case.topk.width)
        local = range(count) if case.topk.local is None else case.topk.local[token, :count].tolist()
        chosen = [compressed[c] for c in local]
    return torch.stack(chosen + everything[max(0, position - WINDOW + 1):])


@pytest.mark.parametrize("kind", LAYERS)
def test_decode_reads_the_rows_of_prefill_in_its_order(kind):
    case = scene(kind)
    for token, rows in enumerate(selected(*case.run())):
        assert_same_bits(rows, prefill_rows(case, token), f"{kind} position {POSITIONS[token]}")


@pytest.mark.parametrize("kind", LAYERS)
def test_row_keeps_its_bits_in_any_batch(kind):
    case = scene(kind)
    together = selected(*case.run())
    for token in range(len(POSITIONS)):
        (alone,) = selected(*case.run(slice(token, token + 1)))
        assert_same_bits(alone, together[token], f"{kind} token {token}")


def test_padding_token_attends_to_nothing():
    case = scene("csa")
    case.window.lengths[3] = 0
    _, indices, lengths = case.run()
    assert lengths[3] == 0 and (indices[3] == -1).all()


def test_unfilled_topk_entry_is_masked():
    case = scene("csa")
    case.topk.local[8, 5] = -1
    _, indices, lengths = case.run()
    want = gather_reference(case.positions, case.request, case.window, case.topk, case.width)
    assert indices[8, 5] == -1
    assert_same_bits(indices, want[1], "indices")
    assert_same_bits(lengths, want[2], "lengths")


@pytest.mark.parametrize("kind", LAYERS)
def test_window_row_without_a_slot_is_masked(kind):
    """Its row of the workspace is not written in this step, so an index would read what an earlier one left."""
    case = scene(kind)
    for token in (1, 6, 8):  # listed from the first tile on, in the middle, behind the top-k part
        case.window.slots[token, 1] = -1
    rows, indices, lengths = case.run()
    want = gather_reference(case.positions, case.request, case.window, case.topk, case.width)
    assert_same_bits(indices, want[1], "indices")
    assert_same_bits(lengths, want[2], "lengths")
    assert rows[indices < 0].isnan().all() and not rows[indices >= 0].isnan().any()


def attention(q: torch.Tensor, rows: torch.Tensor, block: int = 64) -> torch.Tensor:
    """Online softmax over blocks of rows in list order with BF16 probabilities, as `flash_mla_sparse_fwd` orders it."""
    top, total, out = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(HEAD_DIM)
    for start in range(0, len(rows), block):
        k = rows[start: start + block].float()
        logits = k @ q.float() * HEAD_DIM**-0.5
        new = torch.maximum(top, logits.max())
        p = torch.exp(logits - new)
        scale = torch.exp(top - new)
        total, out, top = total * scale + p.sum(), out * scale + p.to(torch.bfloat16).float() @ k, new
    return out / total


def exact_attention(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    logits = rows.double() @ q.double() * HEAD_DIM**-0.5
    return torch.softmax(logits, 0) @ rows.double()


def test_attention_over_gathered_rows_is_accurate():
    case = scene("csa")
    q = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    for rows in selected(*case.run()):
        error = (attention(q, rows).double() - exact_attention(q, rows)).abs().max()
        assert error <= ATTENTION_TOLERANCE * max(1.0, float(rows.float().abs().max()))


def test_stock_decode_order_differs():
    """Counter-test: stock decode walks the window first (flashmla.py:248); the sum then has other bits."""
    case = scene("csa")
    q = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    differ = 0
    for token, rows in enumerate(selected(*case.run())):
        window = int(case.window.lengths[token])
        stock = torch.cat([rows[len(rows) - window:], rows[: len(rows) - window]])
        differ += int((attention(q, rows).view(torch.int32) != attention(q, stock).view(torch.int32)).sum())
    assert differ > 0


def test_unknown_record_is_refused():
    case = scene("sliding")
    window = Window(case.window.cache[..., :512], case.window.slots, case.window.lengths)
    with pytest.raises(ValueError, match="fp8_ds_mla"):
        gather(
            torch.empty(9, 128, HEAD_DIM, dtype=torch.bfloat16), torch.empty(9, 128, dtype=torch.int32),
            torch.empty(9, dtype=torch.int32), case.positions, case.request, window, None,
        )


@pytest.mark.parametrize("width", [128, 200])
def test_wrong_list_width_is_refused(width):
    case = scene("csa")
    case.width = width
    with pytest.raises(ValueError, match="rounded up to 128"):
        case.run()


def plan(ratio: int, max_model_len: int, max_num_seqs: int = 256, batched: int = 8192, spec=None, top_k: int = 512):
    layer = types.SimpleNamespace(
        compress_ratio=ratio, window_size=WINDOW, topk_indices_buffer=torch.empty(8, top_k, dtype=torch.int32)
    )
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=batched),
        speculative_config=spec, model_config=types.SimpleNamespace(max_model_len=max_model_len),
    )
    return PrefillDecode(layer, config, has_topk=ratio > 1)


@pytest.mark.parametrize(
    ("ratio", "max_model_len", "width"), [(1, 8192, 128), (4, 8192, 640), (128, 8192, 256), (128, 1 << 20, 8320)]
)
def test_list_width_is_a_model_limit(ratio, max_model_len, width):
    assert plan(ratio, max_model_len).width == width


def test_workspace_is_sized_by_limits_and_capped():
    assert plan(4, 8192, max_num_seqs=64).slice_tokens == 64
    assert plan(4, 8192, max_num_seqs=64, spec=types.SimpleNamespace(num_speculative_tokens=2)).slice_tokens == 192
    assert plan(4, 8192, max_num_seqs=4096, batched=512).slice_tokens == 512
    capped = plan(128, 1 << 20)
    row = capped.width * HEAD_DIM * 2
    assert capped.slice_tokens * row <= 1 << 30 < (capped.slice_tokens + 1) * row
