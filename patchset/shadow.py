"""Apply a series in memory: a temporary bare repository with a private index. The target is not touched.

Blobs of the touched files go in, `git apply --cached` runs once a patch (git has no fuzz; offsets are reported), blobs
of the result come out. The tree id of the result names the whole outcome.
"""
from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .diff import unquote
from .errors import ConflictError, Row
from .git import GitError, Repository
from .series import Patch

OFFSET = re.compile(r"Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)")
CHECKING = re.compile(r"(?:Checking|Applied) patch (.+?)(?:\.\.\.| cleanly\.)$")


@dataclass(frozen=True)
class File:
    """Bytes and git mode ("100644" or "100755") of one file."""

    data: bytes
    mode: str = "100644"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def as_json(self) -> dict:
        return {"sha256": self.sha256, "mode": self.mode}


Files = dict[str, File]


@dataclass(frozen=True)
class Offset:
    """A hunk that applied, unchanged, `lines` away from where the patch says."""

    path: str
    hunk: int
    line: int
    lines: int


class Shadow:
    """`with Shadow(base) as shadow: shadow.apply(patch)`. `tree` is the git tree id after the patches so far."""

    def __init__(self, base: Files):
        self.base = base

    def __enter__(self) -> Shadow:
        self.folder = Path(tempfile.mkdtemp(prefix="zero-mismatch-"))
        try:
            self.repository = Repository.create(self.folder / "shadow.git")
            self.index = self.folder / "index"
            self.tree = self.add(self.base)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, files: Files) -> str:
        """Put files into the index as they are; the new tree id."""
        return self._write_index(self.index, files)

    def _write_index(self, index: Path, files: Files) -> str:
        entries = b"".join(
            f"{file.mode} {blob}\t".encode() + path.encode("utf-8", "surrogateescape") + b"\0"
            for (path, file), blob in zip(files.items(), self.write_blobs(files), strict=True)
        )
        self.repository.run(["update-index", "--add", "-z", "--index-info"], stdin=entries, index=index)
        return self.repository.out(["write-tree"], index=index)

    def write_blobs(self, files: Files) -> list[str]:
        """Store the bytes of many files with one git process; their blob ids in order."""
        if not files:
            return []
        pool = self.folder / "pool"
        pool.mkdir(exist_ok=True)
        names = []  # from the repository's folder: the one of temporary files may be called anything, line ends and all
        for number, file in enumerate(files.values()):
            (pool / str(number)).write_bytes(file.data)
            names.append(f"../{pool.name}/{number}")
        return self.repository.out(["hash-object", "-w", "--no-filters", "--stdin-paths"],
                                   stdin="\n".join(names).encode()).split()

    def tree_of(self, files: Files) -> str:
        """The tree id of some files alone, in an index of their own."""
        index = self.folder / "other-index"
        index.unlink(missing_ok=True)
        return self._write_index(index, files)

    def apply(self, patch: Patch) -> list[Offset]:
        """Apply one patch to the index. Raises ConflictError if it does not apply or changes nothing."""
        before = self.tree
        try:
            done = self.repository.run(["apply", "--cached", "--verbose", "--whitespace=nowarn", "-p1", "-"],
                                       stdin=patch.text, index=self.index)
        except GitError as error:
            raise self._refused(patch, error.stderr) from None
        self.tree = self.repository.out(["write-tree"], index=self.index)
        if self.tree == before:
            raise absorbed(patch)
        return _offsets(done.stderr.decode("utf-8", "replace"))

    def _refused(self, patch: Patch, stderr: str) -> ConflictError:
        reverse = self.repository.run(["apply", "--cached", "--check", "--reverse", "--whitespace=nowarn", "-p1", "-"],
                                      stdin=patch.text, index=self.index, allowed=(0, 1, 128))
        if reverse.returncode == 0:
            return absorbed(patch)
        wanted = "the lines the patch was written for"
        rows = [Row(path, reason, wanted) for path, reason in map(_split_error, stderr.splitlines()) if path]
        rows = rows or [Row(path, "no such lines", wanted) for path in patch.paths]
        return ConflictError(f"{patch.upstream}/{patch.slug} does not apply", rows=rows,
                             remedy=f"apply.py rebase --upstream {patch.upstream} shows what changed under it")

    def files(self) -> Files:
        """Every file of the index, with its bytes."""
        listing = self.repository.run(["ls-files", "-s", "-z"], index=self.index).stdout.split(b"\0")
        rows = [line.split(b"\t", 1) for line in listing if line]
        metas = [meta.decode().split() for meta, _ in rows]
        blobs = self.repository.read_blobs([meta[1] for meta in metas])
        return {path.decode("utf-8", "surrogateescape"): File(data, meta[0])
                for (_, path), meta, data in zip(rows, metas, blobs, strict=True)}


def absorbed(patch: Patch) -> ConflictError:
    """The error for a patch whose change is already in the base: never skipped."""
    return ConflictError(
        f"{patch.upstream}/{patch.slug} is absorbed: its change is already there, so it changes nothing",
        remedy=f"check that upstream's change is the same, then take {patch.slug} out of {patch.upstream}'s series",
        rows=[Row(path, "already changed", "unchanged by upstream") for path in patch.paths],
    )


def _split_error(line: str) -> tuple[str, str]:
    """Path and reason of one line of git's errors; an empty path for the lines that only repeat it."""
    if match := re.match(r"error: patch failed: (.+):(\d+)$", line):
        return match[1], f"other lines at {match[2]}"
    if match := re.match(r"error: (.+?): (.+)$", line):
        return ("", "") if match[2] == "patch does not apply" else (match[1], match[2])
    return "", ""


def _offsets(said: str) -> list[Offset]:
    """git's verbose output, where hunks follow the name of their file."""
    found, path = [], ""
    for line in said.splitlines():
        if match := CHECKING.match(line):
            path = unquote(match[1].encode())
        elif match := OFFSET.match(line):
            found.append(Offset(path, int(match[1]), int(match[2]), int(match[3])))
    return found
