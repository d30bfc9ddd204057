"""Replay a series on another release, patch by patch, without stopping at the first that fails.

The old release is kept with all patches so far; the new one with those that could be carried over. A file that was
renamed is judged under its old name, which the patch knows, and written under its new one (`targets`).
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from . import rebase_names, sentinel
from . import rebase_verdicts as verdicts
from .rebase_merge import Merger, sections
from .rebase_verdicts import (
    ABSORBED,
    BLOCKED,
    CLEAN,
    CONFLICT,
    DELETED,
    FAILED,
    MERGED,
    MOVED,
    OFFSET,
    PARTLY,
    READY,
    RESOLVED,
    FileResult,
)
from .series import Patch
from .shadow import File, Files, Shadow

NAME_GONE = "name gone"
REBASED_FROM = "Rebased-From"  # trailer of <slug>@<version>.patch: the base release, and the digest of the base patch
WORST_FIRST = (DELETED, CONFLICT, PARTLY, MOVED, MERGED, OFFSET, CLEAN)
SAME_BODY = re.compile(r"^(.+)::\S+ \(same body\)$")


@dataclass
class PatchResult:
    """One patch on the new release. `text` is the verdict on its lines alone, `verdict` the one that counts.

    `before` and `after` hold the same paths, as the new release names them; a file that is absent has no entry.
    """

    patch: Patch
    text: str
    files: list[FileResult]
    findings: list[sentinel.Finding]
    contract_read: str = ""  # why a person found the findings harmless
    names: list[str] = field(default_factory=list)  # what the carried lines use and the release lacks
    blocked_by: list[str] = field(default_factory=list)
    resolved: str = ""  # the file or folder in which a person settled it
    notes: list[str] = field(default_factory=list)
    before: Files = field(default_factory=dict)
    after: Files = field(default_factory=dict)
    sides: dict[str, Files] = field(default_factory=dict)  # base, upstream, patched, merged of one left to a person

    @property
    def verdict(self) -> str:
        if self.names:
            return NAME_GONE
        if self.resolved:
            return RESOLVED
        if self.blocked_by:
            return BLOCKED
        if self.text in (CLEAN, OFFSET, MERGED) and self.findings and not self.contract_read:
            return min((finding.kind for finding in self.findings), key=sentinel.SEVERITY.index)
        return self.text

    @property
    def needs_person(self) -> bool:
        return self.verdict not in READY


OPEN = (*FAILED, PARTLY, MOVED, NAME_GONE, sentinel.GONE)  # left as files, for a person to edit
Release = Callable[[str], File | None]
Settled = Callable[[PatchResult], tuple[str, dict[str, bytes]] | None]


def overall(files: list[FileResult]) -> str:
    """The verdict on a patch's lines from those on its files."""
    found = {file.verdict for file in files}
    if found == {ABSORBED}:
        return ABSORBED
    if not found & set(FAILED) and ABSORBED in found:
        return PARTLY
    return next(word for word in WORST_FIRST if word in found)


