"""The report holds every patch in order with its size, tests and what the two-arm proof said of it."""
import json
from pathlib import Path

import pytest
from checkout import NEW, OLD, TRAILERS, Checkout, hooked

from patchset import evidence, pins, report
from patchset.lock import Lock


@pytest.fixture
def made(tmp_path) -> Checkout:
    return hooked(tmp_path)


def record(made, name, state, digest):
    lock = {"state": "locked", "digest": digest}
    rows = [{"patch": "gate-fp32", "state": state}, {"case": "base"}]
    made.write(f"evidence/{name}.json", json.dumps({"passed": True, "engines": {"a": {"lock": lock}}, "rows": rows}))


def test_every_patch_has_its_row_in_order(made):
    data = report.run(made.root, made.pins, None).data["upstreams"]["toy"]
    assert data["version"] == NEW and [row["slug"] for row in data["patches"]] == ["gate-fp32", "line-thirty"]
    row = data["patches"][0]
    assert (row["order"], row["files"], row["arch"]) == (1, ["toy/router.py"], ["any"])
    assert (row["added"], row["removed"]) == (3, 1)
    assert row["counter_tests"] == ["tests/test_toy.py::test_stock_differs"] and row["evidence"] == []
    assert row["drop_when"] == "upstream multiplies in fp32 itself" and row["status"] == "Pending"


def test_text_and_json_say_the_same(made):
    trailers = TRAILERS.replace("Status: Pending", "Status: Backport [1234567]").replace("Arch: any", "Arch: sm90")
    made.patch("third", "toy/lines.txt", "line 5\n", "line five\n", trailers=trailers)
    lines = report.run(made.root, made.pins, None).lines
    assert lines[0] == f"toy {NEW}: 3 patches, 2 files, +5 -3"
    cells = lines[4].split()
    assert cells[:9] == ["3", "third", "1", "1", "1", "sm90", "Backport", "1+1", "none"]
    text = "\n".join(lines)
    assert "drop when: upstream multiplies" in text and "counter-test: tests/test_toy.py::test_stock_differs" in text


def test_evidence_of_another_lock_is_marked_as_such(made):
    record(made, "counter-a", "shown", next(iter(Lock.load(made.root).targets.values())).digest)
    record(made, "counter-b", "failed", "0" * 64)
    made.write("evidence/broken.json", "{")
    made.write("evidence/list.json", "[]")
    row = report.run(made.root, made.pins, None).data["upstreams"]["toy"]["patches"][0]
    assert row["evidence"] == [{"record": "evidence/counter-a.json", "state": "shown", "current": True},
                               {"record": "evidence/counter-b.json", "state": "failed", "current": False}]
    text = "\n".join(report.run(made.root, made.pins, None).lines)
    assert "failed (another lock); shown" in text and "counter-proof: shown in evidence/counter-a.json" in text
    (made.root / "patchset.lock").unlink()
    rows = report.run(made.root, made.pins, None).data["upstreams"]["toy"]["patches"]
    assert [verdict["current"] for verdict in rows[0]["evidence"]] == [False, False]


def test_every_record_is_listed_with_what_it_is_worth(made):
    """Also those of the whole series, which no patch's row can show."""
    digest = next(iter(Lock.load(made.root).targets.values())).digest
    lock = {"engines": {"a": {"lock": {"state": "locked", "digest": digest}}}, "rows": [{"case": "base"}]}
    made.write("evidence/rollout-x.json", json.dumps({"verb": "rollout", "subject": "x", "passed": True, **lock}))
    made.write("evidence/bench-x.json", json.dumps({"verb": "bench", "subject": "x", "passed": False, **lock}))
    made.write("evidence/contrast-x.json", json.dumps({"verb": "contrast", "subject": "x", "passed": False, **lock}))
    made.write("evidence/odd.json", json.dumps({"rows": 7, "lock": "0" * 64, "passed": True}))
    made.write("evidence/broken.json", "{")
    made.write("evidence/README.md", "no record\n")
    result = report.run(made.root, made.pins, None)
    said = {record["record"]: record["why_not"] for record in result.data["records"]}
    assert said.pop("evidence/broken.json").startswith("no JSON")
    assert said == {"evidence/rollout-x.json": "", "evidence/bench-x.json": "the run did not pass",
                    "evidence/contrast-x.json": "a contrast: it shows what differs, and claims nothing",
                    "evidence/odd.json": "made with another lock (000000000000)"}
    text = "\n".join(result.lines)
    assert "evidence: 5 records, 1 with today's lock and passed" in text
    assert [line.split() for line in result.lines if "rollout-x" in line] == [
        ["evidence/rollout-x.json", "rollout", "x", "yes"]]
    assert [line.split(maxsplit=3)[3] for line in result.lines if "bench-x" in line] == ["no: the run did not pass"]


def test_the_report_of_this_checkout_shows_every_record_there_is():
    root = Path(__file__).resolve().parents[2]
    said = report.run(root, pins.load(root), None)
    names = {path.relative_to(root).as_posix() for path in (root / "evidence").rglob("*.json")}
    names = {name for name in names if "/kernels/" not in name}
    assert {record["record"] for record in said.data["records"]} == names
    assert all(any(name in line for line in said.lines) for name in names)


def test_another_release_has_its_own_report(made):
    assert report.run(made.root, made.pins, OLD).data["upstreams"]["toy"]["version"] == OLD


@pytest.mark.parametrize("text", ["[]", '"x"', "1"])
def test_what_is_no_record_bears_out_nothing(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert evidence.why_not(tmp_path / "x.json", set()) == "no record"
