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
