"""Each verdict of a rebase on a synthetic upstream, with the evidence that must come with it."""
from __future__ import annotations

import pytest
from releases import ENGINE, FORWARD, LAST, ROUTE, SOURCE, Upstream, apply_alone, edit, files, only

from patchset.shadow import File


@pytest.fixture
def upstream(tmp_path) -> Upstream:
    return Upstream(tmp_path)


def test_untouched_surroundings_are_clean_and_need_no_new_patch(upstream):
    upstream.hook("gate", FORWARD)
    upstream.edit_release(("    d = c\n", "    d = c + 0\n"))
    result = only(upstream.rebase())
    assert (result.verdict, result.needs_person, upstream.result.code) == ("clean", False, 0)
    assert result.files[0].hunks[0].status == "in place"
    assert "agree" in result.files[0].evidence[0]
    assert upstream.proposal("gate") is None


def test_shifted_lines_are_offset_with_the_exact_number(upstream):
    upstream.hook("gate", FORWARD, LAST)
    upstream.edit_release(("import os\n", "import os\nimport re\nimport sys\n"), ("def last(x):\n", "\ndef last(x):\n"))
    result = only(upstream.rebase())
    assert result.verdict == "offset"
    assert [(o.hunk, o.lines) for o in result.files[0].offsets] == [(1, 2), (2, 3)]
    assert [(h.status, h.line - h.old[0]) for h in result.files[0].hunks] == [("offset +2", 2), ("offset +3", 3)]
    after = apply_alone(upstream.release, upstream.proposal("gate"))
    assert after == edit(edit(upstream.release, ENGINE, *FORWARD), ENGINE, *LAST)


def test_changed_context_is_merged_and_shows_what_the_release_changed_there(upstream):
    upstream.hook("route", ROUTE)
    upstream.edit_release(("    first = x\n", "    first = x + 0\n"))
    result = only(upstream.rebase())
    assert (result.verdict, upstream.result.code) == ("merged", 0)
    hunk = result.files[0].hunks[0]
    assert (hunk.status, hunk.upstream) == ("context changed", "@@ -12,1 +12,1 @@\n-    first = x\n+    first = x + 0")
    assert apply_alone(upstream.release, upstream.proposal("route")) == edit(upstream.release, ENGINE, *ROUTE)


def test_absorbed_by_the_very_same_change_has_its_patch_id(upstream):
    upstream.hook("gate", FORWARD)
    upstream.edit_release(FORWARD)
    result = only(upstream.rebase())
    assert (result.verdict, upstream.result.code) == ("absorbed", 3)
    evidence = "; ".join(result.files[0].evidence)
    assert "patch-id" in evidence and "3-way merge changes nothing" in evidence and "1 of 1 hunks" in evidence
    assert result.files[0].hunks[0].evidence == ["the release makes the same change at the same place"]
    assert upstream.proposal("gate") is None


def test_absorbed_among_other_changes_is_known_by_the_empty_merge(upstream):
    upstream.hook("gate", FORWARD)
    upstream.edit_release(FORWARD, LAST)
    result = only(upstream.rebase())
    assert result.verdict == "absorbed"
    assert [word for word in result.files[0].evidence if "patch-id" in word] == []
    assert "3-way merge changes nothing" in result.files[0].evidence[0]


def test_absorbed_next_to_a_further_change_is_known_hunk_by_hunk(upstream):
    """The release made the change and moved the whole function: a merge conflicts, the reverse check does not."""
    upstream.hook("gate", LAST, anchor=f"{ENGINE}::LIMIT")
    body = SOURCE[SOURCE.index("def last"):]
    upstream.edit_release(("\n\n" + body, ""), ("def scale(x):\n", body.replace(*LAST) + "\n\ndef scale(x):\n"))
    result = only(upstream.rebase())
    assert result.verdict == "absorbed", result.files
    [hunk] = result.files[0].hunks
    assert hunk.evidence == ["the hunk's result stands there, its former lines do not (reverse check)"]
    assert "every hunk's result stands in the release" in result.files[0].evidence[0]


