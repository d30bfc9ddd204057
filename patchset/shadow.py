"""Apply a series in memory: a temporary bare repository with a private index. The target is not touched.

Blobs of the touched files go in, `git apply --cached` runs (git has no fuzz; offsets are reported), blobs of the result
come out. The tree id of the result names the whole outcome.
"""
from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from .diff import unquote
from .errors import ConflictError, Row
from .git import GitError, Repository
from .series import Patch

OFFSET = re.compile(r"Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)")
CHECKING = re.compile(r"Checking patch (.+)\.\.\.$")


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
    """`with Shadow(base) as shadow: shadow.apply(patch)`. Its index holds the files after the patches so far."""

    def __init__(self, base: Files):
        self.base = base

    def __enter__(self) -> Shadow:
        self.folder = Path(tempfile.mkdtemp(prefix="zero-mismatch-"))
        try:
            self.repository = Repository.create(self.folder / "shadow.git")
            self.index = self.folder / "index"
            self._write_index(self.index, self.base)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def tree(self) -> str:
        """The git tree id of the index."""
        return self.repository.out(["write-tree"], index=self.index)

    def _write_index(self, index: Path, files: Files) -> None:
        entries = b"".join(
            f"{file.mode} {blob}\t".encode() + path.encode("utf-8", "surrogateescape") + b"\0"
            for (path, file), blob in zip(files.items(), self.write_blobs(files), strict=True)
        )
        self.repository.run(["update-index", "--add", "-z", "--index-info"], stdin=entries, index=index)

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
        self._write_index(index, files)
        return self.repository.out(["write-tree"], index=index)

    def apply_all(self, patches: list[Patch]) -> dict[str, list[Offset]]:
        """Apply patches in order; what apply returns for each. Raises ConflictError for the first that is refused.

        One git process takes a whole run of plain patches. It takes all or none, and if none, one a patch says why.
        """
        found: dict[str, list[Offset]] = {}
        for plain, group in groupby(patches, _plain):
            run = list(group)
            if plain and (done := self._git_apply(b"".join(p.text for p in run), allowed=(0, 1, 128))).returncode == 0:
                said = iter(_offsets(done.stderr))
                found |= {patch.slug: [moved for _ in patch.files for moved in next(said)] for patch in run}
            else:
                found |= {patch.slug: self.apply(patch) for patch in run}
        return found

    def apply(self, patch: Patch) -> list[Offset]:
        """Apply one patch to the index. Raises ConflictError if it does not apply or changes nothing."""
        before = None if _plain(patch) else self.tree
        try:
            done = self._git_apply(patch.text)
        except GitError as error:
            raise self._refused(patch, error.stderr) from None
        if before and self.tree == before:
            raise absorbed(patch)
        return [offset for file in _offsets(done.stderr) for offset in file]

    def _git_apply(self, text: bytes, **options) -> subprocess.CompletedProcess[bytes]:
        return self.repository.run(["apply", "--cached", "--verbose", "--whitespace=nowarn", "-p1", "-"],
                                   stdin=text, index=self.index, **options)

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


def _plain(patch: Patch) -> bool:
    """It changes lines of files that are there before and after, so git's answer to several such patches at once is
    that to one after another; and some file gains or loses lines, so no target is the same after it."""
    return (all(file.hunks and not (file.created or file.deleted) for file in patch.files)
            and any(file.added != file.removed for file in patch.files) and patch.text.endswith(b"\n"))


def _offsets(said: bytes) -> list[list[Offset]]:
    """The moved hunks of each file, from git's verbose output, where hunks follow the name of their file."""
    found, path = [], ""
    for line in said.decode("utf-8", "replace").splitlines():
        if match := CHECKING.match(line):
            path = unquote(match[1].encode())
            found.append([])
        elif match := OFFSET.match(line):
            found[-1].append(Offset(path, int(match[1]), int(match[2]), int(match[3])))
    return found
