"""What stands above the diff: subject, body and trailers. Each check yields (line of the patch file, rule, message)."""
from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from . import export, sentinel, series
from .lint_diff import INVISIBLE, Found
from .pins import Pins
from .series import Patch
from .shadow import Files

SUBJECT_MAX = 110   # with "Subject: " it fits the 120 columns of every other line
BODY_MIN = 20       # words; less does not say why
SINGLE = {"Upstream-Status", "Upstream-PR", "Arch", "Drop-When", "Load-Bearing"}
OPTIONAL = {"Depends-On", "Contract-Read", "Rebased-From"}
STATUS = re.compile(r"Pending|(Submitted|Backport|Denied|Inappropriate|Inactive-Upstream) \[[^][]*\w[^][]*\]")
PR = re.compile(r"none|https://\S+")
LOAD_BEARING = re.compile(r"(yes|no) (—|--?) \S.{7,}")
CONTRACT_READ = re.compile(r"\S+ [0-9a-f]{12} (—|--?) \S.{7,}")
SOURCE = re.compile(r"[\w/.]+\.\w+:\d+|:\d+")


def check(patch: Patch, pins: Pins, root: Path, pristine: Files) -> Iterator[Found]:
    """pristine: the files of the release that the anchors name. What a draft left open is one finding a line."""
    found = list(_check(patch, pins, root, pristine))
    undone = {line for line, rule, _ in found if rule == "todo"}
    return (one for one in found if one[1] == "todo" or one[0] not in undone)


def _check(patch: Patch, pins: Pins, root: Path, pristine: Files) -> Iterator[Found]:
    yield from _text(patch)
    yield from _trailers(patch)
    for name, pattern, rule in (("Upstream-Status", STATUS, "upstream-status"), ("Upstream-PR", PR, "upstream-pr"),
                                ("Load-Bearing", LOAD_BEARING, "load-bearing"),
                                (sentinel.READ, CONTRACT_READ, "contract-read")):
        for line, value in values(patch, name):
            if not pattern.fullmatch(value):
                yield line, rule, f"{name} is {value!r}"
    for line, value in values(patch, "Drop-When"):
        if len(value.split()) < 3:
            yield line, "drop-when", f"Drop-When is {value!r}"
    known = {"any"} | {arch for profile in pins.profiles.values() for arch in profile.arch}
    for line, value in values(patch, "Arch"):
        for word in value.split(","):
            if word.strip() not in known:
                yield line, "arch", f"no profile has the architecture {word.strip()!r}"
    for name in ("Tests", "Counter-Test"):
        for line, value in values(patch, name):
            if reason := _no_test(root, value):
                yield line, "test", f"{name}: {reason}"
    yield from _anchors(patch, pristine)


def values(patch: Patch, name: str) -> Iterable[tuple[int, str]]:
    """Line and value of each trailer of that name."""
    return zip(_lines(patch, name), patch.values(name), strict=False)


def _head(patch: Patch) -> list[str]:
    """The lines above the diff, without the ruler and what follows it."""
    text = patch.raw[: len(patch.raw) - len(patch.text)].decode("utf-8", "replace")
    return series.RULER.split(text, maxsplit=1)[0].rstrip("\n").split("\n")


def _lines(patch: Patch, name: str, *, outside: bool = False) -> list[int]:
    """Where trailers of that name begin in the last paragraph, which alone is read; with `outside`, in the others."""
    head = _head(patch)
    last = max((number for number, line in enumerate(head, 1) if not line.strip()), default=0)
    if not patch.trailers:
        last = len(head)
    return [number for number, line in enumerate(head, 1) if line.startswith(f"{name}:") and (number < last) == outside]


