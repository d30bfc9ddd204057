"""What a rebase writes, what it leaves alone, and how a person's decisions come back into it."""
from __future__ import annotations

import json

import pytest
from releases import ENGINE, FORWARD, LAST, ROUTE, VERSION, Upstream, apply_alone, edit

from patchset import rebase
from patchset.errors import ConflictError, NeedsWork, UsageError

CLASH = ("        y = scale(x)\n", "        y = scale(x) + 1\n")
SETTLED = ("        y = scale(x) + 1\n", "        y = scale(x) + 1 if not os.environ else hooked(x)\n")


@pytest.fixture
def upstream(tmp_path) -> Upstream:
    return Upstream(tmp_path)


@pytest.fixture
def clash(upstream) -> Upstream:
    """A patch in conflict, and one that stands on its lines."""
    upstream.hook("gate", FORWARD)
    upstream.hook("on-top", ("hooked(x)\n", "hooked(x, 2)\n"), depends_on="gate")
    upstream.edit_release(CLASH)
    upstream.rebase()
    return upstream


def settle(upstream: Upstream, slug: str, text: bytes) -> None:
    folder = upstream.out / "conflicts" / slug
    (folder / "merged" / ENGINE).write_bytes(text)
    (folder / "settled").touch()


def verdicts(done) -> list[str]:
    return [result.verdict for result in done.patches]


def test_a_settled_conflict_becomes_a_proposal_and_frees_what_it_blocked(clash):
    settle(clash, "gate", edit(clash.release, ENGINE, *SETTLED)[ENGINE].data)
    done = clash.rebase()
    assert verdicts(done) == ["resolved", "conflict"]
    settled = apply_alone(clash.release, clash.proposal("gate"))
    assert settled == edit(clash.release, ENGINE, *SETTLED)
    settle(clash, "on-top", edit(settled, ENGINE, "hooked(x)\n", "hooked(x, 2)\n")[ENGINE].data)
    assert verdicts(clash.rebase()) == ["resolved", "resolved"]
    assert clash.result.code == 0
    assert "conflicts/gate" in "\n".join(clash.result.lines)


def test_a_marker_left_in_a_settled_file_is_refused_with_its_line(clash):
    merged = (clash.out / "conflicts" / "gate" / "merged" / ENGINE).read_bytes()
    settle(clash, "gate", merged)
    with pytest.raises(NeedsWork) as refused:
        clash.rebase()
    line = merged.decode().split("\n").index("<<<<<<< upstream-1.0.0") + 1
    [row] = refused.value.rows
    assert (row.path, row.found) == (f"gate/merged/{ENGINE}", f"a conflict marker at line {line}")


def test_unfinished_work_in_merged_survives_the_next_run(clash):
    place = clash.out / "conflicts" / "gate" / "merged" / ENGINE
    place.write_text("half done\n")
    assert verdicts(clash.rebase()) == ["conflict", "blocked"]
    assert place.read_text() == "half done\n"


def test_a_settlement_of_another_state_is_set_aside_not_used_and_not_lost(clash):
    settle(clash, "gate", b"settled\n")
    clash.edit_release(("LIMIT = 8", "LIMIT = 9"))
    done = clash.rebase()
    assert verdicts(done) == ["conflict", "blocked"]
    assert "set aside" in done.patches[0].notes[0]
    assert (clash.out / "conflicts" / "gate.old-1" / "merged" / ENGINE).read_bytes() == b"settled\n"
    assert b"<<<<<<<" in (clash.out / "conflicts" / "gate" / "merged" / ENGINE).read_bytes()
    assert not (clash.out / "conflicts" / "gate" / "settled").exists()


def test_a_settlement_may_edit_other_files_of_the_release_and_add_some(clash):
    settle(clash, "gate", clash.release[ENGINE].data)
    merged = clash.out / "conflicts" / "gate" / "merged" / "toy"
    (merged / "other.py").write_bytes(clash.release["toy/other.py"].data + b"MORE = 1\n")
    (merged / "fresh.py").write_bytes(b"FRESH = 1\n")
    clash.rebase()
    [other, fresh] = [part for part in clash.proposal("gate").split("diff --git ")[1:]]
    assert "new file mode 100644" in other and "+FRESH = 1" in other
    assert "new file" not in fresh and "+MORE = 1" in fresh and "-OTHER" not in fresh


