"""What a target's state folder says was applied there, and RECORD lines for an installed wheel."""
from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from . import jsonfile
from .errors import DirtyTarget, LockMismatch
from .transaction import Change, read_changes

NAME = "state.json"
SCHEMA = 1


@dataclass(frozen=True)
class State:
    """The applied lock entry and every change made, in order, the state file itself excepted."""

    upstream: str
    version: str
    profile: str
    without: tuple[str, ...]
    lock: str
    tree: str
    changes: tuple[Change, ...]
    folders: tuple[str, ...]

    def dumps(self) -> bytes:
        return (json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n").encode()


def load(folder: Path) -> State | None:
    """The state of an applied target, or None. Raises LockMismatch if it cannot be read."""
    try:
        data = jsonfile.read(folder / NAME)
        if data.pop("schema") != SCHEMA:
            raise LockMismatch(f"{folder / NAME} was written by another version of this tool",
                               remedy="revert with the version that applied it, then apply with this one")
        for key in ("without", "folders"):
            data[key] = tuple(data[key])
        data["changes"] = read_changes(data["changes"])
        return State(**data)
    except FileNotFoundError:
        return None
    except jsonfile.WRONG as error:
        raise LockMismatch(f"{folder / NAME} is damaged ({error!r}), so what was applied cannot be told",
                           remedy="take a fresh copy of the release, then apply") from None


def record_after(record: bytes, files: dict[str, bytes], unhashed: list[str]) -> bytes:
    """RECORD with the digests of `files` (new or changed) and lines without digest for our own state files.

    Unchanged lines keep their bytes and order. RECORD is CSV: path, sha256=<urlsafe base64>, size.
    """
    lines, left = [], dict(files)
    try:
        for line in record.decode("utf-8").splitlines(keepends=True):
            path = next(csv.reader([line]))[0] if line.strip() else ""
            lines.append(_line(path, left.pop(path)) if path in left else line)
    except (UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(error) from None
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    lines += [_line(path, data) for path, data in sorted(left.items())]
    lines += [_line(path, None) for path in unhashed]
    return "".join(lines).encode("utf-8")


def record_digests(record: bytes) -> dict[str, str]:
    """The sha256 in hex of every path for which RECORD has one."""
    try:
        rows = [row for row in csv.reader(io.StringIO(record.decode("utf-8"))) if len(row) == 3]
        return {path: base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=").hex()
                for path, digest, _ in rows if digest.startswith("sha256=")}
    except (ValueError, csv.Error) as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> DirtyTarget:
    return DirtyTarget(f"RECORD cannot be read ({error}), so what is installed cannot be told",
                       remedy="install the wheel again with pip")


def _line(path: str, data: bytes | None) -> str:
    out = io.StringIO()
    digest = size = ""
    if data is not None:
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        size = str(len(data))
    csv.writer(out, lineterminator="\n").writerow([path, digest, size])
    return out.getvalue()
