"""`prove train` and `prove grad` for the quantised Nemotron-H over the pinned megatron-core, on a CPU: codes and scales
in the engine, BF16 masters in the actor, reference kernels on both sides (trainer_fake_nemotron_quantised.py)."""
import os
import pathlib
import shutil

import pytest

from prove import grad, gradients, recipe, train, ui

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKE = str(ROOT / "tests" / "unit" / "trainer_fake_nemotron_quantised.py")
OVERLAY = ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch"


@pytest.fixture
def run(megatron_tree, tmp_path, monkeypatch):
    shutil.copytree(OVERLAY, megatron_tree / "megatron" / "zero_mismatch", dirs_exist_ok=True)
    monkeypatch.setattr(train, "LENGTHS", (1, 5, 17))
    monkeypatch.setattr(train, "MICRO", 1)  # one sequence a micro-batch: a CPU's fp32 GEMM takes its order from M
    monkeypatch.setattr(grad, "LENGTHS", (1, 2, 15, 16, 40))
    monkeypatch.setattr(grad, "MICRO", 20)
    (tmp_path / "config.json").write_text("{}")
    path = os.pathsep.join(map(str, (megatron_tree, ROOT / "tests" / "unit")))

    def call(command=train.train, fault=None, updates=3):
        made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": str(tmp_path), "vocab": 64},
                                                      "engine": {"fault": fault}})
        settings = {} if command is grad.grad else {"updates": updates, "groups": 3, "answers": 2, "tokens": 6,
                                                    "lr": 1e-2, "restore_after": 1}
        return command(made, ui.UI(json_only=True), **settings, out=tmp_path, logs=tmp_path / "logs", budget=900.0,
                       backend=FAKE, env={"FAKE_SITE": str(megatron_tree), "PYTHONPATH": path,
                                          "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    return call


def test_quantised_rollout_and_bf16_masters_agree_before_every_update_and_after_restore(run):
    data = run()
    assert [row["case"] for row in data["rows"]] == ["update 1", "update 2", "restored", "update 3"]
    for row in data["rows"]:
        assert row["scored"]["equal"] and row["trained"]["equal"] and row["scored"]["tokens"] == 36
        assert row["norm"] > 0
    assert data["rows"][2]["same"] and data["rows"][2]["learned_same"]
    assert len({row["weights"] for row in data["rows"]}) == 3, "every update changed the masters"


def test_scales_that_stay_behind_are_a_difference(run):
    data = run(fault="scales", updates=2)
    assert not all(row["scored"]["equal"] for row in data["rows"]) and len(data["layers"]) == 7


def test_gradients_are_within_their_bounds_and_every_planted_fault_is_caught(run):
    data = run(grad.grad)
    assert [row["parameter"] for row in data["rows"] if not row["within"]] == []
    wanted = {*grad.FAULTS, *gradients.QUANTISED_FAULTS}
    assert set(data["caught"]) == wanted and all(data["caught"].values()), data["caught"]


def test_a_fault_smaller_than_the_cost_of_fp8_is_caught_at_the_actors_operands(run, monkeypatch):
    """Two of 108 tokens lie behind their sequence's first chunk; the last of those predicts nothing."""
    monkeypatch.setattr(grad, "LENGTHS", (15,) * 6 + (18,))
    data = run(grad.grad)
    assert [row["parameter"] for row in data["rows"] if not row["within"]] == []
    assert data["caught"]["carried-state"] == data["caught_at_operands"]["carried-state"], "too large to show anything"
    assert all(data["caught_at_operands"].values()), data["caught_at_operands"]
