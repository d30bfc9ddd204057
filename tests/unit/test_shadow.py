"""The shadow applies with zero fuzz, says exactly where, and names what stands in the way."""
from pathlib import Path

import pytest
from checkout import BASE, diff, edit, files

from patchset.errors import ConflictError
from patchset.series import Patch
from patchset.shadow import File, Offset, Shadow

ODD = ["a b", "é日本", "new\nline", "bad\udcff", "'\"$x`*"]
LINES = BASE["toy/lines.txt"]


def patch(before, after) -> Patch:
    return Patch("toy", "x", Path("x.patch"), b"", text=diff(before, after))


def one_change(path="toy/lines.txt"):
    before = files({path: LINES})
    return before, edit(before, path, "line 20\n", "line twenty\n")


def test_the_result_is_the_bytes_and_modes_of_the_other_side():
    before = files({"a.py": b"x\r\ny", "gone": "z\n", "run": "#!\n"}) | {"run": File(b"#!\n", "100755")}
    after = {"a.py": File(b"x\r\nY"), "new/é b": File(b""), "run": File(b"#!/bin/sh\n", "100755")}
    with Shadow(before) as shadow:
        assert shadow.apply(patch(before, after)) == []
        assert shadow.files() == after and shadow.tree == shadow.tree_of(after)


@pytest.mark.parametrize("path", ["toy/lines.txt", "toy/é b.txt", 'toy/q"uote.txt', "toy/a...b cleanly.txt"])
@pytest.mark.parametrize("moved", [1, 7])
def test_offsets_are_exact_whatever_the_name(path, moved):
    before, after = one_change(path)
    base = {path: File(b"new\n" * moved + before[path].data)}
    with Shadow(base) as shadow:
        assert shadow.apply(patch(before, after)) == [Offset(path, 1, 17 + moved, moved)]


@pytest.mark.parametrize("spoilt", ["line 17\n", "line 19\n", "line 20\n", "line 23\n"])
def test_no_line_of_context_is_optional(spoilt):
    before, after = one_change()
    with Shadow(edit(before, "toy/lines.txt", spoilt, "other\n")) as shadow:
        tree = shadow.tree
        with pytest.raises(ConflictError, match="does not apply") as caught:
            shadow.apply(patch(before, after))
        assert [(row.path, row.found) for row in caught.value.rows] == [("toy/lines.txt", "other lines at 17")]
        assert shadow.tree == tree and shadow.files() == edit(before, "toy/lines.txt", spoilt, "other\n")


def test_whitespace_is_no_detail():
    before, after = one_change()
    for other in (b"line 19 \n", b"line  19\n", b"line 19\r\n"):
        with Shadow({"toy/lines.txt": File(before["toy/lines.txt"].data.replace(b"line 19\n", other))}) as shadow, \
                pytest.raises(ConflictError):
            shadow.apply(patch(before, after))


def test_a_change_that_is_already_there_is_absorbed_not_skipped():
    before, after = one_change()
    with Shadow(after) as shadow, pytest.raises(ConflictError, match="absorbed"):
        shadow.apply(patch(before, after))


def chain(*states) -> list[Patch]:
    return [Patch("toy", f"p{number}", Path(f"p{number}.patch"), b"", text=diff(before, after))
            for number, (before, after) in enumerate(zip(states, states[1:], strict=False))]


def one_by_one(shadow: Shadow, patches: list[Patch]) -> dict:
    return {patch.slug: shadow.apply(patch) for patch in patches}


BOTH_WAYS = [Shadow.apply_all, one_by_one]


