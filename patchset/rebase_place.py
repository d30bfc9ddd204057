"""Where some lines stand in a file: exactly, reindented, or nowhere; and whether that place is the only one."""
from __future__ import annotations

import ast

from .diff import Hunk
from .shadow import Offset


def find(lines: list[bytes], wanted: list[bytes]) -> list[int]:
    """The 1-based line numbers at which `wanted` stands, whole and exact."""
    if not wanted:
        return []
    last = len(lines) - len(wanted) + 1
    return [at + 1 for at in range(last) if lines[at] == wanted[0] and lines[at : at + len(wanted)] == wanted]


def reindented(lines: list[bytes], hunk: Hunk) -> tuple[int, int] | None:
    """Line and step if the hunk's old lines, with as much context as is still around, stand once, indented anew."""
    stripped = [line.strip() for line in lines]
    for context in (3, 2, 1, 0):
        wanted = _core(hunk, context)
        if not any(line.strip() for line in wanted):
            return None
        places = find(stripped, [line.strip() for line in wanted])
        if len(places) == 1:
            at = places[0]
            pairs = zip(lines[at - 1 : at - 1 + len(wanted)], wanted, strict=True)
            steps = {_indent(now) - _indent(was) for now, was in pairs if was.strip()}
            return (at, steps.pop()) if len(steps) == 1 and steps != {0} else None
    return None


def _core(hunk: Hunk, context: int) -> list[bytes]:
    """The old lines from the first change to the last, with at most that much context around."""
    changed = [index for index, line in enumerate(hunk.lines) if line[:1] in (b"+", b"-")]
    part = hunk.lines[max(0, changed[0] - context) : changed[-1] + 1 + context]
    return [line[1:] for line in part if line[:1] in (b" ", b"-")]


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())


def enclosing(data: bytes, line: int) -> str:
    """The qualified name of the innermost function or class around a line; '' at module level or outside Python."""
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError):
        return ""
    names: list[str] = []
    while body:
        inner = next((node for node in body if getattr(node, "lineno", 0) <= line <= (node.end_lineno or 0)), None)
        if inner is None:
            break
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(inner.name)
        body = [child for child in ast.iter_child_nodes(inner) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
    return ".".join(names)


def doubts(path: str, base: bytes, upstream: bytes, hunks: list[Hunk], offsets: list[Offset]) -> list[str]:
    """Reasons not to trust where `git apply` landed: another place has the same lines, or it is in other code."""
    lines = upstream.split(b"\n")
    moved = {offset.hunk: offset.line for offset in offsets}
    reasons = []
    for number, hunk in enumerate(hunks, 1):
        places = find(lines, hunk.old_lines())
        if len(places) != 1:
            spots = ", ".join(map(str, places[:5])) or "nowhere as a block"
            reasons.append(f"hunk {number}: its lines stand {len(places)} times in the release ({spots})")
            continue
        if path.endswith(".py"):
            lead = next(index for index, line in enumerate(hunk.lines) if line[:1] != b" ")
            was, now = enclosing(base, hunk.old_start + lead), enclosing(upstream, places[0] + lead)
            if was != now:
                reasons.append(f"hunk {number}: from {was or 'module level'} to {now or 'module level'}"
                               f" (line {moved.get(number, places[0])})")
    return reasons
