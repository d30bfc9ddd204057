"""The reader of diffs understands whatever git writes, and refuses what git would skip over without a word."""
import re
from itertools import pairwise

import pytest
from checkout import diff as git_diff
from checkout import files
from hypothesis import given, settings
from hypothesis import strategies as st

from patchset import diff
from patchset.errors import ConflictError
from patchset.shadow import File

PATCH = b"""\
diff --git a/toy/x.py b/toy/x.py
index 0000000000000000000000000000000000000001..0000000000000000000000000000000000000002 100644
--- a/toy/x.py
+++ b/toy/x.py
@@ -1,3 +1,4 @@ def f():
 one
-two
+2
+2.5
 three
"""

LINE = st.one_of(st.sampled_from([b"", b"-- a", b"++ b", b"@@ -1 +1 @@", b"diff --git a/x b/x", b"\\ No newline",
                                  b"a\r", b"-- ", b"2.39.5", b"rename to x", b"GIT binary patch"]),
                 st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"").replace(b"\0", b"")))
CONTENT = st.builds(lambda lines, end: b"\n".join(lines) + (b"\n" if lines and end else b""),
                    st.lists(LINE, max_size=24), st.booleans())
ODD = ["a", "b c", "é", 'q"', "back\\slash", "x b", "a/b", "tab\tstop", "n\nl", "\udcff", " "]
PART = st.one_of(st.sampled_from(ODD), st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)),
                                               min_size=1, max_size=4))
NAME = PART.filter(lambda part: part not in (".", "..") and part.lower() != ".git" and not part.startswith("/"))


def put_back(file: diff.FileDiff, before: bytes) -> bytes:
    """Carry out the hunks at exactly the lines they name."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", before)
    out, at = [], 0
    for hunk in file.hunks:
        kept = [(line[:1], line[1:] + (b"" if following[:1] == b"\\" else b"\n"))
                for line, following in pairwise([*hunk.lines, b""]) if line[:1] != b"\\"]
        old = [text for kind, text in kept if kind in b" -"]
        new = [text for kind, text in kept if kind in b" +"]
        start = hunk.old_start - (hunk.old_count > 0)
        assert lines[start : start + hunk.old_count] == old
        assert (hunk.old_count, hunk.new_count) == (len(hunk.old_lines()), len(hunk.new_lines()))
        out += lines[at:start] + new
        at = start + hunk.old_count
    return b"".join(out + lines[at:])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAME, st.tuples(st.none() | CONTENT, st.none() | CONTENT), min_size=1, max_size=4))
def test_every_diff_of_git_reads_back_to_its_files(changes):
    before = {name: File(old) for name, (old, _) in changes.items() if old is not None}
    after = {name: File(new) for name, (_, new) in changes.items() if new is not None}
    paths = set(before) | set(after)
    if any(other.startswith(path + "/") for path in paths for other in paths):
        return  # a file and a folder of one name
    found = {file.path: file for file in diff.parse(git_diff(before, after), "x")}
    differ = {path for path in paths if before.get(path) != after.get(path)}
    assert set(found) == differ
    for path, file in found.items():
        old, new = before.get(path, File(b"")), after.get(path, File(b""))
        assert file.created == (path not in before) and file.deleted == (path not in after)
        assert put_back(file, old.data) == new.data


def test_crlf_and_missing_final_newline_keep_their_bytes():
    before, after = files({"x": b"a\r\nb\r\nc"}), files({"x": b"a\r\nB\r\nc\n"})
    (file,) = diff.parse(git_diff(before, after), "x")
    assert file.hunks[0].old_lines() == [b"a\r", b"b\r", b"c"]
    assert file.hunks[0].lines == (b" a\r", b"-b\r", b"-c", b"\\ No newline at end of file", b"+B\r", b"+c")


def test_positions_name_the_line_in_the_diff():
    (file,) = diff.parse(PATCH, "x")
    assert (file.line, file.hunks[0].line) == (1, 5)
    assert PATCH.split(b"\n")[file.hunks[0].line + 1] == file.hunks[0].lines[1]


def test_modes_and_blobs_are_read():
    (file,) = diff.parse(b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "x")
    assert (file.old_mode, file.new_mode) == ("100644", "100755")
    (file,) = diff.parse(PATCH, "x")
    assert (file.new_mode, file.old_blob[-1], file.new_blob[-1]) == ("100644", "1", "2")


@pytest.mark.parametrize("line", [
    b"diff --git toy/x.py toy/x.py", b"diff --git c/toy/x.py i/toy/x.py", b"diff --git a/toy/x.py b/toy/y.py",
    b"diff --git a/toy/x.py b/toy/x.py\r"])
def test_other_prefixes_renames_and_crlf_headers_are_refused(line):
    with pytest.raises(ConflictError):
        diff.parse(line + b"\nold mode 100644\nnew mode 100755\n", "x")


@pytest.mark.parametrize(("old", "new"), [
    (b"@@ -1,3 +1,4 @@", b"@@ -1,3 +1,3 @@"),
    (b"@@ -1,3 +1,4 @@", b"@@ -1,3 +1,5 @@"),
    (b"@@ -1,3 +1,4 @@", b"@@ -1,9 +1,4 @@"),
    (b"@@ -1,3 +1,4 @@", b"@@ 1,3 +1,4 @@"),
    (b" three\n", b""),  # cut off: the empty rest is no context line
    (b" three\n", b" three\n+a fourth\n"),  # git apply takes this and drops the last line
    (b" three\n", b" three\nrubbish\n"),
    (b"+2\n", b"2\n"),
    (b"@@ -1,3 +1,4 @@ def f():\n one\n-two\n+2\n+2.5\n three\n", b"@@ -1,2 +1,2 @@\n one\n three\n"),
    (b"--- a/toy/x.py", b"--- a/toy/y.py"),
    (b"index ", b"similarity index 90%\nindex "),
    (b"index ", b"rename from a\nindex "),
    (b"index ", b"Index "),
    (b"@@ -1,3 +1,4 @@ def f():\n one", b"\\ No newline\n@@ -1,3 +1,4 @@\n one"),
])
def test_whatever_is_not_wholly_understood_is_refused(old, new):
    assert old in PATCH
    with pytest.raises(ConflictError):
        diff.parse(PATCH.replace(old, new), "x")


def test_the_signature_of_format_patch_and_empty_lines_at_the_end_are_no_content():
    plain = diff.parse(PATCH, "x")
    assert diff.parse(PATCH + b"-- \n2.39.5\n\n", "x") == plain
    assert diff.parse(PATCH + b"\n\n", "x") == plain


def test_an_empty_context_line_may_have_lost_its_space():
    assert diff.parse(PATCH.replace(b" one\n", b"\n"), "x")[0].hunks[0].lines[0] == b" "


@pytest.mark.parametrize(("quoted", "name"), [
    (b'"a\\tb"', "a\tb"), (b'"\\303\\251"', "é"), (b'"\\377"', "\udcff"), (b'"q\\"\\\\"', 'q"\\'), (b"plain", "plain"),
    (b'"\\N{DASH}\\x41"', "\\N{DASH}\\x41")])
def test_names_are_unquoted_as_git_quotes_them(quoted, name):
    assert diff.unquote(quoted) == name
