"""What a verb returns, and how a refusal is laid out. Printing itself happens in apply.py alone."""
from __future__ import annotations

from dataclasses import dataclass, field

from .errors import PatchsetError


@dataclass
class Result:
    """data: the verb's JSON fields (docs/json.md). lines: the same for a person. code: the exit code."""

    data: dict
    lines: list[str] = field(default_factory=list)
    code: int = 0


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Left-aligned columns; no lines for no rows."""
    if not rows:
        return []
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, *rows]]


def refusal(error: PatchsetError) -> list[str]:
    """An error as text: message, table of paths, remedy."""
    lines = [f"{error.kind}: {error.message}"]
    lines += ["  " + line for line in table(["path", "found", "expected"], [[r.path, r.found, r.expected]
                                                                             for r in error.rows])]
    if error.remedy:
        lines.append(f"what to do: {error.remedy}")
    return lines
