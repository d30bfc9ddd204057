"""What `prove cp` compares, without an engine; with one: tests/upstream/test_cp.py."""
import numpy as np
import pytest
import torch

from prove import cp
from prove.engine import EngineError, pack

SEQUENCES = [{"id": name, "tokens": pack(np.asarray([1, 2], np.int64))} for name in "ab"]
WORDS = {name: pack(np.asarray([0xBF000000, 0xBE800000], np.uint32)) for name in "ab"}


def test_equal_words_of_two_actors_are_equal():
    found = cp.between(SEQUENCES, WORDS, dict(WORDS))
    assert found.equal and found.tokens == 4


@pytest.mark.parametrize("change", [
    {"b": pack(np.asarray([0xBF000000, 0xBE800001], np.uint32))},  # one last bit
    {"b": pack(np.asarray([0xBF000000], np.uint32))},              # one word short
    {"b": None},                                                   # not scored at all
])
def test_a_word_that_one_actor_lacks_or_has_otherwise_is_a_difference(change):
    other = {name: words for name, words in (WORDS | change).items() if words is not None}
    assert not cp.between(SEQUENCES, WORDS, other).equal and not cp.between(SEQUENCES, other, WORDS).equal


def test_a_word_that_both_actors_lack_was_not_compared():
    one = {"a": WORDS["a"]}
    assert not cp.between(SEQUENCES, one, dict(one)).equal


def test_a_gradients_bound_is_what_other_micro_batches_do_to_it():
    want = torch.full((4,), 2.0)
    (row,) = cp.compared_gradients({"whole": {"w": want}}, {"whole": {"w": want * 1.1}},
                                   {"whole": {"w": want * 1.15}, "own": {"w": want / 2}})
    assert row["usual_error"] == pytest.approx(0.1) and row["bound"] == pytest.approx(0.1 * cp.TIMES)
    assert row["error"] == pytest.approx(0.15) and row["own_share_error"] == 0.5
    (row,) = cp.compared_gradients({"whole": {"w": want}}, {"whole": {"w": want}},
                                   {"whole": {"w": want}, "own": {"w": want}})
    assert row["bound"] == cp.FLOOR


def test_the_distance_of_two_updates_is_relative_to_the_update():
    before = {"a": torch.zeros(2), "b": torch.zeros(2)}
    lone = {"a": torch.ones(2), "b": torch.ones(2)}
    assert cp.update_distance(before, lone, lone) == 0
    assert cp.update_distance(before, lone, {"a": torch.ones(2), "b": torch.tensor([1.0, -1.0])}) == 1.0
    with pytest.raises(EngineError, match="moved no weight"):
        cp.update_distance(before, before, lone)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_gradient_that_is_zero_or_no_number_is_no_yardstick(value):
    side = {"whole": {"w": torch.full((2,), value)}, "own": {"w": torch.full((2,), value)}}
    with pytest.raises(EngineError, match="the gradient of w"):
        cp.compared_gradients(side, side, side)