def test_partly_absorbed_names_the_hunk_and_proposes_the_rest(upstream):
    upstream.hook("two", FORWARD, LAST)
    upstream.edit_release(FORWARD)
    result = only(upstream.rebase())
    assert (result.verdict, upstream.result.code) == ("partly absorbed", 3)
    assert [hunk.status for hunk in result.files[0].hunks] == ["already upstream", "in place"]
    assert "leaves out 2 of 4 changed lines" in result.files[0].evidence[0]
    text = upstream.proposal("two")
    assert apply_alone(upstream.release, text) == edit(upstream.release, ENGINE, *LAST)


def test_partly_absorbed_by_file(upstream):
    after = edit(edit(upstream.state, ENGINE, *FORWARD), "toy/other.py", "OTHER = 1\n", "OTHER = 2\n")
    upstream.add("two", after, trailers="Arch: any\n")
    upstream.edit_release(("OTHER = 1\n", "OTHER = 2\n"), path="toy/other.py")
    result = only(upstream.rebase())
    assert result.verdict == "partly absorbed"
    assert {file.path: file.verdict for file in result.files} == {ENGINE: "clean", "toy/other.py": "absorbed"}
    assert "toy/other.py" not in upstream.proposal("two")


def test_partly_absorbed_is_found_behind_a_merge_conflict(upstream):
    """The release has hunk 1, written where the merge sees a conflict; without it hunk 2 merges."""
    upstream.hook("two", ("    a = x\n", "    a = hooked(x)\n"), FORWARD, anchor=f"{ENGINE}::LIMIT")
    body = SOURCE[SOURCE.index("def last"):]
    upstream.edit_release(("\n\n" + body, ""),
                          ("def scale(x):\n", body.replace("a = x", "a = hooked(x)") + "\n\ndef scale(x):\n"),
                          ("        before = x\n", "        before = x + 0\n"),
                          ("        return after\n", "        return after + 0\n"))
    upstream.edit_release(("        before = x + 0\n", "        before = x\n"))
    result = only(upstream.rebase())
    assert result.verdict == "partly absorbed", result.files
    assert "hunks 2 are already upstream" in result.files[0].evidence[0]
    assert apply_alone(upstream.release, upstream.proposal("two")) == edit(upstream.release, ENGINE, *FORWARD)


def test_conflict_leaves_both_sides_as_files_with_diff3_markers(upstream):
    upstream.hook("gate", FORWARD)
    upstream.edit_release(("        y = scale(x)\n", "        y = scale(x) + 1\n"))
    result = only(upstream.rebase())
    assert (result.verdict, upstream.result.code) == ("conflict", 3)
    folder = upstream.out / "conflicts" / "gate"
    assert (folder / "base" / ENGINE).read_text() == SOURCE
    assert (folder / "patched" / ENGINE).read_text() == SOURCE.replace(*FORWARD)
    assert (folder / "upstream" / ENGINE).read_bytes() == upstream.release[ENGINE].data
    merged = (folder / "merged" / ENGINE).read_text()
    assert ("<<<<<<< upstream-1.0.0\n        y = scale(x) + 1\n||||||| base 2.0.0\n        y = scale(x)\n=======\n"
            "        y = scale(x) if not os.environ else hooked(x)\n>>>>>>> patch-gate\n") in merged
    assert "+        y = scale(x) + 1" in result.files[0].hunks[0].upstream
    assert upstream.proposal("gate") is None


def test_conflict_where_the_replaced_lines_are_gone_may_be_superseded(upstream):
    upstream.hook("gate", FORWARD)
    upstream.edit_release(("        y = scale(x)\n", "        y = x << 1\n"))
    hunk = only(upstream.rebase()).files[0].hunks[0]
    assert hunk.status == "rewritten upstream"
    assert "may be superseded" in hunk.evidence[0]


