"""Replace many files of one target as a whole, so that a kill at any point leaves something `recover` can settle.

    state/pristine/<n>   the original of change n (a hard link to it: the same inode, so bytes, mode and times return)
    state/applied/<n>    the new content of change n, fully written and synced
    state/journal.json   the changes and their direction; while it exists the target is in between

Order: write and sync both stores, then the journal, then one rename a file, then drop the journal. Before the journal
the target is untouched; after it, every file that is still needed exists on the same file system, so going on or going
back is renames only and needs no free space. A rename never writes into an inode, so a cache that hard-links the file
is not written through.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from . import jsonfile
from .errors import DirtyTarget, NeedsWork, Row
from .paths import inside, why_unsafe

JOURNAL = "journal.json"
PENDING = JOURNAL + ".new"
STORES = {"apply": ("pristine", "applied"), "revert": ("applied", "pristine")}


@dataclass(frozen=True)
class Change:
    """One path: its sha256 before and after (None: no file). `n` names it in the stores."""

    n: int
    path: str
    before: str | None
    after: str | None

    def ends(self, direction: str) -> tuple[str | None, str | None]:
        """What is there at the start and at the end of that direction."""
        return (self.before, self.after) if direction == "apply" else (self.after, self.before)


def read_changes(rows) -> tuple[Change, ...]:
    """Changes from a file. Raises ValueError, KeyError or TypeError if they are none, or lead out of the target."""
    changes = tuple(Change(row["n"], row["path"], row["before"], row["after"]) for row in rows)
    for change in changes:
        if type(change.n) is not int or (reason := why_unsafe(change.path)):
            raise ValueError(f"{change.path!r}: {reason if type(change.n) is int else 'no number'}")
    return changes


def sha256_of(path: Path) -> str | None:
    """The digest of a regular file; None if there is nothing. Raises DirtyTarget for a folder or a special file."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise DirtyTarget("a folder stands where a file is expected", remedy="move it away, then run the command again",
                          rows=[Row(str(path), "folder", "file")]) from None


