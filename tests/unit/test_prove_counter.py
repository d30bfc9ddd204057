"""Two arms a patch: what counts as shown, what a record keeps from run to run, and that the site stays as it is."""
import json
import pathlib

import pytest

from prove import counter, counter_tests, recipe, record, ui
from prove.engine import EngineError

FAKE = str(pathlib.Path(__file__).with_name("prove_fake.py"))


def bound(folder):
    return {"state": "other" if folder.name.startswith("without-") else "locked", "entry": "e", "digest": "d"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the counter on a fake site: repatching it sets the fault that the fake engine then has."""
    calls, faults = [], {"needed": "batch", "refuses": "refuse", "breaks": "raise", "unseen": None, "by-test": None}
    asked = []
    monkeypatch.setattr(counter, "read_patches", lambda: {slug: [f"t::{slug}"] for slug in faults})

    def tests(nodes, env, logs):
        asked.append(nodes)
        return {node: "passed" if node == "t::by-test" else "failed" for node in nodes}
    monkeypatch.setattr(counter_tests, "run", tests)
    texts = {f"t::{slug}": "as it was" for slug in faults}
    monkeypatch.setattr(counter_tests, "texts", lambda nodes: {node: texts[node] for node in nodes})
    monkeypatch.setattr(counter, "CASES", ("base", "alone"))
    monkeypatch.setattr(record, "bind", bound)
    made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": "m", "vocab": 97}, "engine": {}})
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)

    def copy_without(site, folder, slug):
        calls.append(slug)
        (folder / "fault").write_text(faults[slug] or "")
    monkeypatch.setattr(counter, "copy_without", copy_without)

    def go(patches=None, tests_only=False):
        data = counter.counter(made, ui.UI(json_only=True), site=site, patches=patches, tests_only=tests_only,
                               tokens=100, at_once=2, out=tmp_path, logs=tmp_path / "logs", budget=1000.0,
                               env={"FAKE_SITE": str(tmp_path)}, backend=FAKE)
        return {row["patch"]: row["state"] for row in data["rows"]}, data
    go.calls, go.site, go.asked, go.texts = calls, site, asked, texts
    return go


def test_each_patch_gets_its_verdict_on_a_copy_that_is_gone_afterwards(run):
    states, data = run()
    assert states == {"(all patches)": "equal", "needed": "shown", "refuses": "shown", "breaks": "failed",
                      "unseen": "unseen", "by-test": "shown"}
    assert sorted(run.calls) == ["breaks", "by-test", "needed", "refuses", "unseen"]
    assert [p.name for p in run.site.parent.glob("without-*")] == []
    assert data["complete"] and not data["passed"]


def test_a_row_says_what_the_engine_and_what_the_counter_tests_found(run):
    rows = {row["patch"]: row for row in run()[1]["rows"]}
    assert rows["needed"]["engine"] == "shown" and rows["needed"]["counter_tests"] == {"t::needed": "failed"}
    assert rows["by-test"]["engine"] == "unseen"
    assert rows["by-test"]["why"] == "Counter-Tests: 1 passed; engine unseen: every case agrees without it"
    assert rows["unseen"]["why"].startswith("Counter-Tests: unseen failed; engine unseen")


def test_a_patch_that_cannot_be_left_out_fails_the_command_and_costs_no_other_row(run, monkeypatch):
    copy = counter.copy_without

    def refuse(site, folder, slug):
        if slug == "needed":
            raise ValueError("apply.py apply --without needed: exit 1")
        copy(site, folder, slug)
    monkeypatch.setattr(counter, "copy_without", refuse)
    with pytest.raises(ValueError, match="--without needed"):
        run()
    data = json.loads((run.site.parent / "counter-fake.json").read_text())
    assert {row["patch"] for row in data["rows"]} == {"(all patches)", "refuses", "breaks", "unseen", "by-test"}
    assert not data["complete"] and not data["passed"]


def test_an_arm_whose_engine_imports_another_vllm_than_its_copy_shows_nothing(run, monkeypatch):
    """As from a folder that has a vllm in it, which comes before PYTHONPATH: every case would agree."""
    monkeypatch.setattr(record, "bind", lambda folder: {"state": "locked", "entry": "e", "digest": "d"})
    with pytest.raises(ValueError, match="without by-test: the engine imported another vLLM"):
        run(["by-test"])
    assert not json.loads((run.site.parent / "counter-fake.json").read_text())["complete"]


def test_a_record_grows_while_the_lock_is_the_same(run, monkeypatch):
    states, data = run(tests_only=True)
    assert run.calls == [] and not data["complete"]
    assert states == {"by-test": "shown"} | dict.fromkeys(("needed", "refuses", "breaks", "unseen"), "not run")
    run(["needed"])
    states, data = run(["by-test"])
    assert states == {"(all patches)": "equal", "needed": "shown", "by-test": "shown",
                      **dict.fromkeys(("refuses", "breaks", "unseen"), "not run")} and not data["complete"]
    assert all("t::by-test" not in nodes for nodes in run.asked[1:])  # it had passed
    row = next(row for row in run(["needed"])[1]["rows"] if row["patch"] == "by-test")
    assert row["why"] == "Counter-Tests: 1 passed; engine unseen: every case agrees without it"
    monkeypatch.setattr(record, "bind", lambda folder: {**bound(folder), "digest": "another"})
    assert run(["by-test"])[0]["needed"] == "not run"


def test_a_counter_tests_pass_is_kept_only_for_the_text_that_gave_it(run):
    run(tests_only=True)
    assert run(tests_only=True) and "t::by-test" not in run.asked[-1]
    run.texts["t::by-test"] = "edited"
    assert run(tests_only=True) and "t::by-test" in run.asked[-1]
    assert run(tests_only=True) and "t::by-test" not in run.asked[-1]
    file = run.site.parent / "counter-fake.json"
    data = json.loads(file.read_text())
    del data["counter_tests"]["texts"]  # as in the records of before
    file.write_text(json.dumps(data))
    assert run(tests_only=True) and "t::by-test" in run.asked[-1]


@pytest.mark.parametrize("edited, again", [
    ("tests/unit/test_a.py", {"a"}), ("tests/unit/shared_cases.py", {"a"}), ("tests/kernels/table.h", {"a"}),
    ("tests/unit/other.py", set()), ("tests/unit/conftest.py", {"a", "b"}), ("tests/conftest.py", {"a", "b"}),
    ("tests/kernels/conftest.py", set())])
def test_a_tests_text_is_its_file_with_what_it_imports_and_names(edited, again, tmp_path):
    files = {"unit/test_a.py": "def test_a():\n    from shared_cases import x\n", "unit/test_b.py": "import torch\n",
             "unit/shared_cases.py": "SOURCE = 'tests/kernels/table.h'\n", "kernels/table.h": "int x;\n",
             "unit/other.py": "", "unit/conftest.py": "", "conftest.py": "", "kernels/conftest.py": ""}
    for name, text in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    nodes = {name: f"tests/unit/test_{name}.py::test_{name}" for name in "ab"}
    before = counter_tests.texts([*nodes.values(), "tests/unit/test_gone.py::test_gone"], tmp_path)
    assert set(before) == set(nodes.values())
    with (tmp_path / edited).open("a") as file:
        file.write("# edited\n")
    after = counter_tests.texts(list(nodes.values()), tmp_path)
    assert {name for name, node in nodes.items() if before[node] != after[node]} == again


def test_arms_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    devices = counter.Devices(3)
    with devices.one() as a, devices.one() as b, devices.one() as c:
        assert [d["CUDA_VISIBLE_DEVICES"] for d in (a, b, c)] == ["2", "5", "2"] and devices.free.empty()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with counter.Devices(1).one() as device:
        assert device == {}


def test_an_unknown_patch_is_refused(run):
    with pytest.raises(ValueError, match="no such patch: neded; there are: needed"):
        run(["neded"])


def test_only_a_refusal_of_batch_invariance_shows_anything():
    assert counter.verdict([], "start: ValueError: VLLM batch_invariant mode is not supported for X")[0] == "shown"
    assert counter.verdict([], "start: OutOfMemoryError: CUDA out of memory")[0] == "failed"


def test_no_folder_of_the_machine_reaches_a_record():
    error = EngineError("died", "the end of /tmp/k/x.log: see https://a.b/c; 3/4 in /x/vllm/m.py\n(log: /y)")
    assert counter.portable(error) == "the end of x.log: see https://a.b/c; 3/4 in m.py"


def test_the_series_names_a_counter_test_for_every_patch():
    found = counter.read_patches()
    assert found and all(found.values())
    root = pathlib.Path(counter.ROOT)
    assert all((root / test.partition("::")[0]).is_file() for tests in found.values() for test in tests)
    every = [test for tests in found.values() for test in tests]
    assert set(counter_tests.texts(every)) == set(every)


def test_a_counter_test_must_have_passed_in_every_variant(tmp_path):
    test = tmp_path / "test_x.py"
    test.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no GPU')\n"
                    "@pytest.mark.parametrize('n', [0, 1])\ndef test_c(n): assert n\ndef test_d(): 1 / 0\n")
    nodes = {name: f"{test}::test_{name}" for name in "abcde"}
    said = counter_tests.run(list(nodes.values()), {}, tmp_path / "logs")
    assert set(said.values()) == {"missing"}  # pytest runs nothing where a node is not to be found
    said = counter_tests.run([nodes[name] for name in "abcd"], {}, tmp_path / "logs")
    assert said == {nodes["a"]: "passed", nodes["b"]: "skipped", nodes["c"]: "failed", nodes["d"]: "failed"}
    assert counter_tests.verdict([nodes["a"]], said) == (True, "1 passed")
    assert counter_tests.verdict([nodes["a"], nodes["b"]], said) == (False, "test_b skipped")
    assert not counter_tests.verdict([], said)[0]


def assert_said_of_test_a(said, source, folder):
    test = folder / "test_x.py"
    test.write_text("import pytest\n" + source)
    node = f"{test}::test_a"
    assert counter_tests.run([node], {}, folder / "logs") == {node: said}


def test_a_counter_test_that_skipped_one_variant_has_not_passed(tmp_path):
    assert_said_of_test_a("skipped", "@pytest.mark.parametrize('n', [0, 1])\n"
                                     "def test_a(n): n or pytest.skip('no GPU')\n", tmp_path)


def test_only_the_default_release_counts(tmp_path):
    assert_said_of_test_a("passed", "@pytest.mark.parametrize('v', ['0.33.0', '0.32.0'])\n"
                                    "def test_a(v): assert v == '0.33.0'\n", tmp_path)


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
