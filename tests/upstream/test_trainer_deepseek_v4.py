"""`prove train` for DeepSeek-V4 over the pinned megatron-core, on a CPU: FP8 in the engine, BF16 masters in the actor,
reference kernels on both sides (tests/unit/trainer_fake_dsv4.py). Two updates and a restore."""
import os
import pathlib
import shutil

import pytest

from prove import grad, recipe, record, train, ui

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKE = str(ROOT / "tests" / "unit" / "trainer_fake_dsv4.py")
OVERLAY = ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch"


@pytest.fixture
def run(megatron_tree, tmp_path, monkeypatch):
    shutil.copytree(OVERLAY, megatron_tree / "megatron" / "zero_mismatch", dirs_exist_ok=True)
    monkeypatch.setattr(train, "LENGTHS", (1, 5, 129))
    monkeypatch.setattr(train, "MICRO", 1)  # one sequence a micro-batch: a CPU's fp32 GEMM takes its order from M
    (tmp_path / "config.json").write_text("{}")
    overlay = tmp_path / "vllm_overlay"  # the Top-K's reference is the rollout's
    (overlay / "vllm").mkdir(parents=True)
    (overlay / "vllm" / "__init__.py").write_text("")
    shutil.copytree(ROOT / "overlays" / "vllm" / "vllm" / "zero_mismatch", overlay / "vllm" / "zero_mismatch")
    path = os.pathsep.join(map(str, (megatron_tree, overlay, ROOT / "tests" / "unit")))

    def call(fault=None, updates=2, command=train.train, **more):
        made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": str(tmp_path), "vocab": 64},
                                                      "engine": {"fault": fault}})
        settings = {} if command is grad.grad else {"updates": updates, "groups": 3, "answers": 2, "tokens": 4,
                                                    "lr": 1e-2, "restore_after": updates // 2, **more}
        return command(made, ui.UI(json_only=True), **settings, out=tmp_path, logs=tmp_path / "logs", budget=900.0,
                       backend=FAKE, env={"FAKE_SITE": str(megatron_tree), "PYTHONPATH": path,
                                          "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    return call


def test_fp8_rollout_and_bf16_masters_agree_before_every_update_and_after_restore(run):
    data = run()
    assert [row["case"] for row in data["rows"]] == ["update 1", "update 2", "restored"]
    for row in data["rows"]:
        assert row["scored"]["equal"] and row["trained"]["equal"] and row["scored"]["tokens"] == 24
        assert row["norm"] > 0
    assert data["rows"][2]["same"] and data["rows"][2]["learned_same"]
    derived = [row["modes"]["derived"] for row in data["rows"]]
    assert derived == [1, 2, 1], "the engine derives what it keeps besides its parameters at every sync"


def test_codes_and_scales_dropped_in_a_sleep_come_back_with_the_sync_and_every_token_agrees(run):
    data = run(sleep=2, whole_vocab=3)
    assert [row["case"] for row in data["rows"]] == ["update 1", "update 2", "restored"]
    for row in data["rows"]:
        assert row["scored"]["equal"] and row["trained"]["equal"] and row["sleep"]["refused"]
        assert row["whole_vocab"] == {"positions": 12, "words": 12 * 64, "differing_words": 0, "nan": 0}


def test_scales_that_stay_behind_are_a_difference(run):
    """Some block of some expert has 224 as its largest code: its first export halves the scale and doubles codes."""
    data = run(fault="scales", updates=1)
    assert data["rows"][0]["scored"]["differing_words"] and len(data["layers"]) == 3
    assert set(data["engines"]) == {"first"}, "no restore was asked for"


def test_gradients_are_within_their_bounds_and_every_planted_fault_is_caught(run, monkeypatch):
    monkeypatch.setattr(grad, "LENGTHS", (1, 2, 9, 129))
    missing, write = [], record.Record.write
    monkeypatch.setattr(record.Record, "write", lambda kept: (missing.append(kept.data.get("missing")), write(kept)))
    data = run(command=grad.grad)
    assert [row["parameter"] for row in data["rows"] if not row["within"]] == []
    assert len(data["caught"]) == 6 and all(data["caught"].values()), data["caught"]
    assert [m[0] for m in missing if m][-3:] == [f"{left} of 4 losses" for left in (3, 2, 1)] and not missing[-1]


def test_a_fault_smaller_than_the_cost_of_fp8_is_caught_at_the_actors_operands(run, monkeypatch):
    monkeypatch.setattr(grad, "LENGTHS", (260,))
    data = run(command=grad.grad)
    assert [row["parameter"] for row in data["rows"] if not row["within"]] == []
    caught, at_operands = data["caught"], data["caught_at_operands"]
    assert caught["attention-sink"] == at_operands["attention-sink"], "too large to show anything"
    assert len(caught) == 6 and all(at_operands.values()), at_operands