def test_reindented_lines_are_a_conflict_that_says_where_they_stand(upstream):
    upstream.hook("route", ROUTE, anchor=f"{ENGINE}::LIMIT")
    start, end = SOURCE.index("    first = x"), SOURCE.index("class Gate")
    block = SOURCE[start:end].rstrip("\n")
    upstream.edit_release((block, "    if x:\n" + "\n".join("    " + line for line in block.split("\n"))))
    result = only(upstream.rebase())
    hunk = result.files[0].hunks[0]
    assert result.verdict == "conflict"
    assert hunk.evidence == [f"the hunk's lines stand at line {hunk.line}, reindented by +4"]
    lines = upstream.release[ENGINE].data.decode().split("\n")
    assert "        third = second" in lines[hunk.line - 1 : hunk.line + 3]


def test_renamed_file_is_moved_with_its_anchors_and_needs_a_person(upstream):
    upstream.hook("gate", FORWARD)
    upstream.hook("route", ROUTE, anchor=f"{ENGINE}::route")
    data = upstream.release.pop(ENGINE).data.decode().replace("LIMIT = 8", "LIMIT = 9")
    upstream.release["toy/core/engine.py"] = File(data.encode())
    done = upstream.rebase()
    assert [result.verdict for result in done.patches] == ["moved", "moved"]
    name, alike = done.renamed[ENGINE]
    assert (name, alike > 90, upstream.result.code) == ("toy/core/engine.py", True, 3)
    text = upstream.proposal("gate")
    assert "Anchors: toy/core/engine.py::Gate.forward" in text and "a/toy/engine.py" not in text
    both = apply_alone(apply_alone(upstream.release, text), upstream.proposal("route"))
    assert both["toy/core/engine.py"].data.decode() == data.replace(*FORWARD).replace(*ROUTE)


def test_files_that_say_little_are_not_taken_for_renamed_ones(upstream):
    licence = "# SPDX-License-Identifier: Apache-2.0\n# by the authors\n"
    upstream.base["2.0.0"] = upstream.state = upstream.state | files({"toy/sub/__init__.py": licence + "A = 1\n"})
    upstream.hook("init", ("A = 1\n", "A = 2\n"), path="toy/sub/__init__.py", anchor=f"{ENGINE}::LIMIT")
    upstream.release |= files({"toy/elsewhere/__init__.py": licence + "A = 1\n"})
    done = upstream.rebase()
    assert (only(done).verdict, done.renamed) == ("deleted", {})


def test_function_that_went_to_another_file_takes_its_hunk_along(upstream):
    upstream.hook("last", LAST, anchor=f"{ENGINE}::last")
    body = SOURCE[SOURCE.index("def last"):]
    upstream.edit_release(("\n\n" + body, "\n\nfrom toy.tail import last\n"))
    upstream.release["toy/tail.py"] = File(b'"""Tail."""\n\n\n' + body.encode())
    result = only(upstream.rebase())
    assert result.verdict == "moved", result.files
    assert (result.files[0].target, result.findings[0].where) == ("toy/tail.py", ("toy/tail.py::last (same body)",))
    assert "went to toy/tail.py with the same body" in result.files[0].evidence[0]
    text = upstream.proposal("last")
    assert "Anchors: toy/tail.py::last" in text
    assert apply_alone(upstream.release, text) == edit(upstream.release, "toy/tail.py", *LAST)


def test_file_that_is_gone_is_deleted(upstream):
    upstream.hook("gate", FORWARD)
    upstream.release.pop(ENGINE)
    result = only(upstream.rebase())
    assert (result.verdict, upstream.result.code) == ("deleted", 3)
    assert result.files[0].evidence == ["the release has neither this file nor a new one like it"]
    assert (upstream.out / "conflicts" / "gate" / "patched" / ENGINE).exists()


