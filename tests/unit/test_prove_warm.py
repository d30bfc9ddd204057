"""Warming on a fake engine: every size is visited, a failing one is named, and time is accounted for."""
import pathlib

from prove import recipe, ui, warm

FAKE = str(pathlib.Path(__file__).with_name("prove_fake.py"))


def run(tmp_path, fault=None, budget=100.0):
    (tmp_path / "jobs.py").write_text("JOBS = {'one': lambda: None}\n")
    made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": "m", "vocab": 97}, "engine": {"fault": fault},
                                                   "precompile": {"script": "jobs.py"}})
    return warm.warm(made, ui.UI(json_only=True), out=tmp_path, logs=tmp_path / "logs", budget=budget, modes=[True],
                     env={"FAKE_SITE": str(tmp_path)}, backend=FAKE)


def test_every_size_is_visited_in_both_engines(tmp_path):
    data = run(tmp_path)
    assert data["passed"] and [r.get("job") or r["engine"] for r in data["rows"]] == [
        "one", "eager, VLLM_BATCH_INVARIANT=1", "graph, VLLM_BATCH_INVARIANT=1"]
    for row in data["rows"][1:]:
        sizes = {(s["kind"], s["size"]) for s in row["shapes"]}
        assert sizes == {("prefill", n) for n in warm.PREFILLS} | {("decode", n) for n in warm.DECODES}
        assert not any("error" in s for s in row["shapes"]) and "where" in row


def test_a_size_that_fails_is_named_and_the_rest_still_visited(tmp_path):
    data = run(tmp_path, fault="raise")
    assert not data["passed"] and all("illegal memory access" in s["error"] for s in data["rows"][1]["shapes"])


def test_sizes_out_of_budget_are_named(tmp_path):
    data = run(tmp_path, budget=9.0)
    assert not data["passed"] and data["rows"][1]["shapes"][0]["error"] == "out of budget"
