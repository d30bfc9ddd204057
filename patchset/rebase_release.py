"""The two releases a rebase compares: their files, and which files were renamed between them."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import archive
from .rebase_merge import Merger
from .shadow import Files

CODE = (".py", ".pyi", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".cmake", ".toml", ".txt", ".json", ".yaml")

TELLING_LINES = 5  # neither blank nor comment


@dataclass(frozen=True)
class ReleaseTree:
    """`files` holds code and whatever a patch names; `names` every path of the archive."""

    version: str
    files: Files
    names: frozenset[str]

    def data(self, path: str) -> bytes | None:
        file = self.files.get(path)
        return file.data if file else None

    @cached_property
    def python(self) -> dict[str, bytes]:
        return {path: file.data for path, file in self.files.items() if path.endswith(".py")}


def read(version: str, path: Path, named: Iterable[str]) -> ReleaseTree:
    """The release in an sdist; `named` are paths to keep whatever they are."""
    every, keep = archive.read_files(path), set(named)
    files = {name: file for name, file in every.items() if name in keep or name.endswith(CODE)}
    return ReleaseTree(version, files, frozenset(every))


def renamed(git: Merger, old: ReleaseTree, new: ReleaseTree, paths: Iterable[str]) -> dict[str, tuple[str, int]]:
    """For those of `paths` that the new release no longer has: new path and similarity, as git detects renames.

    Only a new file of the same kind in the same top folder counts. A file of a licence line and little more resembles
    many others (vLLM's empty `__init__.py` all do), so it is not looked for.
    """
    gone = {path: old.files[path] for path in paths
            if path in old.files and path not in new.names and _telling(old.files[path].data)}
    kinds = {_kind(path) for path in gone}
    fresh = {path: file for path, file in new.files.items() if path not in old.names and _kind(path) in kinds}
    return {path: found for path, found in git.renames(gone, fresh).items() if _kind(path) == _kind(found[0])}


def _kind(path: str) -> tuple[str, str]:
    return path.split("/", 1)[0], Path(path).suffix


def _telling(data: bytes) -> bool:
    lines = [line.strip() for line in data.split(b"\n")]
    return sum(bool(line) and not line.startswith((b"#", b"//", b"*", b"/*")) for line in lines) >= TELLING_LINES
