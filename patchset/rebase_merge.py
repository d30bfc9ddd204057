"""What git says about one file of three versions: a 3-way merge, a trial apply, exact hunks, renames.

Everything happens in a shadow repository; nothing here decides what the answers mean (see rebase_verdicts).
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from . import diff
from .export import diff_trees
from .git import MERGING, GitError, demand
from .shadow import OFFSET, File, Files, Offset, Shadow

SIMILAR = 60  # per cent from which a vanished and a new file are taken for one that was renamed
BASE_MARKER = re.compile(rb"^\|{7} [0-9a-f]{7,40}$", re.MULTILINE)
NAME = "file"  # of the one file in a tree that is merged or compared


@dataclass(frozen=True)
class Merge:
    """The merged bytes; with `conflict`, they hold diff3 markers."""

    data: bytes
    conflict: bool


@dataclass(frozen=True)
class Group:
    """Adjacent changed lines between two versions of a file: `removed` from line `old` on became `added` at `new`.

    Lines are 1-based; for a pure insertion `old` is the line before which it stands, for a pure removal so is `new`.
    """

    old: int
    new: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]

    @property
    def old_end(self) -> int:
        """The first line after the group in the old version."""
        return self.old + len(self.removed)


class Merger:
    """Questions to git, with the objects kept in one shadow repository."""

    def __init__(self, shadow: Shadow):
        demand(MERGING, "a 3-way merge (rebase, refresh)")
        self.shadow = shadow
        self.git = shadow.repository
        self._trees: dict[File, str] = {}
        self._hunks: dict[tuple[File, File], list[diff.Hunk]] = {}

    def merge(self, base: File, ours: File, theirs: File, names: tuple[str, str, str]) -> Merge:
        """Merge as a rebase does. git 2.39 takes no merge base, so both sides become children of a made-up commit.

        `names` label base, ours and theirs in the conflict markers.
        """
        root = self._commit(base, None)
        refs = []
        for name, file in zip(names[1:], (ours, theirs), strict=True):
            refs.append(re.sub(r"[^\w.@-]", "-", name))
            self.git.run(["update-ref", f"refs/heads/{refs[-1]}", self._commit(file, root)])
        done = self.git.run(["merge-tree", "--write-tree", "--no-messages", *refs], allowed=(0, 1))
        tree = done.stdout.split(b"\n", 1)[0].decode()
        data = self.git.run(["cat-file", "blob", f"{tree}:{NAME}"]).stdout
        if done.returncode:
            data = BASE_MARKER.sub(b"||||||| " + names[0].encode(), data)
        return Merge(data, bool(done.returncode))

    def _commit(self, file: File, parent: str | None) -> str:
        return self.git.out(["commit-tree", "-m", "synthetic", *(["-p", parent] if parent else []), self._tree(file)])

    def _tree(self, file: File) -> str:
        """The tree that holds this file alone, by the name NAME."""
        if file not in self._trees:
            self._trees[file] = self.shadow.tree_of({NAME: file})
        return self._trees[file]

    def apply(self, path: str, file: File | None, text: bytes) -> tuple[File | None, list[Offset]] | None:
        """Apply one file's section of a patch with zero fuzz; None if it does not apply. The result may be no file."""
        self.shadow.tree_of({path: file} if file else {})
        index = self.shadow.folder / "other-index"
        args = ["apply", "--cached", "--verbose", "--whitespace=nowarn", "-p1", "-"]
        try:
            done = self.git.run(args, stdin=text, index=index)
        except GitError:
            return None
        said = OFFSET.finditer(done.stderr.decode("utf-8", "replace"))
        return self._read(path, index), [Offset(path, int(m[1]), int(m[2]), int(m[3])) for m in said]

    def _read(self, path: str, index) -> File | None:
        entry = self.git.run(["ls-files", "-s", "-z"], index=index).stdout.split(b"\t")[0].split()
        return File(self.git.read_blobs([entry[1].decode()])[0], entry[0].decode()) if entry else None

    def text(self, before: Files, after: Files) -> bytes:
        """The canonical diff of two sets of files."""
        old = self.shadow.tree_of(before)
        return diff_trees(self.shadow, old, self.shadow.tree_of(after))

    def hunks(self, before: File, after: File) -> list[diff.Hunk]:
        """Exact hunks, with context."""
        key = before, after
        if key not in self._hunks:
            text = diff_trees(self.shadow, self._tree(before), self._tree(after))
            files = diff.parse(text, "the diff of two releases")
            self._hunks[key] = files[0].hunks if files else []
        return self._hunks[key]

    def groups(self, before: File, after: File) -> list[Group]:
        return [group for hunk in self.hunks(before, after) for group in groups_of(hunk)]

    def patch_id(self, text: bytes) -> str:
        """git's hash of a change, free of line numbers and blank space; empty for an empty change."""
        return self.git.out(["patch-id", "--stable"], stdin=text).partition(" ")[0]

    def renames(self, gone: Files, fresh: Files) -> dict[str, tuple[str, int]]:
        """Vanished path -> (new path, similarity in per cent), each new path at most once."""
        if not gone or not fresh:
            return {}
        old = self.shadow.tree_of(gone)
        new = self.shadow.tree_of(fresh)
        listing = self.git.run(["diff-tree", "-r", "-z", f"-M{SIMILAR}%", "-l0", "--diff-filter=R", old, new]).stdout
        words = [word.decode("utf-8", "surrogateescape") for word in listing.split(b"\0") if word]
        return {words[i + 1]: (words[i + 2], int(words[i].split()[-1][1:])) for i in range(0, len(words), 3)}


def groups_of(hunk: diff.Hunk) -> list[Group]:
    """The changed runs of a hunk, without its context."""
    found, old, new = [], hunk.old_start, hunk.new_start
    old, new = old + (not hunk.old_count), new + (not hunk.new_count)
    removed: list[bytes] = []
    added: list[bytes] = []

    def close():
        if removed or added:
            found.append(Group(old - len(removed), new - len(added), tuple(removed), tuple(added)))
            removed.clear()
            added.clear()

    for line in hunk.lines:
        kind, text = line[:1], line[1:]
        if kind == b"-":
            removed.append(text)
            old += 1
        elif kind == b"+":
            added.append(text)
            new += 1
        elif kind == b" ":
            close()
            old, new = old + 1, new + 1
    close()
    return found


def apply_groups(data: bytes, groups: list[Group]) -> bytes:
    """`data` with these groups of changes made."""
    lines = data.split(b"\n")
    for group in sorted(groups, key=lambda g: g.old, reverse=True):
        lines[group.old - 1 : group.old - 1 + len(group.removed)] = group.added
    return b"\n".join(lines)


def sections(text: bytes) -> dict[str, bytes]:
    """The part of a diff that belongs to each path. No line of a hunk can start with 'diff --git'."""
    parts = re.split(rb"^(?=diff --git )", text, flags=re.MULTILINE)
    return {diff.parse(part, "a patch")[0].path: part for part in parts if part}