def test_a_series_at_once_is_the_series_one_by_one():
    """Plain patches, some on one file and back again, a creation, a deletion, and one that keeps the line count."""
    a = files({"toy/lines.txt": LINES, "toy/other": "1\n2\n3\n"})
    b = edit(a, "toy/lines.txt", "line 20\n", "line 20\nmore\n")
    c = edit(edit(b, "toy/lines.txt", "more\n", "more\nstill\n"), "toy/other", "2\n", "")
    d = edit(c, "toy/lines.txt", "line 10\n", "line ten\n")
    e = d | files({"toy/new": "x\n"})
    f = {path: file for path, file in edit(e, "toy/new", "x\n", "x\ny\n").items() if path != "toy/other"}
    g = edit(f, "toy/lines.txt", "still\n", "")
    moved = {"toy/lines.txt": File(b"new\n" * 5 + a["toy/lines.txt"].data)}
    found = []
    for way in BOTH_WAYS:
        with Shadow(a | moved) as shadow:
            found.append((way(shadow, chain(a, b, c, d, e, f, g)), shadow.files(), shadow.tree))
    assert found[0] == found[1]
    offsets, after, _ = found[0]
    assert [offsets[f"p{n}"] for n in (0, 3)] == [[Offset("toy/lines.txt", 1, 23, 5)], []]
    assert after["toy/lines.txt"].data == b"new\n" * 5 + g["toy/lines.txt"].data and "toy/other" not in after


@pytest.mark.parametrize("kind", ["absorbed", "does not apply"])
def test_the_refused_patch_of_a_run_is_named_and_those_before_it_do_not_hide_it(kind):
    a = files({"toy/lines.txt": LINES})
    b = edit(a, "toy/lines.txt", "line 5\n", "line 5\nfirst\n")
    c = edit(b, "toy/lines.txt", "line 20\n", "line 20\nsecond\n")
    d = edit(c, "toy/lines.txt", "line 40\n", "")
    base = edit(a, "toy/lines.txt", "line 20\n", "line 20\nsecond\n" if kind == "absorbed" else "other\n")
    said = []
    for way in BOTH_WAYS:
        with Shadow(base) as shadow, pytest.raises(ConflictError) as caught:
            way(shadow, chain(a, b, c, d))
        said.append(caught.value.as_json())
    assert said[0] == said[1] and f"toy/p1 {'is ' * (kind == 'absorbed')}{kind}" in said[0]["message"]


def test_two_hunks_that_cancel_out_change_nothing_and_are_refused():
    before = files({"a": "x\n" * 40})
    text = (b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1,4 +1,3 @@\n-x\n x\n x\n x\n"
            b"@@ -30,3 +29,4 @@\n x\n x\n x\n+x\n")
    for way in BOTH_WAYS:
        with Shadow(before) as shadow, pytest.raises(ConflictError, match="absorbed"):
            way(shadow, [Patch("toy", "x", Path("x.patch"), b"", text=text)])


def test_a_missing_and_an_unwanted_file_are_named():
    before, after = one_change()
    with Shadow(files({"other": "x\n"})) as shadow, pytest.raises(ConflictError) as caught:
        shadow.apply(patch(before, after))
    assert [(row.path, row.found) for row in caught.value.rows] == [("toy/lines.txt", "does not exist in index")]
    with Shadow(files({"new": "y\n"})) as shadow, pytest.raises(ConflictError) as caught:
        shadow.apply(patch({}, files({"new": "x\n"})))
    assert [(row.path, row.found) for row in caught.value.rows] == [("new", "already exists in index")]


@pytest.mark.parametrize("path", ["../x", "/x", "toy/../../x", ".git/config"])
def test_git_itself_refuses_a_path_that_leaves(path):
    before, after = one_change()
    text = diff(before, after).replace(b"toy/lines.txt", path.encode())
    with Shadow(files({"x": LINES})) as shadow, pytest.raises(ConflictError):
        shadow.apply(Patch("toy", "x", Path("x.patch"), b"", text=text))


def test_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Shadow(files({"x": "1\n"})):
        assert list(tmp_path.iterdir())
    with pytest.raises(UnicodeEncodeError), Shadow({"\ud800": File(b"")}):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_the_folder_of_temporary_files_may_be_called_anything(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    before, after = one_change()
    with Shadow(before) as shadow:
        shadow.apply(patch(before, after))
        assert shadow.files() == after
    assert list((tmp_path / name).iterdir()) == []
