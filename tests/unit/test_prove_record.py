"""A record is evidence only for the engine whose files are exactly the lock's."""
import hashlib
import json

import pytest
from prove import asked, record
from prove.__main__ import parser


def lock(tmp_path, contents):
    """A lock of one entry: path -> (before, after) text, None for no file."""
    def sha(text):
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()
    paths = {p: {"before": sha(b), "after": sha(a), "by": ["slug"]} for p, (b, a) in contents.items()}
    path = tmp_path / "patchset.lock"
    path.write_text(json.dumps({"schema": 1, "targets": {
        "vllm@0.33.0/all": {"patches": {}, "paths": paths, "tree": "t", "digest": "d1"},
        "megatron@0.19.2/all": {"patches": {}, "paths": {}, "tree": "t", "digest": "d2"}}}))
    return path


def site(tmp_path, contents):
    for name, text in contents.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site"


CONTENTS = {"vllm/a.py": ("old", "new"), "vllm/zero_mismatch/b.py": (None, "added")}


def test_the_locked_tree_is_recognised(tmp_path):
    found = record.bind(site(tmp_path, {"vllm/a.py": "new", "vllm/zero_mismatch/b.py": "added"}),
                        lock_path=lock(tmp_path, CONTENTS))
    assert found == {"state": "locked", "entry": "vllm@0.33.0/all", "digest": "d1"}


def test_the_untouched_wheel_is_pristine(tmp_path):
    assert record.bind(site(tmp_path, {"vllm/a.py": "old"}), lock_path=lock(tmp_path, CONTENTS))["state"] == "pristine"


def test_an_untouched_release_is_pristine_though_another_ones_smaller_entry_is_nearer(tmp_path):
    path = lock(tmp_path, {**CONTENTS, "vllm/c.py": ("old", "new")})
    data = json.loads(path.read_text())
    small = {"vllm/a.py": {"before": "0" * 64, "after": "1" * 64}}
    data["targets"]["vllm@0.32.0/hopper"] = {"paths": small, "digest": "d0"}
    path.write_text(json.dumps(data))
    found = record.bind(site(tmp_path, {"vllm/a.py": "old", "vllm/c.py": "old"}), lock_path=path)
    assert (found["state"], found["entry"]) == ("pristine", "vllm@0.33.0/all")


def test_one_edited_file_is_named(tmp_path):
    found = record.bind(site(tmp_path, {"vllm/a.py": "edited", "vllm/zero_mismatch/b.py": "added"}),
                        lock_path=lock(tmp_path, CONTENTS))
    assert found["state"] == "other" and found["differs"] == ["vllm/a.py"]


def test_without_a_lock_nothing_is_bound(tmp_path):
    found = record.bind(site(tmp_path, {"vllm/a.py": "new"}), lock_path=tmp_path / "patchset.lock")
    assert found["state"] == "unlocked"


def test_a_killed_run_leaves_its_rows_and_is_incomplete(tmp_path):
    kept = record.Record("rollout", "m-tiny", {"tokens": 5}, tmp_path)
    kept.row({"case": "base", "state": "equal"})
    data = json.loads((tmp_path / "rollout-m-tiny.json").read_text())
    assert [r["case"] for r in data["rows"]] == ["base"] and not data["complete"] and not data["passed"]


def test_an_incomplete_run_cannot_pass(tmp_path):
    kept = record.Record("rollout", "m", {}, tmp_path)
    kept.finish(complete=False, passed=True)
    assert json.loads(kept.path.read_text())["passed"] is False


def test_no_path_of_the_machine_reaches_a_record(tmp_path):
    kept = record.Record("rollout", "m", {}, tmp_path)
    kept.engine("graph", {"gpu": "g", "vllm_path": "/somewhere/vllm"}, {"model": "/here/tiny", "seed": 0}, {})
    assert "/somewhere" not in kept.path.read_text() and "/here" not in kept.path.read_text()


def test_the_trainers_tree_is_the_one_that_it_imported_and_not_the_one_beside_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "bind", lambda site, upstream="vllm": f"{upstream} of {site}")
    kept = record.Record("train", "m", {}, tmp_path)
    info = {"vllm_path": "/a/vllm", "megatron_path": "/b/megatron"}
    assert kept.engine("first", info, {}, {}) == "vllm of /a"
    kept.actor(info)
    kept.write()
    assert kept.data["actor_lock"] == "megatron of /b" and "/b/megatron" not in kept.path.read_text()


def test_a_declared_commit_stands_where_there_is_no_history(tmp_path, monkeypatch):
    monkeypatch.setattr(record.Record, "declared_commit", "abc")
    assert record.Record("rollout", "m", {}, tmp_path).data["commit"] == "abc"
    assert record.commit(tmp_path) == "unknown"