def _text(patch: Patch) -> Iterator[Found]:
    subject = next(number for number, line in enumerate(_head(patch), 1) if line.startswith("Subject:"))
    if len(patch.subject) > SUBJECT_MAX:
        yield subject, "subject", f"{len(patch.subject)} characters"
    if patch.subject.endswith("."):
        yield subject, "subject", "it ends with a full stop"
    words = set(re.findall(r"\w+", patch.body.lower())) - set(re.findall(r"\w+", patch.subject.lower()))
    if "TODO" in patch.body:
        pass
    elif len(patch.body.split()) < BODY_MIN or len(words) < BODY_MIN // 2:
        yield subject + 1, "body", f"{len(patch.body.split())} words, {len(words)} of them not in the subject"
    elif not SOURCE.search(patch.body):
        yield subject + 1, "body-source", "no file:line"
    for number, line in enumerate(_head(patch), 1):
        if "TODO" in line:
            yield number, "todo", line.strip()[:80]
        if hidden := INVISIBLE.search(line):
            yield number, "invisible", f"U+{ord(hidden[0]):04X}"


def _trailers(patch: Patch) -> Iterator[Found]:
    end = len(_head(patch))
    for name in export.ORDER:
        if name not in OPTIONAL and not patch.values(name):
            yield end, "trailer-missing", f"no {name}"
    for name, found in patch.trailers.items():
        lines = _lines(patch, name)
        if name not in export.ORDER:
            near = difflib.get_close_matches(name, export.ORDER, n=1)
            yield lines[0], "trailer-unknown", f"{name}{f' (did you mean {near[0]}?)' if near else ''}"
        elif name in SINGLE and len(found) > 1:
            yield lines[1], "trailer-repeated", f"{len(found)} {name} lines"
        for number, value in enumerate(found):
            if value in found[:number]:
                yield lines[number], "duplicate-claim", f"{name}: {value} stands here twice"
    for name in export.ORDER:
        for line in _lines(patch, name, outside=True):
            yield line, "trailer-missing", f"{name} stands outside the last paragraph, where nothing reads it"


def _no_test(root: Path, value: str) -> str:
    """Why a node id names no test of this repository, or an empty string."""
    path, _, name = re.sub(r"\[.*\]$", "", value).partition("::")
    if not name or not path.endswith(".py"):
        return f"{value!r} is no path.py::test_name"
    place = root / path
    if not place.is_file():
        return f"{path} does not exist"
    defined = _definitions(place.read_bytes())
    lacking = [part for part in name.split("::") if part not in defined]
    if not lacking:
        return ""
    near = difflib.get_close_matches(lacking[0], defined, n=1)
    return f"{path} defines no {lacking[0]}{f' (did you mean {near[0]}?)' if near else ''}"


@cache
def _definitions(source: bytes) -> frozenset[str]:
    try:
        nodes = ast.walk(ast.parse(source))
        return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    except SyntaxError:
        return frozenset()


def _anchors(patch: Patch, pristine: Files) -> Iterator[Found]:
    for line, value in values(patch, "Anchors"):
        for anchor in sentinel.anchors([value]):
            if reason := _no_anchor(anchor, pristine):
                yield line, "anchor", reason


def _no_anchor(anchor: sentinel.Anchor, pristine: Files) -> str:
    if anchor.path not in pristine:
        return f"the release has no file {anchor.path}"
    if not anchor.path.endswith((".py", ".pyi")):
        return f"{anchor}: only a Python file has symbols" if anchor.name else ""
    if not anchor.name:
        return f"{anchor} names no symbol"
    try:
        module = _module(pristine[anchor.path].data)
    except SyntaxError as error:
        return f"{anchor.path} cannot be parsed: {error}"
    if module.get(anchor.name):
        return ""
    near = difflib.get_close_matches(anchor.name, [symbol.name for symbol in module.functions()], n=1)
    return f"{anchor.path} defines no {anchor.name}{f' (did you mean {near[0]}?)' if near else ''}"


@cache
def _module(source: bytes) -> sentinel.Module:
    return sentinel.Module(source)


def anchor_paths(patch: Patch) -> set[str]:
    return {anchor.path for anchor in sentinel.anchors(patch.values("Anchors"))}