def write_synced(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Create `path` with exactly these bytes and this mode, on the disk before return."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fchmod(stream.fileno(), mode)
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """A folder as open as the one it stands in, where there is none: the umask of whoever patches a shared
    installation must not shut out those who import from it."""
    if path.exists():
        return
    path.mkdir()
    wanted = path.parent.stat().st_mode & 0o2777
    if path.stat().st_mode & 0o2777 != wanted:
        path.chmod(wanted)


def keep(source: Path, copy: Path) -> None:
    """Hold on to a file: a hard link, or a synced copy where the file system has none."""
    copy.unlink(missing_ok=True)
    try:
        os.link(source, copy)
    except OSError:
        write_synced(copy, source.read_bytes(), source.stat().st_mode & 0o7777)
        shutil.copystat(source, copy)


class Transaction:
    """root: the target. state: its state folder. Directions: "apply" (pristine -> applied) and "revert"."""

    def __init__(self, root: Path, state: Path):
        self.root, self.state = root, state
        self.journal = state / JOURNAL
        self._closing = ""

    @property
    def open(self) -> bool:
        return self.journal.exists()

    def run(self, direction: str, changes: list[Change], folders: list[str]) -> None:
        """Carry out the changes; the store they end in is filled already. On an error or Ctrl-C all is put back, or, if
        every change was made and only clearing up was left, brought to its end.

        folders: those that apply creates, outermost first; revert removes them when they are empty.
        """
        self._keep_starts(direction, changes)
        text = json.dumps({"direction": direction, "changes": [asdict(c) for c in changes], "folders": folders})
        pending = self.state / PENDING
        write_synced(pending, text.encode())
        for store in STORES[direction]:
            sync_folder(self.state / store)
        try:
            os.replace(pending, self.journal)
            sync_folder(self.state)
            self._go(direction, changes, folders)
        except BaseException as error:
            finished = self._closing == direction
            self._settle(direction if finished else _other(direction), changes, folders, error)
            if not (finished and isinstance(error, OSError)):
                raise

    def _keep_starts(self, direction: str, changes: list[Change]) -> None:
        """Hold on to what the target has now, so that each store can bring back its end."""
        store = self.state / STORES[direction][0]
        make_folder(store)
        for change in changes:
            if change.ends(direction)[0]:
                keep(inside(self.root, change.path), store / str(change.n))

    def _settle(self, direction: str, changes: list[Change], folders: list[str], error: BaseException) -> None:
        try:
            self._go(direction, changes, folders)
        except OSError as second:
            raise NeedsWork(f"stopped half way ({error!r}) and could not settle it ({second})",
                            remedy="mend the cause (space, permissions), then run apply.py recover") from error

    def recover(self) -> str:
        """Settle an open journal: finish if everything needed is there, else undo. Returns "apply" or "revert"."""
        direction, changes, folders = self._read_journal()
        self._refuse_strangers(changes)
        for end in (direction, _other(direction)):
            if self._possible(end, changes):
                self._go(end, changes, folders)
                return end
        raise NeedsWork(f"{self.state} lacks files of its own stores, so neither end can be reached",
                        remedy="take a fresh copy of the upstream release and apply again")

    def _read_journal(self) -> tuple[str, list[Change], list[str]]:
        try:
            record = jsonfile.read(self.journal)
            direction, changes = record["direction"], list(read_changes(record["changes"]))
            folders = [folder for folder in record["folders"] if not why_unsafe(folder)]
            STORES[direction]
        except jsonfile.WRONG as error:
            raise NeedsWork(f"{self.journal} is damaged ({error!r}), so what was under way cannot be told",
                            remedy="take a fresh copy of the release, then apply") from None
        return direction, changes, folders

    def _refuse_strangers(self, changes: list[Change]) -> None:
        rows = []
        for change in changes:
            if change.path.endswith(".pyc"):
                continue  # a cache: Python may have written it again
            found = sha256_of(inside(self.root, change.path))
            if found not in (change.before, change.after):
                rows.append(Row(change.path, (found or "missing")[:12], "the original or the patched file"))
        if rows:
            raise DirtyTarget("files were edited after the interruption", rows=rows,
                              remedy="move your edits out of the target, then run apply.py recover again")

    def _possible(self, direction: str, changes: list[Change]) -> bool:
        store = self.state / STORES[direction][1]
        for change in changes:
            end = change.ends(direction)[1]
            if end and sha256_of(self.root / change.path) != end and sha256_of(store / str(change.n)) != end:
                return False
        return True

    def _go(self, direction: str, changes: list[Change], folders: list[str]) -> None:
        """Bring every change to the end of `direction`, by renames; then drop what is no longer needed."""
        start, store = (self.state / name for name in STORES[direction])
        if direction == "apply":
            for folder in folders:
                make_folder(inside(self.root, folder))
        for change in changes:
            path, end = inside(self.root, change.path), change.ends(direction)[1]
            if sha256_of(path) == end:
                continue
            if path.exists() and not (start / str(change.n)).exists():
                keep(path, start / str(change.n))  # consumed on the way here; needed for the next revert
            if end is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)  # someone may have removed an empty __pycache__
                os.replace(store / str(change.n), path)
        for folder in {str((self.root / change.path).parent) for change in changes}:
            if os.path.isdir(folder):
                sync_folder(Path(folder))
        if direction == "revert":
            self.remove_folders(folders)
        self._close(direction)

    def remove_folders(self, folders: list[str]) -> None:
        """Remove the folders that apply made, innermost first, where nothing of the user's is inside."""
        for folder in reversed(folders):
            path = self.root / folder
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _close(self, direction: str) -> None:
        self._closing = direction  # from here on the stores go, so there is only one way
        if direction == "revert":
            discard(self.state, last=JOURNAL)
            return
        shutil.rmtree(self.state / "applied", ignore_errors=True)
        self.journal.unlink(missing_ok=True)  # not synced: should it come back, every change is at its end already


def discard(state: Path, last: str = "") -> None:
    """Remove a state folder; the file named `last` goes after everything else, so a kill in between can be settled."""
    if not state.exists():
        return
    for path in state.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != last:
            path.unlink()
    if last:
        (state / last).unlink(missing_ok=True)
    state.rmdir()


def _other(direction: str) -> str:
    return "revert" if direction == "apply" else "apply"
