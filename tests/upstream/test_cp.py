"""`prove cp` over the pinned megatron-core as released, on a CPU: its context-parallel group, its reduce-scatter, its
distributed optimizer over two gloo ranks; the reference kernels stand for vLLM's."""
import os
import pathlib
import shutil

import pytest

from prove import cp, recipe, train, ui

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "unit"
OVERLAY = ROOT / "overlays" / "megatron" / "megatron" / "zero_mismatch"


@pytest.fixture
def run(megatron_tree, tmp_path, monkeypatch):
    shutil.copytree(OVERLAY, megatron_tree / "megatron" / "zero_mismatch", dirs_exist_ok=True)
    monkeypatch.setattr(train, "LENGTHS", (1, 3, 16, 17, 20, 5))
    monkeypatch.setattr(cp, "MICRO", 200)
    (tmp_path / "config.json").write_text("{}")
    made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": str(tmp_path), "vocab": 64}, "engine": {}})
    path = os.pathsep.join(map(str, (megatron_tree, FAKES)))

    def call(fault=""):
        env = {"FAKE_SITE": str(megatron_tree), "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CP_FAULT": fault}
        data = cp.cp(made, ui.UI(json_only=True), out=tmp_path, logs=tmp_path / "logs", budget=600.0, env=env,
                     groups=6, answers=2, tokens=8, lr=1e-3, backend=str(FAKES / "trainer_fake.py"),
                     ranks_backend=str(FAKES / "cp_fake.py"))
        return {row["case"]: row for row in data["rows"]} | {"data": data}
    return call


def test_two_ranks_have_the_words_of_one_learn_what_it_learns_and_one_goes_on_from_their_checkpoint(
        run, tmp_path, monkeypatch):
    folder, after = str(tmp_path / "checkpoint"), {}
    update = cp._Proof._update

    def saved(self):
        row = update(self)
        kept = self.together("save", folder=folder)
        read = self.lone.call("actor", lr=1e-3, restore=folder)
        how = {"sequences": self.sequences, "micro": cp.MICRO}
        after.update(kept=kept, read=read, lone=self.lone.call("update", **how), ranks=self.together("update", **how))
        return row

    monkeypatch.setattr(cp._Proof, "_update", saved)
    found = run()
    assert [row["case"] for row in found["data"]["rows"]] == ["rollout", "gradients", "after update 1"]
    assert all(row["holds"] for row in found["data"]["rows"]), found["data"]["rows"]
    assert found["rollout"]["words"]["rank 1"]["tokens"] == 96
    learned = found["after update 1"]
    assert learned["same_weights"] and learned["distance"] < cp.UPDATE
    assert set(learned["words"]) == {"rank 0", "rank 1", "rank 1 and rank 0"}
    assert not found["data"]["passed"], "a fake engine is not the locked tree"
    # The optimizer's state is cut over the ranks: what one rank reads must be whole.
    assert {side["weights"] for side in after["kept"]} == {after["read"]["weights"]}
    assert after["read"]["version"] == after["kept"][0]["version"] == 1
    assert after["lone"]["words"] == after["ranks"][0]["words"]
    assert after["lone"]["norm"] == pytest.approx(after["ranks"][0]["norm"], rel=1e-2)


def test_rows_that_do_not_reach_the_other_rank_are_a_difference(run):
    found = run("own rows")
    assert not found["rollout"]["holds"] and not found["after update 1"]["holds"]
    assert found["rollout"]["words"]["lone"]["equal"]


def test_gradients_that_stay_on_their_rank_show_in_what_was_learned(run):
    found = run("no sum")
    assert found["rollout"]["holds"]
    assert not found["after update 1"]["holds"] and found["after update 1"]["distance"] > cp.UPDATE