def test_anchor_that_is_gone_is_flagged_though_every_hunk_applies(upstream):
    upstream.hook("route", ROUTE, anchor=f"{ENGINE}::scale")
    upstream.edit_release(("def scale(x):", "def twice(x):"), ("y = scale(x)", "y = twice(x)"))
    result = only(upstream.rebase())
    assert (result.verdict, result.text, upstream.result.code) == ("anchor gone", "clean", 3)
    assert result.findings[0].where == (f"{ENGINE}::twice (renamed, same body)",)


@pytest.mark.parametrize("change, symbol", [
    (("        return after\n\n", "        return after + 1\n\n"), "Gate.forward"),
    (("    return x * 2\n", "    return x * 3\n"), "scale"),
])
def test_contract_of_the_anchor_or_of_what_it_calls_has_changed(upstream, change, symbol):
    upstream.hook("route", ROUTE)
    upstream.edit_release(change)
    result = only(upstream.rebase())
    assert (result.verdict, result.text, upstream.result.code) == ("contract changed", "clean", 3)
    [finding] = result.findings
    assert finding.symbol == f"{ENGINE}::{symbol}"
    assert change[1].strip() in finding.diff


def test_what_depends_on_a_failed_patch_is_blocked_by_it_and_the_rest_is_still_judged(upstream):
    upstream.hook("gate", FORWARD)
    upstream.hook("needs-gate", LAST, depends_on="gate")
    upstream.hook("needs-both", ("    d = c\n", "    d = hooked(c)\n"), depends_on="needs-gate")
    upstream.hook("alone", ROUTE)
    upstream.edit_release(("        y = scale(x)\n", "        y = x << 1\n"))
    upstream.release = edit(upstream.release, ENGINE, "import os\n", "import os\n")
    gate, needs, both, alone = upstream.rebase().patches
    assert (gate.verdict, needs.verdict, both.verdict) == ("conflict", "blocked", "blocked")
    assert (needs.blocked_by, needs.text, both.blocked_by) == (["gate"], "clean", ["needs-gate"])
    assert (alone.text, alone.blocked_by) == ("clean", [])


def test_hunk_that_stands_on_a_failed_patchs_lines_is_blocked_without_a_trailer(upstream):
    upstream.hook("gate", FORWARD)
    upstream.hook("on-top", ("else hooked(x)", "else hooked(x, 2)"))
    upstream.edit_release(("        y = scale(x)\n", "        y = x << 1\n"))
    _, on_top = upstream.rebase().patches
    assert (on_top.verdict, on_top.blocked_by, on_top.text) == ("blocked", ["gate"], "conflict")


def test_file_of_a_failed_patch_blocks_who_edits_it(upstream):
    after = edit(upstream.state, ENGINE, *FORWARD) | files({"toy/hook.py": "def hooked(x):\n    return x\n"})
    upstream.add("gate", after, trailers="Arch: any\n")
    upstream.hook("on-file", ("    return x\n", "    return -x\n"), path="toy/hook.py", anchor=f"{ENGINE}::LIMIT")
    upstream.edit_release(("        y = scale(x)\n", "        y = x << 1\n"))
    _, on_file = upstream.rebase().patches
    assert (on_file.verdict, on_file.blocked_by, on_file.text) == ("blocked", ["gate"], "deleted")


def test_absorbed_patch_blocks_nothing(upstream):
    upstream.hook("gate", FORWARD)
    upstream.hook("on-top", ("else hooked(x)", "else hooked(x, 2)"), depends_on="gate", anchor=f"{ENGINE}::LIMIT")
    upstream.edit_release(FORWARD)
    gate, on_top = upstream.rebase().patches
    assert (gate.verdict, on_top.verdict) == ("absorbed", "clean")


TWINS = "".join(f"def twin_{name}(x):\n    minus = x\n    zero = minus\n    one = zero\n    two = one\n"
                "    three = two\n    four = three\n    return four\n\n\n" for name in "ab")


