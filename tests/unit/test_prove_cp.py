"""What `prove cp` compares, without an engine; with one: tests/upstream/test_cp.py."""
import sys
import types

import numpy as np
import pytest
import torch

from prove import cp, cp_backend, trainer_backend
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
    (row,) = cp.compared_gradients({"w": {"whole": 0.1, "own": 0.1}}, [{"w": {"whole": 0.15, "own": 0.5}}])
    assert row["usual_error"] == 0.1 and row["bound"] == pytest.approx(0.1 * cp.TIMES)
    assert row["error"] == 0.15 and row["own_share_error"] == 0.5
    (row,) = cp.compared_gradients({"w": {"whole": 0.0, "own": 0.0}}, [{"w": {"whole": 0.0, "own": 0.0}}])
    assert row["bound"] == cp.FLOOR


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_gradient_that_is_zero_or_no_number_is_no_yardstick(value):
    gradient = torch.full((2,), value)
    error = {"w": dict.fromkeys(("whole", "own"), trainer_backend._apart(gradient, gradient))}
    with pytest.raises(EngineError, match="the gradient of w"):
        cp.compared_gradients(error, [error])
    fine = {"w": {"whole": 0.1, "own": 0.5}}
    with pytest.raises(EngineError, match="the gradient of w"):
        cp.compared_gradients(fine, [fine, error] if value else [error, fine])


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_that_computes_everything_while_the_other_idles_is_seen_whichever_it_is(idle):
    shares = [{"w": {"whole": 0.1, "own": 0.1}}, {"w": {"whole": 0.1, "own": 1.0}}]
    (row,) = cp.compared_gradients(shares[0], shares[::1 - 2 * idle])
    assert row["own_share_error"] <= row["bound"]


def test_the_worst_ranks_gradient_is_the_one_that_counts():
    cut = {"w": {"whole": 0.1, "own": 0.1}}
    (row,) = cp.compared_gradients(cut, [cut, {"w": {"whole": 0.7, "own": 0.8}}])
    assert row["error"] == 0.7


def test_a_parameter_without_a_gradient_on_one_side_is_no_agreement():
    whole, fewer = ({name: {"whole": 0.1, "own": 0.5} for name in names} for names in ("vw", "v"))
    for sides in ((whole, [whole, fewer]), (fewer, [whole, whole])):
        with pytest.raises(EngineError, match="the gradients of w are not there on every side"):
            cp.compared_gradients(*sides)


def rank(tmp_path, **own) -> cp_backend.Backend:
    """Of a model with these weights; "before" and "theirs" are files beside it."""
    made = cp_backend.Backend.__new__(cp_backend.Backend)
    made.actor = types.SimpleNamespace(model=types.SimpleNamespace(state_dict=lambda: own))
    made.files = {name: str(tmp_path / f"{name}.pt") for name in ("before", "theirs")}
    return made


def test_the_distance_of_two_updates_is_relative_to_the_update(tmp_path):
    def distance(theirs, own):
        made = rank(tmp_path, **own)
        for name, masters in (("before", {"a": torch.zeros(2), "b": torch.zeros(2)}), ("theirs", theirs)):
            torch.save({"masters": masters}, made.files[name])
        return made.op_distance(**made.files)

    lone = {"a": torch.ones(2), "b": torch.ones(2)}
    assert distance(lone, lone) == 0
    assert distance(lone, {"a": torch.ones(2), "b": torch.tensor([1.0, -1.0])}) == 1.0
    assert distance({"a": torch.zeros(2), "b": torch.zeros(2)}, lone) is None, "theirs moved no weight"


def test_a_rank_multiplies_as_the_engines_process_does(monkeypatch):
    calls, vllm = [], "vllm.model_executor.determinism.batch_invariant"
    for at in range(1, vllm.count(".") + 1):
        name = ".".join(vllm.split(".")[:at + 1])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[vllm].enable_batch_invariant_mode = lambda: calls.append("invariant")
    for of, value in (("device_count", lambda: 2), ("set_device", lambda rank: calls.append(rank))):
        monkeypatch.setattr(torch.cuda, of, value)
    monkeypatch.setattr(cp_backend.Backend, "_join", lambda self, *arguments: calls.append(arguments))
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        cp_backend.Backend(rank=1, ranks=2, store="there")
        assert products.fp32_precision == "ieee"
    finally:
        products.fp32_precision = before
    assert calls == [1, "invariant", ("nccl", 1, 2, "there")]
