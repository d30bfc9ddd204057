"""The two releases a rebase compares: their files, and which files were renamed between them."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import archive
from .rebase_merge import Merger
from .shadow import File, Files

CODE = (".py", ".pyi", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".cmake", ".toml", ".txt", ".json", ".yaml")


@dataclass(frozen=True)
class ReleaseTree:
    """`files` holds code and whatever a patch names; `names` every path of the archive."""

    version: str
    files: Files
    names: frozenset[str]

    def data(self, path: str) -> bytes | None:
        file = self.files.get(path)
        return file.data if file else None

    @property
    def python(self) -> dict[str, bytes]:
        return {path: file.data for path, file in self.files.items() if path.endswith(".py")}


def read(version: str, path: Path, named: Iterable[str]) -> ReleaseTree:
    """The release in an sdist; `named` are paths to keep whatever they are."""
    every, keep = archive.read_files(path), set(named)
    files = {name: file for name, file in every.items() if name in keep or name.endswith(CODE)}
    return ReleaseTree(version, files, frozenset(every))


def renamed(git: Merger, old: ReleaseTree, new: ReleaseTree, paths: Iterable[str]) -> dict[str, tuple[str, int]]:
    """For those of `paths` that the new release no longer has: new path and similarity, as git detects renames."""
    gone = {path: old.files[path] for path in paths if path in old.files and path not in new.names}
    endings = {Path(path).suffix for path in gone}
    fresh: dict[str, File] = {path: file for path, file in new.files.items()
                              if path not in old.names and Path(path).suffix in endings}
    return git.renames(gone, fresh)