def test_offset_into_a_twin_of_the_patched_function_is_refused(upstream):
    """git apply finds the same lines in another function and would take them."""
    upstream.state = edit(upstream.state, ENGINE, "class Gate", TWINS + "class Gate")
    upstream.base["2.0.0"] = upstream.release = upstream.state
    first = TWINS[: TWINS.index("def twin_b")]
    upstream.hook("twin", (first, first.replace("two = one\n", "two = hooked(one)\n")), anchor=f"{ENGINE}::LIMIT")
    upstream.edit_release((first, first.replace("three = two", "three = two + 1")))
    result = only(upstream.rebase())
    assert result.verdict == "conflict", result.files
    assert "git apply would land somewhere" in result.files[0].evidence[0]
    assert "from twin_a to twin_b" in result.files[0].evidence[1]


def test_function_that_moved_within_its_file_takes_its_hunk_along(upstream):
    upstream.hook("route", ROUTE, anchor=f"{ENGINE}::route")
    start, end = SOURCE.index("def route"), SOURCE.index("class Gate")
    block = SOURCE[start:end]
    upstream.edit_release((block, ""))
    upstream.release = files({path: file.data for path, file in upstream.release.items()})
    upstream.release[ENGINE] = File(upstream.release[ENGINE].data + b"\n\n" + block.rstrip("\n").encode() + b"\n")
    result = only(upstream.rebase())
    assert result.verdict == "offset", result.files
    assert result.files[0].after.data == upstream.release[ENGINE].data.replace(ROUTE[0].encode(), ROUTE[1].encode())


HOOK = "def hooked(x):\n    return x\n"


@pytest.mark.parametrize("theirs, verdict", [(HOOK, "absorbed"), ("hooked = None\n", "conflict"), (None, "clean")])
def test_created_file_is_compared_with_the_releases_own(upstream, theirs, verdict):
    upstream.add("new", upstream.state | files({"toy/hook.py": HOOK}), trailers="Arch: any\n")
    if theirs:
        upstream.release |= files({"toy/hook.py": theirs})
    assert only(upstream.rebase()).verdict == verdict


@pytest.mark.parametrize("theirs, verdict", [("OTHER = 1\n" * 30, "clean"), ("OTHER = 3\n" * 30, "conflict"),
                                             (None, "absorbed")])
def test_removed_file_must_be_the_one_that_was_there(upstream, theirs, verdict):
    upstream.add("drop", {p: f for p, f in upstream.state.items() if p != "toy/other.py"}, trailers="Arch: any\n")
    upstream.release.pop("toy/other.py")
    if theirs:
        upstream.release |= files({"toy/other.py": theirs})
    result = only(upstream.rebase())
    assert result.verdict == verdict
    if verdict == "clean":
        assert result.after == {}


def test_mode_is_carried_over_with_and_without_changed_lines(upstream):
    other = upstream.state["toy/other.py"]
    upstream.add("mode", upstream.state | {"toy/other.py": File(other.data, "100755")}, trailers="Arch: any\n")
    result = only(upstream.rebase())
    assert (result.verdict, result.after["toy/other.py"].mode) == ("clean", "100755")
    upstream.release["toy/other.py"] = File(other.data, "100755")
    assert only(upstream.rebase()).verdict == "absorbed"


def test_crlf_and_a_missing_last_newline_survive(upstream):
    data = b"".join(b"line %d\r\n" % n for n in range(30)) + b"no newline"
    upstream.base["2.0.0"] = upstream.state = upstream.state | {"toy/dos.txt": File(data)}
    upstream.release = dict(upstream.state)
    after = upstream.state | {"toy/dos.txt": File(data.replace(b"line 20\r", b"twenty\r"))}
    upstream.add("dos", after, trailers="Arch: any\n")
    upstream.release["toy/dos.txt"] = File(b"line -1\r\n" + data.replace(b"line 18\r", b"eighteen\r"))
    result = only(upstream.rebase())
    assert result.verdict == "merged"
    assert result.after["toy/dos.txt"].data == upstream.release["toy/dos.txt"].data.replace(b"line 20\r", b"twenty\r")
