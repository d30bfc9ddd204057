"""`prove cost` over the pinned megatron-core as released, on a CPU: its buffers and optimizer around both models."""
import os
import pathlib
import shutil
from types import SimpleNamespace

import pytest

from prove import cost, cost_backend, recipe, ui
from prove.steps import on_device

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = {"nemotron_h": "nemotron-3.5-lightning", "deepseek_v4": "deepseek-v4"}
ARMS = ["ordinary", "ordinary, recomputed", "aligned", "aligned, recomputed"]


@pytest.fixture
def run(megatron_tree, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch",
                    megatron_tree / "megatron" / "zero_mismatch", dirs_exist_ok=True)
    monkeypatch.setattr(cost, "BATCHES", ((5, 5), (3, 20, 7)))
    overlay = tmp_path / "vllm_overlay"  # the Top-K's reference is the rollout's
    (overlay / "vllm").mkdir(parents=True)
    (overlay / "vllm" / "__init__.py").write_text("")
    shutil.copytree(ROOT / "overlays" / "vllm" / "vllm" / "zero_mismatch", overlay / "vllm" / "zero_mismatch")
    path = os.pathsep.join(map(str, (megatron_tree, overlay, ROOT / "tests" / "unit")))

    def call(family="nemotron_h", fault=""):
        made = recipe.Recipe("fake", ROOT / "recipes" / FOLDERS[family], "tiny", {
            "tiny": {"model": "tiny", "weights": "tiny/weights.py", "vocab": 64}, "engine": {}})
        return cost.cost(made, ui.UI(json_only=True), runs=1, out=tmp_path, logs=tmp_path / "logs", budget=600.0,
                         backend=str(ROOT / "tests" / "unit" / "cost_fake.py"),
                         env={"FAKE_SITE": str(megatron_tree), "PYTHONPATH": path, "FAULT": fault, "FAMILY": family,
                              "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    return call


def test_every_arm_of_every_batch_is_measured_and_both_models_are_one(run):
    data = run()
    assert [row["arm"] for row in data["rows"]] == 2 * ARMS
    assert all(row["forward_ms"] > 0 and row["both_ms"] > row["forward_ms"] / 2 for row in data["rows"])
    assert data["rows"][0]["both_ratio"] == 1.0 and data["rows"][2]["both_ratio"] > 0
    assert data["complete"] is False, "a fake engine is not the locked tree"
    assert max(data["distance"]) < 0.1 and set(data["optimizer_ms"]) == set(cost.KINDS)
    assert "requantisation" not in data, "nothing is quantised in this model"


def test_a_quantised_model_is_measured_without_its_cache_too(run):
    data = run("deepseek_v4")
    assert [row["arm"] for row in data["rows"]] == 2 * [*ARMS, "aligned, recomputed, no cache"]
    assert max(data["distance"]) < cost.APART
    quantised = data["requantisation"]
    assert quantised["once_ms"] > 0 and set(quantised["share"]) == {row["batch"] for row in data["rows"]}
    assert all(set(share) == {"without_cache", "with_cache"} for share in quantised["share"].values())


def test_two_models_that_are_not_one_are_noticed(run):
    assert min(run(fault="another model")["distance"]) > cost.APART


def test_a_call_that_launches_a_kernel_is_no_second_launch():
    def row(key, count, us):
        return SimpleNamespace(key=key, count=count, self_device_time_total=us)

    found = cost_backend.summary(on_device([row("cudaLaunchKernel", 7, 0.0), row("small", 4, 100.0),
                                            row("gemm", 3, 2000.0)]))
    assert (found["launches"], found["kernels_ms"]) == (7, 2.1)
    assert [one["kernel"] for one in found["longest"]] == ["gemm", "small"]
