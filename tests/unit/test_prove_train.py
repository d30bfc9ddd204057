"""What `prove train` compares and learns from, without an engine; with one: tests/upstream/test_trainer.py."""
import numpy as np
import pytest

from prove import train
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


def test_an_answer_that_is_too_long_makes_up_for_none_that_is_short():
    sizes = dict(zip((r.id for r in REQUESTS), (2, 4), strict=True))
    answers = {name: made((WORDS * 2)[:n], range(n)) for name, n in sizes.items()}
    assert not train.compared(REQUESTS, answers, {name: answer["words"] for name, answer in answers.items()}).equal


def test_prompts_stay_and_seeds_change_from_step_to_step():
    first, second = (train.requests(step, 4, 2, 8, 64) for step in (0, 1))
    assert [r.prompt for r in first] == [r.prompt for r in second]
    assert not {r.seed for r in first} & {r.seed for r in second}
    assert len({r.seed for r in first}) == len(first) == 8


def test_reward_counts_tokens_of_the_first_quarter():
    assert train.reward(np.asarray([0, 15, 16, 63]), 64) == 2.0


def done(updates=2, restored=True, reward=lambda step: step, **last) -> list[dict]:
    row = {"scored": {"equal": True}, "trained": {"equal": True}, "modes": {"FULL": 63, "NONE": 2}}
    rows = [{"case": f"update {step + 1}", "reward": reward(step), **row} for step in range(updates)]
    rows += [{"case": "restored", "reward": 0.0, "same": True, **row}] if restored else []
    return [*rows[:-1], rows[-1] | last]


def holds(rows, updates=2, restores=True) -> tuple[bool, bool]:
    found = train.verdict(rows, updates, restores)
    return found["complete"], found["passed"]


def test_what_was_asked_was_done_and_every_word_is_equal():
    assert holds(done()) == (True, True)
    assert holds(done(restored=False)) == (False, True)
    assert holds(done(restored=False), restores=False) == (True, True)
    assert holds(done(1, restored=False), restores=False) == (False, True)


@pytest.mark.parametrize("last", [
    {"same": False}, {"learned_same": False}, {"scored": {"equal": False}}, {"trained": {"equal": False}},
])  # fmt: skip
def test_a_word_or_a_weight_that_differs_in_any_row_fails(last):
    assert not holds(done(**last))[1]


@pytest.mark.parametrize("modes", [{}, None, {"NONE": 65}, {"PIECEWISE": 65}])
def test_an_engine_that_replays_no_full_graph_after_the_sync_fails_without_any_sleep(modes):
    assert not holds(done(modes=modes))[1]


def test_the_reward_has_to_rise_where_there_are_updates_enough_to_tell():
    assert holds(done(train.LEARNS), train.LEARNS) == (True, True)
    assert holds(done(train.LEARNS, reward=lambda step: -step), train.LEARNS) == (True, False)
    assert holds(done(train.LEARNS - 1, reward=lambda step: -step), train.LEARNS - 1) == (True, True)


def test_a_restore_that_no_update_follows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs more than 2 updates"):
        train.train(None, None, updates=2, groups=1, answers=1, tokens=1, lr=0.1, restore_after=2, out=tmp_path,
                    logs=tmp_path, budget=1.0, env={})


def test_more_answers_than_a_step_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--whole-vocab 5: a step has 4 answers"):
        train.train(None, None, updates=2, groups=2, answers=2, tokens=1, lr=0.1, restore_after=1, out=tmp_path,
                    logs=tmp_path, budget=1.0, env={}, whole_vocab=5)


@pytest.mark.parametrize("change", [
    {"sleep": {"refused": False, "freed_bytes": 1}},  # a rollout could have started on weights that are not there
    {"sleep": {"refused": True, "freed_bytes": 0}},   # it slept in name only
    {"modes": {"NONE": 64}},                          # no graph was replayed after the wake
    {"modes": None},                                  # nobody counted
    {"whole_vocab": {"positions": 7, "differing_words": 0, "nan": 0}},
    {"whole_vocab": {"positions": 8, "differing_words": 1, "nan": 0}},
    {"whole_vocab": {"positions": 8, "differing_words": 0, "nan": 1}},
    {"trained": {"equal": False}},
    {"same": False},
    {"learned_same": False},
])
def test_a_row_holds_by_everything_that_was_asked(change):
    row = {"scored": {"equal": True}, "trained": {"equal": True}, "sleep": {"refused": True, "freed_bytes": 1},
           "modes": {"FULL": 64}, "whole_vocab": {"positions": 8, "differing_words": 0, "nan": 0}}
    assert train.held(row, sleep=2, positions=8)
    assert not train.held(row | change, sleep=2, positions=8)
