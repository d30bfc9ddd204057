"""What `prove train` compares and learns from, without an engine; with one: tests/upstream/test_trainer.py."""
import numpy as np
import pytest

from prove import grad, train
from prove.engine import pack


def made(words, tokens=(1, 2, 3)):
    return {"tokens": pack(np.asarray(tokens, np.int64)), "words": pack(np.asarray(words, np.uint32))}


REQUESTS = train.requests(0, groups=1, answers=2, tokens=3, vocab=64)
WORDS = [0xBF000000, 0xBE800000, 0xC0000000]  # -0.5, -0.25, -2
ANSWERS = {r.id: made(WORDS) for r in REQUESTS}


def figures(**change):
    words = {r.id: pack(np.asarray(WORDS, np.uint32)) for r in REQUESTS} | change
    return train.compared(REQUESTS, ANSWERS, {k: v for k, v in words.items() if v is not None})


def test_equal_words_are_equal():
    found = figures()
    assert found.equal and found.tokens == 6


@pytest.mark.parametrize("change", [
    pack(np.asarray([WORDS[0], WORDS[1] ^ 1, WORDS[2]], np.uint32)),  # one last bit
    pack(np.asarray(WORDS[:2], np.uint32)),                           # one word short
    None,                                                             # not scored at all
])
def test_a_word_that_differs_or_is_missing_is_a_difference(change):
    assert not figures(**{REQUESTS[1].id: change}).equal


def test_an_answer_that_is_short_is_a_difference():
    answers = {r.id: made(WORDS[:2], (1, 2)) for r in REQUESTS}
    assert not train.compared(REQUESTS, answers, {r.id: pack(np.asarray(WORDS[:2], np.uint32)) for r in REQUESTS}).equal


def test_prompts_stay_and_seeds_change_from_step_to_step():
    first, second = (train.requests(step, 4, 2, 8, 64) for step in (0, 1))
    assert [r.prompt for r in first] == [r.prompt for r in second]
    assert not {r.seed for r in first} & {r.seed for r in second}
    assert len({r.seed for r in first}) == len(first) == 8


def test_reward_counts_tokens_of_the_first_quarter():
    assert train.reward(np.asarray([0, 15, 16, 63]), 64) == 2.0


def test_a_gradient_over_its_bound_or_not_a_number_exceeds():
    rows = [{"error": 0.03, "usual_error": 0.02}, {"error": 0.05, "usual_error": 0.02},
            {"error": float("nan"), "usual_error": 0.02}, {"error": 2.0**-6, "usual_error": 0.0}]
    assert grad.exceeding(rows) == rows[1:3]