class Replay:
    """`shadow` holds the old release's files that the series touches; `releases` give any file of the old and the new
    one; `targets` maps renamed files; `overlay` holds our own modules, which `package` contains in both."""

    def __init__(self, shadow: Shadow, releases: tuple[Release, Release], versions: tuple[str, str],
                 targets: dict[str, str], package: str, overlay: Files):
        self.chain, self.releases, self.versions, self.targets = shadow, releases, versions, targets
        self.package, self.overlay = package, overlay
        self.old = dict(shadow.base)
        self.git = Merger(shadow)
        self.changed: dict[str, File | None] = {}  # files of the new release that a patch carried over has changed
        self.origin: dict[str, list[str]] = {}  # path -> for each line the patch it comes from, '' for the release
        self.failed: set[str] = set()

    def now(self, path: str) -> File | None:
        return self.changed[path] if path in self.changed else self.releases[1](path)

    def step(self, patch: Patch, findings: list[sentinel.Finding], written: Patch | None,
             settled: Settled) -> PatchResult:
        """Judge one patch and carry it over if possible.

        `written` is patches/<upstream>/<slug>@<version>.patch, if a person has already made it; `settled` looks for a
        conflict that a person has resolved in the folder of an earlier run.
        """
        base = {path: self.old[path] for path in patch.paths if path in self.old}
        self.chain.apply(patch)
        every = self.chain.files()
        patched = {path: every[path] for path in patch.paths if path in every}
        result = self._judge(patch, base, patched, findings)
        result.blocked_by = self._blockers(result, base)
        self._carry(result)
        if written:
            self._use(result, written)
        result.names = self._names(result, base, patched)
        if result.verdict in OPEN:
            result.sides = self._sides(result, base, patched)
            if not written and (found := settled(result)):
                result.resolved, after = found
                result.before |= {path: file for path in after if (file := self.now(path))}
                result.after = {path: File(data, self._mode(path)) for path, data in after.items()}
                result.names = self._names(result, base, patched)
        if result.verdict in FAILED:
            self.failed.add(patch.slug)
            result.after = result.before
        self.changed |= {path: result.after.get(path) for path in {*result.before, *result.after}}
        self._advance(patch, patched)
        return result

    def _mode(self, path: str) -> str:
        file = self.now(path)
        return file.mode if file else "100644"

    def _names(self, result: PatchResult, base: Files, patched: Files) -> list[str]:
        """Names that the carried lines lack; not by likeness of words if a person wrote them for this release."""
        if result.verdict in FAILED:
            return []
        found = []
        sources = self._source(self.old.get, self.releases[0]), self._source(result.after.get, self.now)
        twins = {file.target: patched.get(file.path) for file in result.files}
        for path, file in result.after.items():
            before = result.before.get(path)
            if path.endswith(".py") and file != before:
                others = [other.data if other else b"" for other in (before, twins.get(path))]
                found += rebase_names.broken(file.data, *others, path, self.package, *sources)
        for file in [] if result.resolved else result.files:
            upstream = result.before.get(file.target)
            if file.path.endswith(".py") and file.path in base and file.path in patched and upstream:
                groups = self.git.groups(base[file.path], patched[file.path])
                gone = rebase_names.gone_words(patched[file.path].data, groups, base[file.path].data, upstream.data)
                found += [f"{file.target}: the release's file no longer has the word {word}" for word in sorted(gone)]
        return found

    def overlay_imports(self) -> list[str]:
        """Imports of our own modules that the old release satisfied and the new one, as carried, does not."""
        old, new = self._source(self.old.get, self.releases[0]), self._source(self.now)
        return [f"{path}: {name} is not there to import" for path, file in sorted(self.overlay.items())
                if path.endswith(".py")
                for name in rebase_names.lost_imports(rebase_names.imports(file.data, self.package), old, new)]

    def _source(self, *releases: Release) -> rebase_names.Source:
        """The bytes of a path in the overlay or the first release that has it."""
        def read(path: str) -> bytes | None:
            for release in (self.overlay.get, *releases):
                if file := release(path):
                    return file.data
            return None

        return read

    def _judge(self, patch: Patch, base: Files, patched: Files, findings) -> PatchResult:
        files = []
        labels = (f"base {self.versions[0]}", f"upstream-{self.versions[1]}", f"patch-{patch.slug}")
        for path, section in sections(patch.text).items():
            target = self.targets.get(path, path)
            v = verdicts.Versions(path, base.get(path), patched.get(path), self.now(target), section, labels)
            file = verdicts.judge(self.git, v)
            file.target = target
            if target != path and file.carried and file.verdict != ABSORBED:
                file.evidence.insert(0, f"the release has this file as {target}; by its lines: {file.verdict}")
                file.verdict = MOVED
            if not file.carried:
                file = self._follow_symbols(file, section, findings) or file
            files.append(file)
        read = sentinel.read(patch.values(sentinel.READ), self.versions[1], findings)
        return PatchResult(patch, overall(files), files, findings, read or "")

    def _follow_symbols(self, file: FileResult, section: bytes, findings) -> FileResult | None:
        """The patch on the one file to which all the anchors it lost here went unchanged, if it applies there."""
        lost = [f for f in findings if f.kind == sentinel.GONE and f.anchor.startswith(f"{file.path}::")]
        homes = [{match[1] for where in f.where if (match := SAME_BODY.match(where))} for f in lost]
        shared = set.intersection(*homes) if homes else set()
        if len(shared) != 1 or (target := shared.pop()) == file.path:
            return None
        header, mark, hunks = section.partition(b"\n@@ ")
        header = header.replace(b"/" + file.path.encode(), b"/" + target.encode())
        tried = self.git.apply(target, self.now(target), header + mark + hunks)
        if not tried:
            return None
        said = [f"{finding.anchor.partition('::')[2]} went to {target} with the same body, and the hunks apply there"
                for finding in lost]
        return FileResult(file.path, target, MOVED, said, file.hunks, tried[1], tried[0])

    def _blockers(self, result: PatchResult, base: Files) -> list[str]:
        """Failed patches that this one needs: by Depends-On, or because its hunks stand on lines they add."""
        found = [slug for slug in result.patch.depends_on if slug in self.failed]
        for file in result.files:
            origin = self.origin.get(file.path, [])
            if file.verdict == CONFLICT and file.path in base:
                for hunk in file.hunks:
                    found += [slug for slug in origin[hunk.old[0] - 1 : hunk.old[1]] if hunk.upstream]
            elif file.verdict == DELETED and "" not in origin:
                found += origin
        return [slug for slug in dict.fromkeys(found) if slug in self.failed]

    def _carry(self, result: PatchResult) -> None:
        names = [self.targets.get(path, path) for path in result.patch.paths] + [file.target for file in result.files]
        result.before = {path: file for path in names if (file := self.now(path))}
        result.after = dict(result.before)
        for file in result.files:
            if file.carried:
                _put(result.after, file.target, file.after)

    def _use(self, result: PatchResult, written: Patch) -> None:
        """Take the patch that a person wrote for this release in place of the one carried over."""
        state = f"{self.versions[0]} {state_of(result.patch)}"
        if written.values(REBASED_FROM) not in ([], [state]):
            result.notes.append(f"{result.patch.path.name} has changed since {written.path.name} was made from it: "
                                f"make the same change there, then write {REBASED_FROM}: {state}")
            result.text = CONFLICT
            return
        before = result.before | {path: file for path in written.paths if (file := self.now(path))}
        made = dict(before)
        for path, section in sections(written.text).items():
            tried = self.git.apply(path, before.get(path), section)
            if tried is None:
                result.notes.append(f"{written.path.name} does not apply to {path}: write it again")
                result.text = CONFLICT
                return
            _put(made, path, tried[0])
        if made == result.after and result.verdict in (CLEAN, OFFSET):
            result.notes.append(f"{written.path.name} is not needed: {result.patch.path.name} gives the same files")
        result.resolved, result.before, result.after = written.path.name, before, made

    def _sides(self, result: PatchResult, base: Files, patched: Files) -> dict[str, Files]:
        merged = {}
        for file in result.files:
            if file.merged is not None:
                merged[file.target] = File(file.merged, (patched.get(file.path) or base[file.path]).mode)
            elif file.carried and file.after:
                merged[file.target] = file.after
        return {"base": base, "patched": patched, "upstream": result.before, "merged": merged}

    def _advance(self, patch: Patch, patched: Files) -> None:
        """Move the old release on, and with it the origin of every line."""
        for path in patch.paths:
            before, after = self.old.get(path), patched.get(path)
            if before and after:
                lines = self.origin.setdefault(path, [""] * len(before.data.split(b"\n")))
                for group in reversed(self.git.groups(before, after)):
                    lines[group.old - 1 : group.old_end - 1] = [patch.slug] * len(group.added)
            else:
                self.origin[path] = [patch.slug] * len(after.data.split(b"\n")) if after else []
            _put(self.old, path, after)


def without_blobs(text: bytes) -> bytes:
    """A diff less the ids of blobs, which differ between any two releases."""
    return re.sub(rb"^index [0-9a-f]+\.\.[0-9a-f]+", b"index", text, flags=re.MULTILINE)


def state_of(patch: Patch) -> str:
    """A short digest of what a patch changes."""
    return hashlib.sha256(without_blobs(patch.text)).hexdigest()[:12]


def _put(files: Files, path: str, file: File | None) -> None:
    if file is None:
        files.pop(path, None)
    else:
        files[path] = file
