"""Which patch a line of the patched tree comes from: the hunks of a series, followed line by line.

A patch leans on an earlier one if its hunk, context included, holds a line that the earlier one wrote, or spans a place
where the earlier one removed lines: without that one it does not apply.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from .diff import FileDiff, Hunk
from .shadow import Files


@dataclass
class _File:
    """owners[i]: who wrote line i (None: the release). gaps[i]: who removed lines before line i."""

    owners: list[str | None]
    gaps: list[frozenset[str]]


@dataclass
class Ownership:
    """`follow` the patches in order; `base` holds the release's files."""

    base: Files
    files: dict[str, _File] = field(default_factory=dict)

    def follow(self, slug: str, diffs: list[FileDiff]) -> set[str]:
        """Take in one patch, its hunks at their exact places. Returns the slugs that it leans on."""
        found: set[str] = set()
        for diff in diffs:
            found |= self._take(diff, slug)
        return found - {slug}

    def _file(self, path: str) -> _File:
        if path not in self.files:
            data = self.base[path].data if path in self.base else b""
            lines = data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
            self.files[path] = _File([None] * lines, [frozenset()] * (lines + 1))
        return self.files[path]

    def _take(self, diff: FileDiff, slug: str) -> set[str]:
        file, found, shift = self._file(diff.path), set(), 0
        for hunk in diff.hunks:
            at = hunk.old_start - (hunk.old_count > 0) + shift
            end = at + hunk.old_count
            found |= {owner for owner in file.owners[at:end] if owner}
            found |= {owner for gap in file.gaps[at + 1 : end] for owner in gap}
            self._replace(file, at, hunk, slug)
            shift += hunk.new_count - hunk.old_count
        return found

    def _replace(self, file: _File, at: int, hunk: Hunk, slug: str) -> None:
        for line in hunk.lines:
            kind = line[:1]
            if kind == b"-":
                removed = file.gaps.pop(at)
                del file.owners[at]
                file.gaps[at] |= removed | {slug}
            elif kind == b"+":
                file.owners.insert(at, slug)
                file.gaps.insert(at + 1, frozenset())
            if kind in (b" ", b"+"):
                at += 1
