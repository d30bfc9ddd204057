"""Evidence that passed was made with the lock of today; anything else is a claim about another tree."""
import json
import pathlib

import pytest

from prove import record

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_no_record_in_the_repository_is_stale():
    stale = record.stale(ROOT / "evidence", ROOT / "patchset.lock")
    assert not stale, "run these again: " + "; ".join(f"{name}: {why}" for name, why in stale.items())


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def found():
    return {path.stem: json.loads(path.read_text()) for path in (ROOT / "evidence").rglob("*.json")}


def cell(readme, record_name):
    """README's text of the table cell that links to the record."""
    (text,) = [part for line in readme.splitlines() for part in line.split(" | ")
               if line.startswith("|") and f"(evidence/{record_name}.json)" in part]
    return text


def test_the_readme_quotes_the_curves(readme, found):
    for name in ("nemotron-3.5-lightning-tiny", "nemotron-3.5-lightning-tiny-quantised", "deepseek-v4-tiny-train"):
        curve = found[f"train-{name}"]["curve"]
        assert f"reward {curve[0]:.2f} to {curve[-1]:.2f}" in cell(readme, f"train-{name}")


def test_the_readme_quotes_the_gradients(readme, found):
    for name in ("nemotron-3.5-lightning-tiny", "nemotron-3.5-lightning-tiny-quantised", "deepseek-v4-tiny-train"):
        data = found[f"grad-{name}"]
        rows = [row for row in data["rows"] if row["parameter"] != "logprobs" and "operands" not in row]
        caught = sum(max(data["caught"][fault], data["caught_at_operands"][fault]) > 0 for fault in data["caught"])
        assert (f"[{sum(row['within'] for row in rows)} of {len(rows)}; {caught} of {len(data['caught'])}]"
                in cell(readme, f"grad-{name}"))


def test_the_readme_quotes_the_speeds(readme, found):
    for name, floor in (("deepseek-v4", 0.88), ("nemotron-3.5-lightning", 0.85)):
        bench, unchanged = found[f"bench-{name}-tiny"], found[f"unchanged-{name}-tiny"]
        kernels = bench["kernels_us"]["off"] / bench["kernels_us"]["on"]
        assert bench["floor"] == floor
        assert (f"[{bench['ratio']:.2f}](evidence/bench-{name}-tiny.json) (floor {floor}); kernels {kernels:.2f}"
                in cell(readme, f"bench-{name}-tiny"))
        assert f"speed {unchanged['speed']['ratio']:.2f}]" in cell(readme, f"unchanged-{name}-tiny")
        assert f"{unchanged['speed']['noise']:.0%}" in readme
    ratio = found["async-nemotron-3.5-lightning-tiny-lag-2"]["summary"]["throughput"]["ratio"]
    assert f"alone on its GPU: {ratio:.2f} (" in readme


def test_the_readme_quotes_the_kernels(readme, found):
    for key in ("worst_ratio", "average_ratio", "mixed_ratio"):
        assert " / ".join(f"{batch[key]:.2f}" for batch in found["mamba2"]["decode"]) in readme
    top_k = [one["ratio"] for one in found["topk"]["cells"]]
    assert f"takes {min(top_k):.2f} to {max(top_k):.2f} of the time" in readme
    roofline = [one["of_roofline"] for one in found["gather"]["results"]]
    assert f"at {min(roofline):.0%}".rstrip("%") in readme and f"{max(roofline):.0%} of 4.8 TB/s" in readme


def test_the_readme_quotes_what_the_trainers_cost(readme, found):
    def quoted(name, arms, key):
        ratios = [row[key] for row in found[f"cost-{name}"]["rows"] if row["arm"] in arms]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    every = ["aligned", "aligned, recomputed"]
    assert quoted("deepseek-v4-tiny-train", every[:1], "both_ratio") in cell(readme, "cost-deepseek-v4-tiny-train")
    assert f"with recomputation {quoted('deepseek-v4-tiny-train', every[1:], 'both_ratio')}" in readme
    name = "nemotron-3.5-lightning-tiny"
    assert quoted(name, every, "both_ratio") in cell(readme, f"cost-{name}")
    forward = f"forward {quoted(name, every, 'forward_ratio')}, kernels alone {quoted(name, every, 'kernels_ratio')}"
    assert forward in " ".join(readme.split())


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
