"""Evidence that passed was made with the lock of today; anything else is a claim about another tree."""
import json
import pathlib

import pytest

from prove import record

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_no_record_in_the_repository_is_stale():
    stale = record.stale(ROOT / "evidence", ROOT / "patchset.lock")
    assert not stale, "run these again: " + "; ".join(f"{name}: {why}" for name, why in stale.items())


def test_the_readme_quotes_the_records():
    readme = (ROOT / "README.md").read_text()
    found = {path.stem: json.loads(path.read_text()) for path in (ROOT / "evidence").rglob("*.json")}
    for model in ("nemotron-3.5-lightning-tiny", "nemotron-3.5-lightning-tiny-quantised", "deepseek-v4-tiny-train"):
        line = next(line for line in readme.splitlines() if f"(evidence/train-{model}.json)" in line)
        curve = found[f"train-{model}"]["curve"]
        assert f"rises from {curve[0]:.2f} to {curve[-1]:.2f}" in line
    ratio = found["async-nemotron-3.5-lightning-tiny-lag-2"]["summary"]["throughput"]["ratio"]
    assert f"alone on its GPU: {ratio:.2f} (" in readme
    for key in ("worst_ratio", "average_ratio", "mixed_ratio"):
        assert " / ".join(f"{batch[key]:.2f}" for batch in found["mamba2"]["decode"]) in readme
    top_k = [cell["ratio"] for cell in found["topk"]["cells"]]
    assert f"takes {min(top_k):.2f} to {max(top_k):.2f} of the time" in readme
    dsv4, nemotron = (found[f"bench-{name}-tiny"] for name in ("deepseek-v4", "nemotron-3.5-lightning"))
    assert f"DeepSeek-V4 {dsv4['ratio']:.2f} (wanted 0.88), Nemotron-H {nemotron['ratio']:.2f} (wanted 0.85)" in readme
    kernels = [made["kernels_us"]["off"] / made["kernels_us"]["on"] for made in (dsv4, nemotron)]
    assert "own ratio is {:.2f} and {:.2f}".format(*kernels) in readme
    speeds = [found[f"unchanged-{name}-tiny"]["speed"] for name in ("deepseek-v4", "nemotron-3.5-lightning")]
    assert "{:.2f} for DeepSeek-V4 and {:.2f} for Nemotron-H".format(*(made["ratio"] for made in speeds)) in readme
    assert "up to {:.0%} and {:.0%} from 1".format(*(made["noise"] for made in speeds)) in readme


def test_the_readme_quotes_what_the_trainers_cost():
    readme = (ROOT / "README.md").read_text()
    dsv4, nemotron = (json.loads((ROOT / f"evidence/cost-{name}.json").read_text())
                      for name in ("deepseek-v4-tiny-train", "nemotron-3.5-lightning-tiny"))

    def quoted(data, arms, key):
        found = [row[key] for row in data["rows"] if row["arm"] in arms]
        return f"{min(found):.2f} to {max(found):.2f}"

    assert f"forward and backward {quoted(dsv4, ['aligned'], 'both_ratio')} of Megatron's ordinary BF16" in readme
    assert f"with recomputation {quoted(dsv4, ['aligned, recomputed'], 'both_ratio')}" in readme
    every = ["aligned", "aligned, recomputed"]
    assert f"forward {quoted(nemotron, every, 'forward_ratio')} of the ordinary path" in readme
    low, high = (f"{float(figure):.1f}" for figure in quoted(nemotron, every, "both_ratio").split(" to "))
    assert f"forward and backward **{low} to {high}** by the clock" in readme


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "patchset.lock").write_text(json.dumps({"targets": {"vllm@0/all": {"digest": "today", "paths": {}}}}))

    def write(**data):
        base = {"schema": 1, "passed": True, "complete": True, "rows": [{"case": "base"}],
                "engines": {"graph": {"lock": {"state": "locked", "entry": "vllm@0/all", "digest": "today"}}}}
        (tmp_path / "r.json").write_text(json.dumps(base | data))
        return record.stale(tmp_path, tmp_path / "patchset.lock")
    return write


def test_a_record_of_todays_lock_is_fresh(folder):
    assert folder() == {}


def test_a_record_of_another_lock_is_stale(folder):
    lock = {"state": "locked", "entry": "vllm@0/all", "digest": "yesterday"}
    assert "r.json" in folder(engines={"graph": {"lock": lock}})


def test_one_unlocked_side_makes_a_record_stale(folder):
    good, other = {"state": "locked", "digest": "today"}, {"state": "other", "digest": "today"}
    assert "r.json" in folder(engines={"first": {"lock": good}, "restored": {"lock": other}})
    assert "r.json" in folder(actor_lock=other)


def test_a_record_without_rows_is_stale(folder):
    assert "r.json" in folder(rows=[])


def test_a_record_of_no_lock_is_stale(folder):
    assert "r.json" in folder(engines={"graph": {"lock": {"state": "other", "digest": "today"}}})
    assert "r.json" in folder(engines={})


def test_a_record_of_another_trainer_is_stale(folder):
    assert folder(actor_lock={"state": "locked", "digest": "today"}) == {}
    assert "r.json" in folder(actor_lock={"state": "locked", "digest": "yesterday"})


def test_a_record_that_does_not_claim_to_have_passed_is_left_alone(folder):
    assert folder(passed=False, engines={}) == {}


def test_the_untouched_wheel_may_stand_beside_the_locked_tree(folder):
    locks = {"off": {"lock": {"state": "pristine", "digest": "today"}},
             "on": {"lock": {"state": "locked", "digest": "today"}}}
    assert folder(verb="unchanged", engines=locks) == {}
    assert "r.json" in folder(engines=locks)
    assert "r.json" in folder(verb="unchanged", engines={"off": locks["off"]})
