"""The records of evidence/: whether one still bears out a claim, and what the two-arm proof said of each patch."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import jsonfile


def why_not(path: Path, today: set[str]) -> str:
    """Why a record does not bear out a claim, or an empty string. today: the digests of the lock's entries."""
    try:
        record = jsonfile.read(path)
    except OSError:
        return "no such record"
    except ValueError as error:
        return f"no JSON: {error}"
    if not isinstance(record, dict):
        return "no record"
    if reason := _unlocked(record, today):
        return reason
    if not record.get("rows"):
        return "it has no rows"
    if record.get("verb") == "contrast":
        return "a contrast: it shows what differs, and claims nothing"
    return "" if record.get("passed") is True else "the run did not pass"


def _unlocked(record: dict, today: set[str]) -> str:
    locks = list(_locks(record))
    # One side of `prove unchanged` is the wheel as it came.
    bound = {"locked"} | ({"pristine"} if record.get("verb") == "unchanged" else set())
    if not locks:
        return "it names no lock"
    if all(isinstance(lock, dict) and lock.get("state") == "pristine" for lock in locks):
        return "no engine in it was the locked one"
    for lock in locks:
        digest = lock.get("digest") if isinstance(lock, dict) else lock
        if digest not in today:
            return f"made with another lock ({str(digest)[:12]})"
        if isinstance(lock, dict) and lock.get("state", "locked") not in bound:
            return f"the engine that ran was {lock['state']}, not the locked one"
    return ""


def _locks(value) -> Iterator[dict | str]:
    """Everything that stands under a key `lock`, at any depth (prove/record.py: one an engine), or `actor_lock`, the
    trainer's."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("lock", "actor_lock"):
                yield inner
            else:
                yield from _locks(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _locks(inner)


def paths(folder: Path) -> list[Path]:
    """The records of a folder, and those of another stack in a folder of their own. `kernels` holds raw figures."""
    return sorted(path for path in folder.rglob("*.json") if "kernels" not in path.relative_to(folder).parts)


def records(root: Path, today: set[str]) -> list[dict]:
    """Every record there is: what it is of, and why it bears out nothing ('' if it does)."""
    found = []
    for path in paths(root / "evidence"):
        record = _read(path)
        found.append({"record": path.relative_to(root).as_posix(), "verb": str(record.get("verb", "")),
                      "subject": str(record.get("subject", "")), "why_not": why_not(path, today)})
    return found


def passed(path: Path) -> bool:
    """Whether there is a record that says so."""
    return _read(path).get("passed") is True


def all_in(folder: Path) -> list[dict]:
    """Every record of a folder, a damaged one as an empty one."""
    return [_read(path) for path in paths(folder)]


def _read(path: Path) -> dict:
    """The record, or an empty one where there is none to read."""
    try:
        record = jsonfile.read(path)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def verdicts(root: Path, today: set[str]) -> dict[str, list[dict]]:
    """Slug -> what each record of `prove counter` says of it: record, state, and whether today's lock made it."""
    found: dict[str, list[dict]] = {}
    for path in paths(root / "evidence"):
        record = _read(path)
        rows = record.get("rows")
        for row in rows if isinstance(rows, list) else []:
            if not isinstance(row, dict) or "patch" not in row:
                continue
            said = {"record": path.relative_to(root).as_posix(), "state": row.get("state", ""),
                    "current": not _unlocked(record, today)}
            found.setdefault(row["patch"], []).append(said)
    return found
