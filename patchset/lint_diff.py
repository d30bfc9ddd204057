"""What a diff does to files: paths, modes, line ends, whitespace, size. Each check yields (line, rule, message)."""
from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator

from . import rebase_names
from .diff import FileDiff
from .paths import why_unsafe
from .series import Patch
from .shadow import File, Files

Found = tuple[int, str, str]
FILES_MAX, ADDED_MAX = 6, 120
KINDS = {"120000": "a symbolic link", "160000": "a submodule"}
MARKER = re.compile(rb"^(<{7}|>{7}|\|{7})( |$)")
METADATA = re.compile(r"[^/]+\.(dist-info|egg-info)(/|$)")
# Characters that reorder or hide text: bidirectional controls, zero-width characters, the byte order mark.
INVISIBLE = re.compile("[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")


def check(patch: Patch) -> Iterator[Found]:
    """What the diff alone shows."""
    above = patch.raw[: len(patch.raw) - len(patch.text)].count(b"\n")
    seen = set()
    for file in patch.files:
        line = above + file.line
        if reason := why_unsafe(file.path):
            yield line, "path", f"{file.path!r}: {reason}"
        if METADATA.match(file.path):
            yield line, "path", f"{file.path} belongs to an installed package's metadata, which pip owns"
        if file.path in seen:
            yield line, "path", f"{file.path} stands here twice"
        seen.add(file.path)
        yield from ((line, rule, message) for rule, message in _mode(file))
        yield from _lines(file, above)
    if len(seen) > FILES_MAX:
        yield above + 1, "files", f"{len(seen)} files, more than {FILES_MAX}"
    added = sum(file.added for file in patch.files)
    if added > ADDED_MAX:
        yield above + 1, "lines", f"{added} added lines, more than {ADDED_MAX}"


def _mode(file: FileDiff) -> Iterator[tuple[str, str]]:
    for mode in {file.old_mode, file.new_mode} & set(KINDS):
        yield "link", f"{file.path} is {KINDS[mode]}"
    if {file.old_mode, file.new_mode} - {"", "100644", "100755", *KINDS}:
        yield "mode", f"{file.path} has the mode {file.new_mode or file.old_mode}"
    elif file.old_mode and file.old_mode != file.new_mode:
        yield "mode", f"{file.path} changes its mode from {file.old_mode} to {file.new_mode}"


def _lines(file: FileDiff, above: int) -> Iterator[Found]:
    for hunk in file.hunks:
        for number, line in enumerate(hunk.lines, above + hunk.line + 1):
            if line[:1] != b"+":
                continue
            text = line[1:].removesuffix(b"\r")
            if text != text.rstrip():
                yield number, "trailing-space", f"{text.decode('utf-8', 'replace')[-40:]!r}"
            if MARKER.match(text):
                yield number, "conflict-marker", text.decode("utf-8", "replace")[:40]
            if b"\0" in text:
                yield number, "binary", f"{file.path} gets a NUL byte"
            if hidden := INVISIBLE.search(text.decode("utf-8", "replace")):
                yield number, "invisible", f"U+{ord(hidden[0]):04X}"


def check_result(patch: Patch, before: Files, after: Files, overlay: Files) -> Iterator[Found]:
    """What only the files before and after the patch show. overlay: its modules, by the path that imports see."""
    above = patch.raw[: len(patch.raw) - len(patch.text)].count(b"\n")
    for file in patch.files:
        old, new = before.get(file.path), after.get(file.path)
        if new is None:
            continue
        yield from _line_ends(file, old, above)
        if new.data and not new.data.endswith(b"\n") and (not old or old.data[-1:] in (b"", b"\n")):
            yield above + file.line, "final-newline", f"{file.path} ends without a newline"
        if file.path.endswith((".py", ".pyi")):
            found = _python(file.path, old.data if old else b"", new.data, overlay)
            yield from ((above + file.line, *one) for one in found)


def _python(path: str, old: bytes, new: bytes, overlay: Files) -> Iterator[tuple[str, str]]:
    """What the patch broke: what was broken before it is not its fault."""
    if error := broken(new):
        if not broken(old):
            yield "syntax", f"{path}:{error}"
        return
    for name in sorted(rebase_names.undefined(new, path) - rebase_names.undefined(old, path)):
        yield "undefined-name", f"{path}: {name} is defined nowhere"
    ours = {tuple(place.split("/")[:2]) for place in overlay}
    for package in sorted({package for package, _ in ours}):
        for module, name in sorted(rebase_names.imports(new, package) - rebase_names.imports(old, package)):
            if tuple(module.split(".")[:2]) in ours and not rebase_names.resolves(module, name, _source(overlay)):
                yield "undefined-name", f"{path}: the overlay has no {module}{f'.{name}' if name else ''}"


def _source(files: Files) -> Callable[[str], bytes | None]:
    return lambda path: files[path].data if path in files else None


def _line_ends(file: FileDiff, old: File | None, above: int) -> Iterator[Found]:
    """A new file has LF; in an old one every added line ends as all its lines do. A mixed file is left alone."""
    crlf = old.data.count(b"\r\n") if old else 0
    if crlf and crlf != old.data.count(b"\n"):
        return
    message = f"LF in {file.path}, which has CRLF" if crlf else f"CRLF in {file.path}, which has LF"
    for hunk in file.hunks:
        for number, line in enumerate(hunk.lines, above + hunk.line + 1):
            if line[:1] == b"+" and line.endswith(b"\r") != bool(crlf):
                yield number, "line-ends", message
                return


def broken(source: bytes) -> str:
    """'line: message' if this is no Python, else an empty string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except SyntaxError as error:
        return f"{error.lineno}: {error.msg}"
    except ValueError as error:
        return f"1: {error}"
    return ""
