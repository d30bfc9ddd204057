"""The report holds every patch in order with its size, tests and what the two-arm proof said of it."""
import json

import pytest
from checkout import NEW, OLD, TRAILERS, Checkout, hooked

from patchset import evidence, report
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
    assert "failed (another lock); shown" in text and "evidence: shown in evidence/counter-a.json" in text
    (made.root / "patchset.lock").unlink()
    rows = report.run(made.root, made.pins, None).data["upstreams"]["toy"]["patches"]
    assert [verdict["current"] for verdict in rows[0]["evidence"]] == [False, False]


def test_another_release_has_its_own_report(made):
    assert report.run(made.root, made.pins, OLD).data["upstreams"]["toy"]["version"] == OLD


@pytest.mark.parametrize("text", ["[]", '"x"', "1"])
def test_what_is_no_record_bears_out_nothing(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert evidence.why_not(tmp_path / "x.json", set()) == "no record"
