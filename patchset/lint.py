"""`apply.py lint`: every finding at once, as file:line, with the rule and what to do. Errors make it exit 1."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from . import evidence, export, lint_recipes, lint_series
from .errors import PatchsetError
from .lint_rules import ERROR, Finding
from .lock import NAME, BaseFiles, Lock
from .pins import Pins
from .ui import Result

CLAIM = re.compile(r"\bevidence/[\w./@+-]+\.json\b")


def run(root: Path, pins: Pins, base: BaseFiles | None = None) -> Result:
    base = base or export.Sdists()
    found = set(_claims(root)) | set(lint_recipes.check(root, _today(root)))
    for upstream in pins.upstreams.values():
        found |= set(lint_series.check(root, pins, upstream, base))
    findings = sorted(found)
    errors = sum(finding.level == ERROR for finding in findings)
    warnings = len(findings) - errors
    data = {"findings": [finding.as_json() for finding in findings], "errors": errors, "warnings": warnings}
    return Result(data, [*map(str, findings), f"{errors} errors, {warnings} warnings"], int(errors > 0))


def _today(root: Path) -> set[str]:
    """The digests that a record may name; none without a lock, which _claims says."""
    try:
        return {target.digest for target in Lock.load(root).targets.values()}
    except PatchsetError:
        return set()


def _claims(root: Path) -> Iterator[Finding]:
    """Every record that the README points at must exist, have passed, and come from today's lock."""
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    claims = [(number, match[0]) for number, line in enumerate(text.split("\n"), 1) for match in CLAIM.finditer(line)]
    if not claims:
        return
    try:
        today = {target.digest for target in Lock.load(root).targets.values()}
    except PatchsetError as error:
        yield Finding(NAME, 1, "lock", error.message)
        return
    for number, name in claims:
        if reason := evidence.why_not(root / name, today):
            yield Finding("README.md", number, "evidence", f"{name}: {reason}")
