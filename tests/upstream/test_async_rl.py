"""`prove async` over the pinned megatron-core as released, on a CPU: real worker process, real actor, real files; the
reference kernels stand for vLLM's on both sides (tests/unit/async_fake.py)."""
import os
import pathlib
import shutil

import pytest

from prove import async_rl, recipe, ui

ROOT = pathlib.Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch"
SETTINGS = dict(lag=2, updates=8, stop_after=6, synchronous=4, groups=2, answers=2, tokens=6, lr=1e-2)


@pytest.fixture
def run(megatron_tree, tmp_path, monkeypatch):
    monkeypatch.setattr(async_rl, "WARM", 2)
    shutil.copytree(OVERLAY, megatron_tree / "megatron" / "zero_mismatch", dirs_exist_ok=True)
    (tmp_path / "config.json").write_text("{}")
    path = os.pathsep.join(map(str, (megatron_tree, ROOT / "tests" / "unit")))
    env = {"FAKE_SITE": str(megatron_tree), "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def call(fault=None, backend="async_fake", **changed):
        made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": str(tmp_path), "vocab": 64},
                                                       "engine": {"fault": fault}})
        return async_rl.async_rl(made, ui.UI(json_only=True), async_rl.Settings(**SETTINGS | changed), out=tmp_path,
                                 logs=tmp_path / "logs", budget=300.0, env=env,
                                 backend=str(ROOT / "tests" / "unit" / f"{backend}.py"))
    return call


def test_samples_of_older_versions_agree_at_their_own_version_across_a_stop_and_a_resume(run):
    data = run()
    rows = {part: [row for row in data["rows"] if row["part"] == part]
            for part in ("synchronous", "asynchronous", "resumed")}
    assert [len(found) for found in rows.values()] == [4, 6, 2]
    assert all(row["equal"] and row["words"]["tokens"] == 24 for row in data["rows"])
    assert all(row["d3"] == 0 and row["max_weight"] == 1 for row in rows["synchronous"])
    lagging = [row for row in rows["asynchronous"] if row["lags"] != [0]]
    assert lagging and all(row["d3"] > 0 and row["kernel_k3"] == 0 for row in lagging)
    assert max(int(lag) for lag in data["summary"]["lags"]) <= 2
    assert data["summary"]["every_task_once"] and data["summary"]["stopped_and_resumed"]
    assert data["summary"]["lag_reached"] and data["summary"]["lags"]["2"] >= 1
    assert data["summary"]["death_made_good"] and data["killed"]["task"] >= 7
    assert data["stopped"]["version"] == 6 and data["stopped"]["arrived"], "samples that crossed the stop were trained"
    assert rows["asynchronous"][0]["version"] == 0, "from the first weights, not from those of the synchronous part"
    assert data["summary"]["throughput"]["ratio"] > 0
    assert not data["passed"], "a fake engine is not the locked tree"


def test_a_worker_that_keeps_its_old_weights_is_a_difference(run):
    data = run(fault="stale worker")
    found = data["rows"][SETTINGS["synchronous"]:]
    assert all(row["equal"] for row in data["rows"][:SETTINGS["synchronous"]])
    assert not found[-1]["equal"] and found[-1]["kernel_k3"] > 0 and found[-1]["words"]["differing_words"] > 0
    assert all(row["equal"] for row in found[:-1]) and len(found) < SETTINGS["stop_after"], "stopped where it parted"
    assert not data["passed"] and not data["summary"]["equal"]


def test_a_quantised_worker_takes_codes_and_scales_the_caches_too(run, monkeypatch):
    monkeypatch.setattr(async_rl, "MICRO", 1)  # one sequence a micro-batch: a CPU's fp32 GEMM takes its order from M
    data = run(backend="async_fake_nemotron_quantised", lag=1, updates=6, stop_after=4)
    assert "error" not in data and len(data["rows"]) == 10
    assert all(row["equal"] and row["words"]["tokens"] == 24 for row in data["rows"])
    assert data["summary"]["lag_reached"] and data["summary"]["every_task_once"]
    assert data["summary"]["stopped_and_resumed"] and data["summary"]["death_made_good"]