def test_an_untouched_conflict_of_another_state_is_simply_replaced(clash):
    clash.edit_release(("LIMIT = 8", "LIMIT = 9"))
    clash.rebase()
    assert sorted(path.name for path in (clash.out / "conflicts").iterdir()) == ["gate", "on-top"]
    assert b"LIMIT = 9" in (clash.out / "conflicts" / "gate" / "merged" / ENGINE).read_bytes()


@pytest.mark.parametrize("anchor, change, verdict", [
    ("scale", ("def scale(x):", "def twice(x):"), "anchor gone"),
    ("LIMIT", ("import os\n", "import io\n"), "name gone"),
])
def test_a_patch_that_leans_on_what_is_gone_is_edited_and_settled_like_a_conflict(upstream, anchor, change, verdict):
    upstream.hook("gate", FORWARD, anchor=f"{ENGINE}::{anchor}")
    upstream.edit_release(change)
    assert verdicts(upstream.rebase()) == [verdict]
    place = upstream.out / "conflicts" / "gate" / "merged" / ENGINE
    assert b"<<<<<<<" not in place.read_bytes() and b"hooked(x)" in place.read_bytes()
    settle(upstream, "gate", place.read_bytes().replace(b"if not os.environ", b"if not LIMIT"))
    assert verdicts(upstream.rebase()) == ["resolved"]
    assert "if not LIMIT" in upstream.proposal("gate")


def test_a_patch_written_for_the_release_is_taken_in_place_of_the_base_one(clash):
    settle(clash, "gate", edit(clash.release, ENGINE, *SETTLED)[ENGINE].data)
    clash.rebase(install=True)
    written = clash.root / f"patches/toy/gate@{VERSION}.patch"
    assert written.read_text() == clash.proposal("gate")
    done = clash.rebase()
    assert (done.patches[0].verdict, done.patches[0].resolved) == ("resolved", written.name)
    assert (done.patches[0].text, done.patches[1].blocked_by) == ("conflict", [])
    assert clash.proposal("gate") is None


def test_a_written_patch_that_no_longer_applies_is_a_conflict_again(clash):
    settle(clash, "gate", edit(clash.release, ENGINE, *SETTLED)[ENGINE].data)
    clash.rebase(install=True)
    clash.edit_release(SETTLED)
    done = clash.rebase()
    assert verdicts(done) == ["conflict", "blocked"]
    assert f"gate@{VERSION}.patch does not apply to {ENGINE}" in done.patches[0].notes[0]


def test_a_written_patch_that_says_nothing_new_is_reported_as_not_needed(upstream):
    upstream.hook("gate", FORWARD)
    upstream.write(f"patches/toy/gate@{VERSION}.patch", upstream.read("patches/toy/gate.patch"))
    done = upstream.rebase()
    assert verdicts(done) == ["resolved"]
    assert done.patches[0].notes == [f"gate@{VERSION}.patch is not needed: gate.patch gives the same files"]


def test_a_changed_contract_that_was_read_is_let_through_with_its_reason_until_it_changes_again(upstream):
    upstream.hook("route", ROUTE)
    upstream.edit_release(("    return x * 2\n", "    return x * 3\n"))
    assert verdicts(upstream.rebase()) == ["contract changed"]
    [line] = [line for line in upstream.result.lines if "what to do" in line]
    trailer = line[line.index("Contract-Read:"):]
    for reason in ("", "0.9 the factor goes through the hook"):  # neither without a reason nor for another release
        upstream.change("patches/toy/route.patch", "\n---\n", f"\nContract-Read: {reason}\n---\n")
        assert verdicts(upstream.rebase()) == ["contract changed"]
    trailer = trailer.replace("<why>", "the factor is ours")
    upstream.change("patches/toy/route.patch", "\n---\n", f"\n{trailer}\n---\n")
    done = upstream.rebase()
    assert (verdicts(done), done.patches[0].contract_read, upstream.result.code) == (["clean"], "the factor is ours", 0)
    assert "contract changed: the factor is ours" in "\n".join(upstream.result.lines)
    upstream.edit_release(("    return x * 3\n", "    return x * 4\n"))
    assert verdicts(upstream.rebase()) == ["contract changed"]


