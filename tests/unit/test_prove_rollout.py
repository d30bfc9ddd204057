"""The harness end to end on a fake engine in a real subprocess: it passes what is equal and notices what is planted."""
import hashlib
import json
import pathlib

import pytest

from prove import cases, recipe, record, rollout, ui, workload
from prove.engine import Engine, EngineError

FAKE = str(pathlib.Path(__file__).with_name("prove_fake.py"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a rollout on the fake engine, whose site is bound to a lock made for it."""
    module = tmp_path / "site" / "vllm" / "m.py"
    module.parent.mkdir(parents=True)
    module.write_text("locked")
    sha = hashlib.sha256(b"locked").hexdigest()
    lock = tmp_path / "patchset.lock"
    lock.write_text(json.dumps({"targets": {"vllm@0/all": {
        "digest": "d", "paths": {"vllm/m.py": {"before": None, "after": sha}}}}}))
    bind = record.bind
    monkeypatch.setattr(record, "bind", lambda folder: bind(folder, lock_path=lock))
    monkeypatch.setattr(cases, "EDGE_CHUNKS", (127, 513))

    def go(fault=None, names=None, budget=100.0, tokens=100):
        made = recipe.Recipe("fake", tmp_path, None, {
            "model": {"path": "m", "vocab": 97}, "engine": {"fault": fault}})
        return rollout.rollout(made, ui.UI(json_only=True), names=names, tokens=tokens, invariant=True, out=tmp_path,
                               logs=tmp_path / "logs", budget=budget, env={"FAKE_SITE": str(tmp_path / "site")},
                               backend=FAKE)
    go.site = module
    return go


def states(data):
    return {row["case"]: row["state"] for row in data["rows"]}


def test_a_consistent_engine_passes_every_case(run):
    data = run()
    assert set(states(data).values()) == {"equal"}, {r["case"]: (r["state"], r.get("unmet")) for r in data["rows"]}
    assert data["complete"] and data["passed"]
    assert data["engines"]["graph"]["lock"]["digest"] == "d"
    assert all(row["tokens"] > 0 and row["differing_words"] == 0 for row in data["rows"])


def test_the_record_says_which_prompt_lengths_and_decode_batches_ran(run):
    data = run(names=["alone", "prefill-batched"])
    lengths = sorted({len(r.prompt) for r in workload.build(100, 97).requests})
    assert data["ran"] == {"prompt_lengths": lengths, "decode_batches": [1, len(lengths)]}
    assert [row["prompt_lengths"] for row in data["rows"]] == [lengths, [], lengths]
    assert run("no start", ["twice"])["ran"] == {"prompt_lengths": [], "decode_batches": []}


def test_dependence_on_the_batch_is_found_where_batches_differ(run):
    found = states(run("batch", ["twice", "alone"]))
    assert found == {"base": "equal", "twice": "equal", "alone": "differs"}


def test_dependence_on_the_phase_is_found_by_the_prefill(run):
    data = run("phase", ["twice", "prefill-batched"])
    assert states(data) == {"base": "equal", "twice": "equal", "prefill-batched": "differs"}
    assert not data["passed"] and data["rows"][-1]["first"]["request"] == "r000"


def test_hits_behind_which_nothing_was_scored_show_nothing(run):
    row = run("unscored hits", ["prefix-turns"])["rows"][-1]
    assert row["state"] == "vacuous" and "hits scored what follows them (0 did)" in row["unmet"][0]


def test_prompt_logprobs_that_follow_the_order_of_cache_readers_are_found(run):
    data = run("order", ["reversed", "prefix-warm", "prefix-turns"])
    assert states(data) == {"base": "equal", "reversed": "equal", "prefix-warm": "equal", "prefix-turns": "differs"}


def test_nan_fails_although_both_runs_have_it(run):
    assert states(run("nan", ["twice"])) == {"base": "differs", "twice": "differs"}


def test_a_missing_answer_fails(run):
    data = run("lost", ["twice"])
    assert states(data)["base"] == "differs" and data["rows"][0]["missing"] > 0


def test_another_engine_than_the_locked_one_is_no_evidence(run):
    run.site.write_text("edited")
    data = run(names=["twice"])
    assert set(states(data).values()) == {"equal"} and not data["complete"] and not data["passed"]


def test_an_engine_that_raises_fails_its_cases_and_the_rest_is_not_compared(run):
    data = run("raise", ["twice"])
    assert states(data) == {"base": "failed", "twice": "not run"}
    assert "illegal memory access" in data["rows"][0]["error"] and not data["passed"]


def test_an_engine_that_dies_is_reported_with_its_last_words(run):
    data = run("die", ["twice"])
    assert states(data) == {"base": "failed", "twice": "not run"}
    assert "ended with status 3" in data["rows"][0]["error"]


def test_a_case_out_of_time_is_stopped(run, monkeypatch):
    slow = cases.Case("base", "", cases.base, cost=0.0, timeout=1.0)
    monkeypatch.setattr(cases, "CASES", (slow,))
    data = run("hang")
    assert states(data) == {"base": "failed"} and "did not finish in" in data["rows"][0]["error"]


def test_cases_out_of_budget_are_named_and_fail_the_run(run):
    data = run(names=["twice"], budget=20.0, tokens=60000)
    assert set(states(data).values()) == {"not run"} and not data["complete"] and not data["passed"]
    assert data["rows"][0]["why"].startswith("out of budget")


def test_a_refused_start_is_reported_with_its_reason(run):
    data = run("no start", ["twice"])
    assert all("TP > 1" in row["why"] for row in data["rows"]) and not data["passed"]


def test_a_vacuous_case_is_not_equal(run, monkeypatch):
    def nothing_happened(ctx):
        cases.twice(ctx)
        ctx.require(False, "something happened")
    monkeypatch.setattr(cases, "CASES", (cases.BY_NAME["base"], cases.Case("empty", "", nothing_happened)))
    assert states(run())["empty"] == "vacuous"


def test_a_step_of_pieces_that_shares_no_graph_is_vacuous(run, monkeypatch):
    monkeypatch.setattr(cases, "PIECES", 0)  # the fake then runs them eager
    assert states(run(names=["joined", "joined-pieces"]))["joined-pieces"] == "vacuous"


def test_the_engines_start_side_by_side_and_all_compare_with_the_one_base_run(run):
    data = run(names=["other-process", "eager-engine"])
    assert set(data["engines"]) == {"graph", "second", "eager"} and data["passed"]
    assert data["rows"][0]["case"] == "base" and len(data["rows"]) == 3


def test_events_and_results_share_the_pipe(tmp_path):
    events = []
    with Engine({"model": "m", "flags": {}}, backend=FAKE, env={"FAKE_SITE": str(tmp_path)}, log=tmp_path / "log",
                on_event=events.append, timeout=30) as engine:
        assert engine.info["versions"] == {"vllm": "fake"}
        assert engine.call("where", timeout=5) is not None
        with pytest.raises(EngineError, match="no attribute 'op_unknown'"):
            engine.call("unknown", timeout=5)
        process = engine.process
    assert {"event": "log", "text": "fake started"} in events
    assert process.poll() is not None  # leaving the context ended it
