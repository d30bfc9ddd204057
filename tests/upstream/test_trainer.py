"""`prove train` and `prove grad` over the pinned megatron-core as released, on a CPU: its buffers, its distributed
optimizer, its checkpoints; the reference kernels stand for vLLM's on both sides (tests/unit/trainer_fake.py)."""
import os
import pathlib
import shutil

import pytest

from prove import grad, recipe, record, train, ui
from prove.engine import EngineError

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKE = str(ROOT / "tests" / "unit" / "trainer_fake.py")
OVERLAY = ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch"


@pytest.fixture
def run(megatron_tree, tmp_path, monkeypatch):
    """Runs a command over a site that holds Megatron and the overlay."""
    shutil.copytree(OVERLAY, megatron_tree / "megatron" / "zero_mismatch", dirs_exist_ok=True)
    monkeypatch.setattr(train, "LENGTHS", (1, 3, 16, 17, 20, 5))
    monkeypatch.setattr(grad, "LENGTHS", (1, 2, 15, 16, 40))
    monkeypatch.setattr(grad, "MICRO", 20)  # three micro-batches
    (tmp_path / "config.json").write_text("{}")
    path = os.pathsep.join(map(str, (megatron_tree, ROOT / "tests" / "unit")))
    common = {"out": tmp_path, "logs": tmp_path / "logs", "budget": 600.0, "backend": FAKE,
              "env": {"FAKE_SITE": str(megatron_tree), "PYTHONPATH": path, "TRITON_INTERPRET": "1"}}

    def call(command, fault=None, **settings):
        made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": str(tmp_path), "vocab": 64},
                                                       "engine": {"fault": fault}})
        return command(made, ui.UI(json_only=True), **settings, **common)
    return call


def small(run, fault=None, updates=4, **more):
    return run(train.train, fault, updates=updates, groups=4, answers=3, tokens=8, lr=1e-2, restore_after=2, **more)


def test_trainer_agrees_before_every_update_and_a_fresh_process_goes_on_from_the_checkpoint(run):
    data = small(run)
    assert [row["case"] for row in data["rows"]] == ["update 1", "update 2", "update 3", "restored", "update 4"]
    for row in data["rows"]:
        assert row["scored"]["equal"] and row["trained"]["equal"] and row["scored"]["tokens"] == 96
    restored = data["rows"][3]
    assert restored["same"] and restored["version"] == 2
    assert restored["learned_same"], "on a CPU every backward repeats itself"
    assert restored["norm"] == data["rows"][2]["norm"], "the optimizer's state went along"
    assert [row["version"] for row in data["rows"]] == [0, 1, 2, 2, 3]
    assert data["gain"]["last"] > data["gain"]["first"]
    assert not data["passed"], "a fake engine is not the locked tree"


def test_an_engine_that_keeps_its_old_weights_is_a_difference(run):
    data = small(run, fault="stale", updates=3)
    assert [row["scored"]["equal"] for row in data["rows"]] == [True, False], "stopped at the first difference"
    assert data["rows"][1]["scored"]["max_dp"] > 0 and not data["passed"]
    assert [row["kind"] for row in data["layers"]] == list("ME*M-E")
    assert data["layers"][0]["residual"], "the embedding itself is another"


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_through_every_update_agrees_and_refuses_a_rollout_before_the_sync(run, level):
    data = small(run, updates=3, sleep=level)
    assert [row["case"] for row in data["rows"]] == ["update 1", "update 2", "update 3", "restored"]
    for row in data["rows"]:
        assert row["scored"]["equal"] and row["trained"]["equal"]
        assert row["sleep"]["level"] == level and row["sleep"]["refused"]
    assert data["engines"]["first"]["flags"]["enable_sleep_mode"]
    assert data["subject"] == f"fake-asleep-{level}", "a record of its own, beside the one without sleep"


def test_weights_lost_in_a_sleep_that_keeps_them_stop_the_run(run):
    with pytest.raises(EngineError, match="lost or overwritten"):
        small(run, fault="level 1", sleep=1)


@pytest.mark.parametrize("sleep", [0, 2])
def test_a_run_that_replays_no_graph_after_a_sync_proves_nothing(run, sleep):
    assert len(small(run, fault="eager", sleep=sleep)["rows"]) == 1, "stopped at the first row"


def test_the_whole_vocabulary_of_some_answers_is_compared_at_every_position(run):
    """SkyRL #2201: equal logprobs of the sampled tokens do not show that the distributions are equal."""
    data = small(run, updates=3, whole_vocab=5)
    assert {row["whole_vocab"]["positions"] for row in data["rows"]} == {5 * 8}
    assert {row["whole_vocab"]["words"] for row in data["rows"]} == {5 * 8 * 64}
    assert not any(row["whole_vocab"]["differing_words"] for row in data["rows"]) and len(data["rows"]) == 4
    assert data["engines"]["first"]["flags"]["max_logprobs"] == 64


def test_one_word_of_a_token_that_was_not_sampled_is_a_difference(run):
    data = small(run, fault="vocabulary", whole_vocab=1)
    assert len(data["rows"]) == 1 and data["rows"][0]["scored"]["equal"], "the sampled tokens show nothing"
    assert data["rows"][0]["whole_vocab"]["differing_words"] == 1 and not data["passed"]


def test_gradients_are_within_their_bounds_and_every_planted_fault_is_caught(run, monkeypatch):
    missing, write = [], record.Record.write
    monkeypatch.setattr(record.Record, "write", lambda kept: (missing.append(kept.data.get("missing")), write(kept)))
    data = run(grad.grad)
    assert all(row["within"] for row in data["rows"]) and len(data["rows"]) == 1 + 39
    assert data["rows"][0]["parameter"] == "logprobs"
    assert set(data["caught"]) == set(grad.FAULTS) and all(data["caught"].values())
    left = [f"planted {fault}" for fault in grad.FAULTS]
    assert all(left[done:] in missing for done in range(len(left) + 1)) and not missing[-1]  # step by step


def test_a_checkpoint_of_other_bits_is_refused(run, tmp_path, monkeypatch):
    save = train.Trainer.call

    def call(self, op, **arguments):
        found = save(self, op, **arguments)
        if op == "save":
            file = pathlib.Path(arguments["folder"]) / "zero_mismatch.json"
            file.write_text(file.read_text().replace('"digest": "', '"digest": "0'))
        return found

    monkeypatch.setattr(train.Trainer, "call", call)
    with pytest.raises(EngineError, match="found weights with digest"):
        small(run)
