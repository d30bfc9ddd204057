"""Two arms a patch: what counts as shown, and that the site is left fully patched."""
import json
import pathlib

import pytest

from prove import counter, recipe, record, ui

FAKE = str(pathlib.Path(__file__).with_name("prove_fake.py"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the counter on a fake site: repatching it sets the fault that the fake engine then has."""
    calls, faults = [], {"needed": "batch", "refuses": "refuse", "breaks": "raise", "unseen": None, "by-test": None}
    monkeypatch.setattr(counter, "read_patches", lambda: {slug: [f"t::{slug}"] for slug in faults})
    monkeypatch.setattr(counter, "unit_arm", lambda tests, env: (tests == ["t::by-test"], "1 passed"))
    monkeypatch.setattr(counter, "CASES", ("base", "alone"))
    monkeypatch.setattr(record, "bind", lambda folder: {"state": "locked", "entry": "e", "digest": "d"})
    made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": "m", "vocab": 97}, "engine": {}})
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)

    def copy_without(site, folder, slug):
        calls.append(slug)
        (folder / "fault").write_text(faults[slug] or "")
    monkeypatch.setattr(counter, "copy_without", copy_without)

    def go(patches=None):
        data = counter.counter(made, ui.UI(json_only=True), site=site, patches=patches, tokens=100, at_once=2,
                               out=tmp_path, logs=tmp_path / "logs", budget=1000.0, env={"FAKE_SITE": str(tmp_path)},
                               backend=FAKE)
        return {row["patch"]: row["state"] for row in data["rows"]}, data
    go.calls, go.site = calls, site
    return go


def test_each_patch_gets_its_verdict_on_a_copy_that_is_gone_afterwards(run):
    states, data = run()
    assert states == {"(all patches)": "equal", "needed": "shown", "refuses": "shown", "breaks": "failed",
                      "unseen": "unseen", "by-test": "shown"}
    assert sorted(run.calls) == ["breaks", "by-test", "needed", "refuses", "unseen"]
    assert [p.name for p in run.site.parent.glob("without-*")] == []
    assert data["complete"] and not data["passed"]


def test_rows_of_an_earlier_lease_stay_while_the_lock_is_the_same(run, tmp_path):
    run(["needed"])
    states, data = run(["by-test"])
    assert states == {"(all patches)": "equal", "needed": "shown", "by-test": "shown"} and not data["complete"]


def test_an_unknown_patch_is_refused(run):
    with pytest.raises(ValueError, match="no such patch: neded; there are: needed"):
        run(["neded"])


def test_only_a_refusal_of_batch_invariance_shows_anything():
    assert counter.verdict([], "start: ValueError: VLLM batch_invariant mode is not supported for X")[0] == "shown"
    assert counter.verdict([], "start: OutOfMemoryError: CUDA out of memory")[0] == "failed"


def test_the_series_names_a_counter_test_for_every_patch():
    found = counter.read_patches()
    assert found and all(found.values())
    root = pathlib.Path(counter.ROOT)
    assert all((root / test.partition("::")[0]).is_file() for tests in found.values() for test in tests)


def test_a_counter_test_that_is_skipped_shows_nothing(tmp_path):
    test = tmp_path / "test_x.py"
    test.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no GPU')\ndef test_c(): assert 0\n")
    assert counter.unit_arm([f"{test}::test_a"], {})[0]
    assert not counter.unit_arm([f"{test}::test_a", f"{test}::test_b"], {})[0]
    assert not counter.unit_arm([f"{test}::test_c"], {})[0]
    assert not counter.unit_arm([], {})[0]


def test_the_record_is_json(run, tmp_path):
    run(["unseen"])
    json.loads((tmp_path / "counter-fake.json").read_text())


def test_a_copy_shares_the_files_and_leaves_the_site_alone(tmp_path, monkeypatch):
    site, copy = tmp_path / "site", tmp_path / "copy"
    for name in ("vllm/big.so", "vllm-0.33.0.dist-info/RECORD"):
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(name)
    said = []
    monkeypatch.setattr(counter, "apply", lambda folder, *arguments: said.append((folder, *arguments)))
    copy.mkdir()
    counter.copy_without(site, copy, "topk-decode")
    assert said == [(copy, "revert"), (copy, "apply", "--without", "topk-decode")]
    assert (copy / "vllm/big.so").samefile(site / "vllm/big.so")
    assert (copy / "vllm-0.33.0.dist-info/RECORD").read_text() == "vllm-0.33.0.dist-info/RECORD"
