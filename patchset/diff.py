"""A strict reader of unified git diffs, as text: files, hunks, modes. It applies nothing and never touches the disk.

git itself applies the patches; this reader exists so that `lint`, `why`, `rebase` and the sentinel know what a patch
touches, and so that a corrupt or unsafe patch is refused before git sees it.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import ConflictError

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")
UNSUPPORTED = (b"rename from ", b"rename to ", b"copy from ", b"copy to ", b"GIT binary patch", b"Binary files ")


@dataclass(frozen=True)
class Hunk:
    """Line numbers are 1-based; `lines` keep their leading ' ', '+', '-' or '\\' and no newline."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    section: str
    lines: tuple[bytes, ...]

    def old_lines(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] in (b" ", b"-")]

    def new_lines(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] in (b" ", b"+")]


@dataclass
class FileDiff:
    """One file of a patch. `old` is None for a creation, `new` for a deletion; modes are git's octal strings."""

    path: str
    created: bool = False
    deleted: bool = False
    old_mode: str = ""
    new_mode: str = ""
    old_blob: str = ""
    new_blob: str = ""
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def added(self) -> int:
        return sum(line[:1] == b"+" for hunk in self.hunks for line in hunk.lines)

    @property
    def removed(self) -> int:
        return sum(line[:1] == b"-" for hunk in self.hunks for line in hunk.lines)


def unquote(name: bytes) -> str:
    """A path as git prints it: C-quoted when it holds unusual bytes (core.quotePath)."""
    if not name.startswith(b'"'):
        return name.decode("utf-8", "surrogateescape")
    raw = name[1:-1].decode("latin-1").encode("latin-1").decode("unicode_escape").encode("latin-1")
    return raw.decode("utf-8", "surrogateescape")


def _strip(name: bytes, prefix: str, where: str) -> str | None:
    name = name.split(b"\t")[0]
    if name == b"/dev/null":
        return None
    path = unquote(name)
    if not path.startswith(prefix):
        raise ConflictError(f"{where}: {path!r} lacks the prefix {prefix!r}", remedy="write it with apply.py export")
    return path[len(prefix):]


def _header_path(line: bytes, where: str) -> str:
    """The path of `diff --git a/P b/P`; both sides are equal, as renames are never written."""
    rest = line[len(b"diff --git "):]
    if rest.startswith(b'"'):
        end = rest.index(b'" ', 1)
        return unquote(rest[: end + 1])[2:]
    half = (len(rest) - 1) // 2
    first, second = rest[:half], rest[half + 1 :]
    if first[2:] != second[2:]:
        raise ConflictError(f"{where}: a rename: {rest!r}", remedy="write it as a deletion and a creation (export does)")
    return unquote(first)[2:]


def parse(data: bytes, where: str) -> list[FileDiff]:
    """The files of a diff. Raises ConflictError (`where` names the patch) if a hunk's counts do not match its lines."""
    files: list[FileDiff] = []
    lines = data.split(b"\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"diff --git "):
            files.append(FileDiff(_header_path(line, where)))
        elif line.startswith(UNSUPPORTED):
            raise ConflictError(f"{where}: renames, copies and binary hunks are not carried: {line[:60]!r}",
                                remedy="write it as text, a deletion and a creation; put binary files in the overlay")
        elif files and not line.startswith(b"@@ "):
            _file_header(files[-1], line, where)
        elif line.startswith(b"@@ "):
            if not files:
                raise ConflictError(f"{where}: a hunk before any 'diff --git' line", remedy="apply.py export rewrites it")
            hunk, at = _hunk(lines, at, where)
            files[-1].hunks.append(hunk)
            continue
        at += 1
    return files


def _file_header(file: FileDiff, line: bytes, where: str) -> None:
    text = line.decode("latin-1")
    for key in ("new file mode ", "deleted file mode ", "old mode ", "new mode "):
        if text.startswith(key):
            mode = text[len(key):]
            file.created |= key.startswith("new file")
            file.deleted |= key.startswith("deleted")
            if key.startswith(("new", "deleted")):
                file.new_mode = mode
            if key.startswith("old"):
                file.old_mode = mode
    if text.startswith("index "):
        blobs, _, mode = text[len("index "):].partition(" ")
        file.old_blob, _, file.new_blob = blobs.partition("..")
        file.new_mode = file.new_mode or mode
    for prefix, marker in (("a/", b"--- "), ("b/", b"+++ ")):
        if line.startswith(marker):
            path = _strip(line[4:], prefix, where)
            if path is not None and path != file.path:
                raise ConflictError(f"{where}: {marker.decode().strip()} names {path!r} under a header for {file.path!r}",
                                    remedy="apply.py export rewrites it")


def _hunk(lines: list[bytes], at: int, where: str) -> tuple[Hunk, int]:
    match = HUNK.match(lines[at])
    if not match:
        raise ConflictError(f"{where}: not a hunk header: {lines[at][:80]!r}", remedy="apply.py export rewrites it")
    old_start, new_start = int(match[1]), int(match[3])
    old_left = old_count = int(match[2] or 1)
    new_left = new_count = int(match[4] or 1)
    body, start = [], at
    at += 1
    while old_left > 0 or new_left > 0 or (at < len(lines) and lines[at].startswith(b"\\")):
        kind = lines[at][:1] if at < len(lines) else b"?"
        if kind == b"":
            kind, lines[at] = b" ", b" "  # mail tools strip the space of an empty context line
        if kind not in (b" ", b"+", b"-", b"\\"):
            raise ConflictError(
                f"{where}: corrupt hunk at line {start + 1}: {old_left} old and {new_left} new lines are missing",
                remedy="take the patch again from its tree with apply.py refresh",
            )
        old_left -= kind in (b" ", b"-")
        new_left -= kind in (b" ", b"+")
        body.append(lines[at])
        at += 1
    if old_left < 0 or new_left < 0:
        raise ConflictError(f"{where}: corrupt hunk at line {start + 1}: more lines than its header counts",
                            remedy="take the patch again from its tree with apply.py refresh")
    section = match[5].decode("utf-8", "replace").strip()
    return Hunk(old_start, old_count, new_start, new_count, section, tuple(body)), at
