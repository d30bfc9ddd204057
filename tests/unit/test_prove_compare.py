"""The bit comparison: what counts as a difference, and what the figures beside it say."""
import json
import math

import numpy as np
import pytest

from prove.compare import Figures, Sequence, words


def sequence(logprobs, tokens=None):
    tokens = range(len(logprobs)) if tokens is None else tokens
    return Sequence(np.asarray(list(tokens), np.int64), words(logprobs))


def compared(left, right):
    figures = Figures()
    figures.add("r", left, right)
    return figures


def test_words_keep_every_bit():
    values = np.asarray([-0.0, 0.0, -1e-45, -3.4e38, -1.1, -np.inf], np.float32)
    assert (words(values.astype(float).tolist()) == values.view(np.uint32)).all()
    assert words([math.nan]).view(np.float32)[0] != words([math.nan]).view(np.float32)[0]


def test_a_logprob_that_is_no_fp32_value_is_refused():
    with pytest.raises(ValueError, match="logprob 1 is 0.1"):
        words([-0.5, 0.1])


def test_equal_runs_have_all_figures_zero():
    summary = compared(sequence([-1.5, -2.25, -0.0]), sequence([-1.5, -2.25, -0.0])).summary()
    assert summary["equal"] and summary["tokens"] == 3
    assert [summary[k] for k in ("differing_words", "max_dp", "mean_dp", "std_dp", "k3")] == [0, 0, 0, 0, 0]
    assert summary["first"] is None


def test_one_flipped_bit_is_a_difference_and_is_located():
    left, right = sequence([-1.5, -2.25]), sequence([-1.5, -2.25])
    right.words[1] ^= 1
    summary = compared(left, right).summary()
    assert not summary["equal"] and summary["differing_words"] == 1 and summary["differing_tokens"] == 0
    assert summary["first"] | {"left_logprob": 0, "right_logprob": 0} == {
        "request": "r", "index": 1, "left_token": 1, "left_word": "0xc0100000", "left_logprob": 0,
        "right_token": 1, "right_word": "0xc0100001", "right_logprob": 0}


def test_minus_zero_differs_from_plus_zero_although_the_figures_are_zero():
    summary = compared(sequence([-0.0]), sequence([0.0])).summary()
    assert summary["differing_words"] == 1 and not summary["equal"] and summary["max_dp"] == 0


def test_nan_never_passes_even_with_equal_bits():
    summary = compared(sequence([math.nan]), sequence([math.nan])).summary()
    assert summary["nan"] == 1 and summary["differing_words"] == 1 and not summary["equal"]
    json.dumps(summary, allow_nan=False)


def test_a_missing_token_never_passes():
    summary = compared(sequence([-1.0, -2.0]), sequence([-1.0])).summary()
    assert summary["missing"] == 1 and summary["differing_words"] == 1 and not summary["equal"]
    assert summary["first"]["index"] == 1 and summary["first"]["right_token"] is None


def test_an_empty_comparison_proves_nothing():
    assert not Figures().equal
    assert not compared(sequence([]), sequence([])).equal


def test_equal_infinities_leave_k3_finite():
    summary = compared(sequence([-math.inf]), sequence([-math.inf])).summary()
    assert summary["equal"] and summary["k3"] == 0


def test_figures_stop_at_the_first_other_token():
    left, right = sequence([-1.0, -1.0, -9.0], [4, 5, 6]), sequence([-1.0, -1.0, -0.125], [4, 7, 6])
    summary = compared(left, right).summary()
    assert summary["differing_tokens"] == 1 and summary["differing_words"] == 2
    assert summary["max_dp"] == 0  # only the first position has the same context and the same token


def test_k3_and_dp_match_their_definitions():
    left, right = sequence([-0.75]), sequence([-0.5])
    summary = compared(left, right).summary()
    assert summary["max_dp"] == pytest.approx(math.exp(-0.5) - math.exp(-0.75))
    assert summary["k3"] == pytest.approx(math.exp(0.25) - 1 - 0.25)


def test_a_base_run_is_checked_for_completeness_and_nan():
    figures = Figures()
    figures.count("r", sequence([-1.0, -2.0]), expected=2)
    assert figures.equal
    figures.count("s", sequence([-1.0]), expected=2)
    assert figures.missing == 1 and not figures.equal
    other = Figures()
    other.count("t", sequence([math.nan]), expected=1)
    assert other.nan == 1 and not other.equal and other.first["request"] == "t"