def test_a_run_that_fails_does_not_cost_the_record_that_passed(tmp_path):
    def run(passes):
        kept = record.Record("rollout", "r", {"passes": passes}, tmp_path)
        kept.row({"case": "base"})
        kept.finish(True, passes)
    run(True)
    run(False)
    run(False)
    path, proof = tmp_path / "rollout-r.json", tmp_path / "rollout-r.json.passed"
    assert json.loads(proof.read_text())["passed"] and not json.loads(path.read_text())["passed"]
    run(True)
    assert not proof.exists() and json.loads(path.read_text())["passed"]


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Runs a verb under a lock; the names of the records in the folder, and what each was asked for."""
    monkeypatch.setattr(record, "digests", lambda: {"today"})

    def go(verb="train", passes=True, digest="today", **arguments):
        kept = record.Record(verb, "m", arguments, tmp_path)
        kept.data["engines"]["e"] = {"lock": {"state": "locked", "digest": digest}}
        kept.row({"case": "base"})
        kept.finish(True, passes)
        return {path.name: json.loads(path.read_text())["arguments"] for path in tmp_path.glob("*.json*")}
    return go


FULL = {"updates": 50, "restore_after": 5, "lr": 1e-4}


@pytest.mark.parametrize("verb, shown, wanted, name", [
    ("train", FULL, {**FULL, "updates": 3}, "train-m.updates-3.json"),
    ("train", FULL, {**FULL, "updates": 80, "restore_after": 0}, "train-m.restore_after-0.json"),
    ("rollout", {"cases": None, "tokens": 20000}, {"cases": ["twice", "alone"], "tokens": 3000},
     "rollout-m.cases-alone+twice.tokens-3000.json"),
    ("rollout", {"cases": ["twice"]}, {"cases": ["alone"]}, "rollout-m.cases-alone.json"),
    ("rollout", {"cases": None}, {"cases": ["alone", "alone"]}, "rollout-m.cases-alone.json"),  # once is all it shows
    ("bench", {"most_out_tokens": 3000, "seconds": 240.0}, {"most_out_tokens": 3000, "seconds": 60.0},
     "bench-m.seconds-60.0.json"),
    ("cost", {"runs": 7}, {"runs": 1}, "cost-m.runs-1.json")])
@pytest.mark.parametrize("passes", [True, False])
def test_a_run_that_asks_for_less_takes_no_fuller_records_place(verb, shown, wanted, name, passes, ran):
    ran(verb, **shown)
    assert ran(verb, passes=passes, **wanted) == {f"{verb}-m.json": shown, name: wanted}


@pytest.mark.parametrize("verb, shown, wanted", [
    ("train", FULL, FULL), ("train", FULL, {**FULL, "updates": 51, "lr": 5e-5}),
    ("train", FULL, {**FULL, "restore_after": 1}),  # a restore is shown after whichever update
    ("rollout", {"cases": ["twice"]}, {"cases": None}),
    ("rollout", {"cases": ["twice"]}, {"cases": ["alone", "twice"]}),
    ("bisect", {"arms": ["decode", "alone"]}, {"arms": ["alone", "decode"]})])
def test_a_run_that_asks_for_all_that_a_record_shows_takes_its_place(verb, shown, wanted, ran):
    ran(verb, **shown)
    assert ran(verb, **wanted) == {f"{verb}-m.json": wanted}


def test_a_narrower_record_gives_way_to_no_narrower_one(ran):
    ran(**FULL)
    ran(**{**FULL, "updates": 20, "groups": 16})
    found = ran(**{**FULL, "updates": 3, "groups": 16})
    found = ran(**{**FULL, "updates": 20, "groups": 4})
    assert sorted(found) == ["train-m.json", "train-m.updates-20.groups-4.json", "train-m.updates-20.json",
                             "train-m.updates-3.json"]


def test_a_fuller_record_of_another_lock_or_one_that_did_not_pass_gives_way(ran):
    ran(digest="yesterday", updates=50)
    assert ran(updates=20) == {"train-m.json": {"updates": 20}}
    ran(digest="yesterday", updates=50)
    ran(passes=False, updates=50)
    assert ran(updates=3) == {"train-m.json": {"updates": 3}}


def test_a_fuller_record_stays_where_a_failed_run_has_set_it_aside(ran):
    ran(updates=50)
    ran(passes=False, updates=50)
    assert sorted(ran(updates=3)) == ["train-m.json", "train-m.json.passed", "train-m.updates-3.json"]


def test_a_list_that_is_too_long_for_a_name_is_in_it_by_its_digest(ran):
    cases = [f"case-number-{index}" for index in range(20)]
    ran("rollout", cases=None)
    (name,) = set(ran("rollout", cases=cases)) - {"rollout-m.json"}
    assert name.startswith("rollout-m.cases-20-") and len(name) < 50
    assert len(ran("rollout", cases=cases[1:] + ["other"])) == 3


def test_every_option_is_an_amount_or_known_to_be_none():
    """A new option by which a run shows less has to be named in prove/asked.py."""
    verbs = next(action for action in parser()._actions if action.dest == "verb").choices
    options = {action.dest for verb in verbs.values() for action in verb._actions}
    none = {"help", "recipe", "tiny", "json", "out", "logs", "commit", "cache", "budget", "url", "site", "pristine",
            "turn", "at_once", "off",
            "left", "right",           # the arguments' arms
            "contrast", "sleep", "lag",  # in the record's name
            "patches", "tests_only",   # what they leave out stays in the record
            "lr", "stop_after"}
    assert options - set(asked.AMOUNTS) == none


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null"])
def test_a_damaged_lock_says_how_to_get_it_back(text, tmp_path):
    (tmp_path / "patchset.lock").write_text(text)
    with pytest.raises(ValueError, match="patchset.lock is damaged .*git checkout"):
        record.bind(tmp_path, lock_path=tmp_path / "patchset.lock")


def test_a_number_that_json_does_not_have_costs_no_record(tmp_path):
    kept = record.Record("grad", "m", {}, tmp_path)
    kept.row({"parameter": "w", "errors": (float("nan"), float("inf"), 0.5)})
    kept.finish(True, False, norms=[float("-inf")])
    data = json.loads(kept.path.read_text(), parse_constant=pytest.fail)
    assert data["rows"] == [{"parameter": "w", "errors": ["nan", "inf", 0.5]}] and data["norms"] == ["-inf"]
    assert json.loads(record.text(kept.data), parse_constant=pytest.fail) == data  # what --json prints