def test_a_written_patch_whose_base_has_changed_since_is_stale(clash):
    settle(clash, "gate", edit(clash.release, ENGINE, *SETTLED)[ENGINE].data)
    clash.rebase(install=True)
    assert "Rebased-From: 2.0.0 " in clash.read(f"patches/toy/gate@{VERSION}.patch")
    for slug in ("gate", "on-top"):
        clash.change(f"patches/toy/{slug}.patch", "not os.environ", "os.environ")
    done = clash.rebase()
    assert verdicts(done) == ["conflict", "blocked"]
    assert f"gate.patch has changed since gate@{VERSION}.patch was made from it" in done.patches[0].notes[0]
    state = done.patches[0].notes[0].rpartition("Rebased-From: ")[2]
    place = clash.root / f"patches/toy/gate@{VERSION}.patch"
    lines = [f"Rebased-From: {state}" if line.startswith("Rebased-From") else line
             for line in place.read_text().split("\n")]
    place.write_text("\n".join(lines))
    assert verdicts(clash.rebase())[0] == "resolved"


def test_only_what_needs_no_person_is_installed_and_an_offset_needs_no_file(upstream):
    upstream.hook("offset", FORWARD, anchor=f"{ENGINE}::LIMIT")
    upstream.hook("merged", ROUTE, anchor=f"{ENGINE}::LIMIT")
    upstream.hook("changed", LAST, anchor=f"{ENGINE}::scale")
    upstream.edit_release(("import os\n", "import os\nimport re\n"), ("    first = x\n", "    first = x + 0\n"),
                          ("    return x * 2\n", "    return x * 3\n"))
    done = upstream.rebase(install=True)
    assert verdicts(done) == ["offset", "merged", "contract changed"]
    assert list(done.proposals) == ["offset", "merged", "changed"]
    assert list(done.installed) == ["merged"]
    assert [path.name for path in (upstream.root / "patches/toy").glob("*@*")] == [f"merged@{VERSION}.patch"]


def test_an_empty_series_and_a_broken_base_are_told_apart(upstream):
    assert upstream.rebase().patches == []
    assert upstream.result.code == 0
    upstream.hook("gate", FORWARD)
    upstream.change("patches/toy/gate.patch", "-        y = scale(x)", "-        y = unknown(x)")
    with pytest.raises(ConflictError, match="toy/gate does not apply"):
        upstream.rebase()


def test_proposals_of_an_earlier_run_do_not_stay(upstream):
    upstream.hook("gate", FORWARD)
    upstream.edit_release(("import os\n", "import os\nimport re\n"))
    upstream.rebase()
    assert upstream.proposal("gate")
    upstream.release = dict(upstream.base["2.0.0"])
    upstream.rebase()
    assert upstream.proposal("gate") is None


def test_json_table_and_markdown_tell_the_same(clash):
    data = json.loads((clash.out / "report.json").read_text())
    assert data == json.loads(json.dumps(clash.result.data))
    assert data["counts"] == {"conflict": 1, "blocked": 1}
    assert [(p["slug"], p["verdict"], p["blocked_by"], p["needs_person"]) for p in data["patches"]] == [
        ("gate", "conflict", [], True), ("on-top", "blocked", ["gate"], True)]
    assert data["patches"][0]["conflict"] == f"build/rebase/toy-{VERSION}/conflicts/gate"
    page = (clash.out / "report.md").read_text()
    lines = "\n".join(clash.result.lines)
    for slug, verdict in (("gate", "conflict"), ("on-top", "blocked")):
        assert f"## {slug}: {verdict}" in page and f"{slug}: {verdict}" in lines
    assert "+        y = scale(x) + 1" in page
    assert "settled beside it" in lines


def test_unpinned_release_is_reported_with_what_to_pin(upstream):
    upstream.hook("gate", FORWARD)
    done = upstream.rebase()
    done.sdist, done.pinned = "ab" * 32, False
    text = "\n".join(rebase.rebase_report.text(done, upstream.root))
    assert f'[upstream.toy.release."{VERSION}"] sdist = "{"ab" * 32}"' in text


def test_the_release_the_series_is_written_for_is_refused_as_a_goal(upstream):
    with pytest.raises(UsageError, match="is what the series is written for"):
        rebase.run(upstream.root, upstream.pins, "toy", "2.0.0")


def test_same_inputs_give_the_same_bytes(clash):
    def snapshot():
        return {path.relative_to(clash.out): path.read_bytes() for path in clash.out.rglob("*") if path.is_file()}

    before = snapshot()
    clash.rebase()
    assert snapshot() == before
    assert len(before) > 8
