"""Every refusal is one of these. The library raises; apply.py alone prints and turns them into exit codes.

Exit codes (design): 0 done, 1 needs work, 2 usage, 3 conflict, 4 dirty target, 5 lock mismatch.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One path of a refusal's table: what was found there and what was expected."""

    path: str
    found: str
    expected: str


class PatchsetError(Exception):
    """message: what is wrong. remedy: what to do about it. rows: the paths concerned."""

    exit_code = 1
    kind = "needs-work"

    def __init__(self, message: str, *, remedy: str = "", rows: list[Row] | None = None):
        super().__init__(message)
        self.message, self.remedy, self.rows = message, remedy, rows or []

    def as_json(self) -> dict:
        return {
            "kind": self.kind,
            "message": self.message,
            "remedy": self.remedy,
            "paths": [vars(row) for row in self.rows],
        }


class NeedsWork(PatchsetError):
    """Something unfinished that a person or another verb must finish (a journal left behind, a failed lint)."""


class UsageError(PatchsetError):
    exit_code, kind = 2, "usage"


class ConflictError(PatchsetError):
    """A patch does not apply, changes nothing (absorbed) or meets a conflict."""

    exit_code, kind = 3, "conflict"


class DirtyTarget(PatchsetError):
    """The target holds edits, a mixture of pristine and patched files, or something in a path's way."""

    exit_code, kind = 4, "dirty"


class LockMismatch(PatchsetError):
    """Wrong version, another lock's tree, a stale lock, an archive with another digest."""

    exit_code, kind = 5, "lock-mismatch"
