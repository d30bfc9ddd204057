"""The two arms of paged-logits-no-empty-row: upstream's own wrappers around DeepGEMM, as released and as patched."""
import types

import pytest
import torch
from upstream_source import define, patched, stock

PATH = "vllm/utils/deep_gemm.py"


def _lengths_seen(source, batch_invariant):
    """The lengths that DeepGEMM's schedule and kernel are given for rows of 0, 1 and 9 entries."""
    seen = []

    def schedule(context_lens, block_size, slots):
        seen.append(context_lens.tolist())

    def kernel(q, kv_cache, weights, context_lens, *rest, **named):
        seen.append(context_lens.tolist())

    scope = define(source, ["get_paged_mqa_logits_metadata", "fp8_fp4_paged_mqa_logits"], {
        "torch": torch, "envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant),
        "_lazy_init": lambda: None, "_missing": pytest.fail,
        "_paged_mqa_logits_schedule_slots": lambda sms, next_n: sms,
        "_get_paged_mqa_logits_metadata_impl": schedule, "_fp8_fp4_paged_mqa_logits_impl": kernel})
    lengths = torch.tensor([[0], [1], [9]], dtype=torch.int32)
    scope["get_paged_mqa_logits_metadata"](lengths, 64, 132)
    scope["fp8_fp4_paged_mqa_logits"]((None, None), None, None, lengths, torch.zeros(3, 1), None, 64)
    assert lengths.tolist() == [[0], [1], [9]], "Top-K still needs the true lengths"
    return seen


def test_patched_wrappers_hand_on_no_empty_row():
    assert _lengths_seen(patched(PATH), True) == [[[1], [1], [9]]] * 2


def test_patched_wrappers_change_nothing_without_batch_invariance():
    assert _lengths_seen(patched(PATH), False) == [[[0], [1], [9]]] * 2


def test_stock_wrappers_hand_on_empty_rows():
    assert _lengths_seen(stock(PATH), True) == [[[0], [1], [9]]] * 2
