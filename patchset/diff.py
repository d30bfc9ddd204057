"""A strict reader of unified git diffs, as text: files, hunks, modes. It applies nothing and never touches the disk.

git itself applies the patches; this reader exists so that `lint`, `why`, `rebase` and the sentinel know what a patch
touches, and so that a corrupt or unsafe patch is refused before git sees it.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import ConflictError

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")
MODE = re.compile(rb"^(old|new|new file|deleted file) mode (\d{6})$")
INDEX = re.compile(rb"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?$")
SIGNATURE = re.compile(rb"\n-- \n\d[^\n]*\n*\Z")  # what format-patch ends with; no hunk line starts with a digit
QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')
ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)
ESCAPES = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))
UNSUPPORTED = (b"rename from ", b"rename to ", b"copy from ", b"copy to ", b"GIT binary patch", b"Binary files ")


@dataclass(frozen=True)
class Hunk:
    """Line numbers are 1-based; `lines` keep their leading ' ', '+', '-' or '\\' and no newline.

    `line` is where the hunk's header stands in the diff that was read; `lines[i]` stands at `line + 1 + i`.
    """

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    section: str
    lines: tuple[bytes, ...]
    line: int = field(default=0, compare=False)

    def old_lines(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] in (b" ", b"-")]

    def new_lines(self) -> list[bytes]:
        return [line[1:] for line in self.lines if line[:1] in (b" ", b"+")]


@dataclass
class FileDiff:
    """One file of a patch. Modes are git's octal strings; `line` is where its `diff --git` stands in the diff read."""

    path: str
    created: bool = False
    deleted: bool = False
    old_mode: str = ""
    new_mode: str = ""
    old_blob: str = ""
    new_blob: str = ""
    hunks: list[Hunk] = field(default_factory=list)
    line: int = field(default=0, compare=False)

    @property
    def added(self) -> int:
        return sum(line[:1] == b"+" for hunk in self.hunks for line in hunk.lines)

    @property
    def removed(self) -> int:
        return sum(line[:1] == b"-" for hunk in self.hunks for line in hunk.lines)


def unquote(name: bytes) -> str:
    """A path as git prints it: C-quoted when it holds unusual bytes (core.quotePath)."""
    if name.startswith(b'"'):
        name = ESCAPE.sub(_unescape, name[1:-1])
    return name.decode("utf-8", "surrogateescape")


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if len(code) == 3:
        return bytes([int(code, 8)])
    return bytes([ESCAPES[code[0]]]) if code[0] in ESCAPES else match[0]


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
    if rest.endswith(b"\r"):
        raise ConflictError(f"{where}: the patch file itself was turned into CRLF", remedy="take it again from git")
    quoted = QUOTED.match(rest)
    half = quoted.end() if quoted else (len(rest) - 1) // 2
    first, second = unquote(rest[:half]), unquote(rest[half + 1 :])
    if first[2:] != second[2:]:
        raise ConflictError(f"{where}: a rename: {rest!r}", remedy="write it as a deletion and a creation")
    if not first.startswith("a/") or not second.startswith("b/"):
        raise ConflictError(f"{where}: {rest!r} lacks the prefixes a/ and b/", remedy="write it with apply.py export")
    return first[2:]


def parse(data: bytes, where: str) -> list[FileDiff]:
    """The files of a diff. Raises ConflictError (`where` names the patch) for anything that is not wholly understood:
    git itself skips what lies between hunks, so a hunk with too small a count loses its last lines without a word."""
    files: list[FileDiff] = []
    lines = SIGNATURE.sub(b"\n", data).removesuffix(b"\n").split(b"\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"diff --git "):
            files.append(FileDiff(_header_path(line, where), line=at + 1))
        elif line.startswith(UNSUPPORTED):
            raise ConflictError(f"{where}: renames, copies and binary hunks are not carried: {line[:60]!r}",
                                remedy="write it as text, a deletion and a creation; put binary files in the overlay")
        elif line.startswith(b"@@ "):
            if not files:
                raise ConflictError(f"{where}: a hunk before any 'diff --git'", remedy="apply.py export rewrites it")
            hunk, at = _hunk(lines, at, where)
            files[-1].hunks.append(hunk)
            continue
        elif files and not files[-1].hunks:
            _file_header(files[-1], line, where)
        elif any(lines[at:]):
            raise ConflictError(f"{where}: line {at + 1} of the diff belongs to no hunk: {line[:60]!r}",
                                remedy="take the patch again from its tree with apply.py refresh")
        at += 1
    return files


def _file_header(file: FileDiff, line: bytes, where: str) -> None:
    if match := MODE.match(line):
        mode = match[2].decode()
        file.created |= match[1] == b"new file"
        file.deleted |= match[1] == b"deleted file"
        if match[1] == b"old":
            file.old_mode = mode
        else:
            file.new_mode = mode
    elif match := INDEX.match(line):
        file.old_blob, file.new_blob = match[1].decode(), match[2].decode()
        file.new_mode = file.new_mode or (match[3] or b"").decode()
    elif line.startswith((b"--- ", b"+++ ")):
        path = _strip(line[4:], "a/" if line.startswith(b"---") else "b/", where)
        if path is not None and path != file.path:
            raise ConflictError(f"{where}: {line[:3].decode()} names {path!r} under a header for {file.path!r}",
                                remedy="apply.py export rewrites it")
    else:
        raise ConflictError(f"{where}: not a line of a diff's header: {line[:60]!r}",
                            remedy="take the patch again from its tree with apply.py refresh")


def _hunk(lines: list[bytes], at: int, where: str) -> tuple[Hunk, int]:
    match = HUNK.match(lines[at])
    if not match:
        raise ConflictError(f"{where}: not a hunk header: {lines[at][:80]!r}", remedy="apply.py export rewrites it")
    old_left = old_count = int(match[2] or 1)
    new_left = new_count = int(match[4] or 1)
    body: list[bytes] = []
    for line in lines[at + 1 :]:
        line = line or b" "  # mail tools strip the space of an empty context line
        kind = line[:1]
        if kind == b"\\" and body:
            body.append(line)
            continue
        if old_left <= 0 and new_left <= 0 or kind not in (b" ", b"+", b"-"):
            break
        old_left -= kind in (b" ", b"-")
        new_left -= kind in (b" ", b"+")
        body.append(line)
    if old_left or new_left:
        raise ConflictError(
            f"{where}: corrupt hunk at line {at + 1} of the diff: its header and its lines differ by {old_left} old "
            f"and {new_left} new", remedy="take the patch again from its tree with apply.py refresh")
    if not any(line[:1] in (b"+", b"-") for line in body):
        raise ConflictError(f"{where}: the hunk at line {at + 1} of the diff changes nothing",
                            remedy="take the patch again from its tree with apply.py refresh")
    section = match[5].decode("utf-8", "replace").strip()
    hunk = Hunk(int(match[1]), old_count, int(match[3]), new_count, section, tuple(body), line=at + 1)
    return hunk, at + 1 + len(body)
