"""`apply.py report`: the series as a table, one patch a row, and every record of evidence/.

The column `counter` is about one patch: what the two-arm proof (`prove counter`) said of it. The other records are of
the whole series and stand below.
"""
from __future__ import annotations

from pathlib import Path

from . import evidence, series
from .errors import LockMismatch
from .lock import Lock
from .pins import Pins
from .series import Patch
from .ui import Result, table
from .why import upstreams

COLUMNS = ["#", "slug", "files", "+", "-", "arch", "status", "tests", "counter", "cause"]
RECORDS = ["record", "run", "of", "bears out its claim"]


def run(root: Path, pins: Pins, version: str | None) -> Result:
    today = _today(root)
    said, records = evidence.verdicts(root, today), evidence.records(root, today)
    found = {}
    for upstream in upstreams(pins, version):
        release = upstream.release(version)
        patches = series.load(root, upstream.name, release.version)
        rows = [_row(root, number, patch, said.get(patch.slug, [])) for number, patch in enumerate(patches, 1)]
        found[upstream.name] = {"version": release.version, "patches": rows}
    lines = [line for name, one in found.items() for line in _lines(name, one)]
    return Result({"upstreams": found, "records": records}, lines + _records(records))


def _today(root: Path) -> set[str]:
    """The digests of the lock's entries; none if there is no valid lock, and then no record is current."""
    try:
        return {target.digest for target in Lock.load(root).targets.values()}
    except LockMismatch:
        return set()


def _row(root: Path, number: int, patch: Patch, said: list[dict]) -> dict:
    return {
        "order": number, "slug": patch.slug, "patch": patch.path.relative_to(root).as_posix(), "cause": patch.subject,
        "files": patch.paths, "added": sum(file.added for file in patch.files),
        "removed": sum(file.removed for file in patch.files), "arch": sorted(patch.arch),
        "depends_on": patch.depends_on, "status": " ".join(patch.values("Upstream-Status")),
        "upstream_pr": " ".join(patch.values("Upstream-PR")), "tests": patch.values("Tests"),
        "counter_tests": patch.values("Counter-Test"), "evidence": said,
        "drop_when": " ".join(patch.values("Drop-When")), "load_bearing": " ".join(patch.values("Load-Bearing")),
    }


def _lines(name: str, one: dict) -> list[str]:
    rows = one["patches"]
    added, removed = sum(row["added"] for row in rows), sum(row["removed"] for row in rows)
    files = {path for row in rows for path in row["files"]}
    lines = [f"{name} {one['version']}: {len(rows)} patches, {len(files)} files, +{added} -{removed}"]
    lines += [f"  {line}" for line in table(COLUMNS, [_cells(row) for row in rows])]
    for row in rows:
        lines += ["", f"  {row['slug']}", f"    drop when: {row['drop_when']}"]
        lines += [f"    counter-test: {node}" for node in row["counter_tests"]]
        lines += [f"    counter-proof: {_verdict(verdict)} in {verdict['record']}" for verdict in row["evidence"]]
    return [*lines, ""]


def _records(records: list[dict]) -> list[str]:
    if not records:
        return ["evidence: no records"]
    holding = sum(not record["why_not"] for record in records)
    rows = [[record["record"], record["verb"], record["subject"],
             f"no: {record['why_not']}" if record["why_not"] else "yes"] for record in records]
    return [f"evidence: {len(records)} records, {holding} with today's lock and passed",
            *(f"  {line}" for line in table(RECORDS, rows))]


def _verdict(verdict: dict) -> str:
    return verdict["state"] + ("" if verdict["current"] else " (another lock)")


def _cells(row: dict) -> list[str]:
    states = "; ".join(sorted({_verdict(verdict) for verdict in row["evidence"]})) or "none"
    tests = f"{len(row['tests'])}+{len(row['counter_tests'])}"
    return [row["order"], row["slug"], len(row["files"]), row["added"], row["removed"], ",".join(row["arch"]),
            row["status"].split(" ", 1)[0], tests, states, row["cause"]]
