"""`prove grad`: what decides, and what a run leaves whose time ends or whose engine does."""
import json
import pathlib

import pytest

from prove import grad, recipe, record, ui

FAKE = str(pathlib.Path(__file__).with_name("grad_fake.py"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """What the command returns, which is also what it wrote."""
    monkeypatch.setattr(record, "bind", lambda site, upstream="vllm": {"state": "locked", "entry": "e", "digest": "d"})

    def go(fault=None, budget=100.0):
        made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": "m", "vocab": 97}, "engine": {"fault": fault}})
        data = grad.grad(made, ui.UI(json_only=True), out=tmp_path, logs=tmp_path / "logs", budget=budget,
                         env={"FAKE_SITE": str(tmp_path)}, backend=FAKE)
        assert json.loads((tmp_path / "grad-fake.json").read_text()) == json.loads(record.text(data))
        return data
    return go


def test_gradients_within_bounds_and_faults_that_are_caught_pass(run):
    data = run()
    assert data["passed"] and data["missing"] == [] and data["caught"] == {"one": 1, "other": 1}
    assert [(row["bound"], row["within"]) for row in data["rows"]] == [(0.04, True), (0.04, True)]


@pytest.mark.parametrize("fault", ["blind", "far", "nan"])
def test_a_fault_that_is_not_caught_or_a_gradient_over_its_bound_does_not_pass(fault, run):
    data = run(fault)
    assert data["complete"] and not data["passed"]


@pytest.mark.parametrize("fault, budget, said", [("hangs", 3.0, "more_gradients did not finish in"),
                                                 ("fails", 100.0, "RuntimeError: no memory is left")])
def test_a_run_whose_time_ends_keeps_what_was_compared_and_says_what_is_missing(fault, budget, said, run):
    data = run(fault, budget)
    assert [row["within"] for row in data["rows"]] == [True, True] and data["caught"] == {"one": 1}
    assert data["missing"] == ["planted other"] and said in data["error"]
    assert not data["complete"] and not data["passed"]


def test_a_gradient_over_its_bound_or_not_a_number_exceeds():
    rows = [{"error": 0.03, "usual_error": 0.02}, {"error": 0.05, "usual_error": 0.02},
            {"error": float("nan"), "usual_error": 0.02}, {"error": 2.0**-6, "usual_error": 0.0}]
    assert grad.exceeding(rows) == rows[1:3]
