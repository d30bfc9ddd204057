"""Classify every path of a target against the lock, and refuse whatever is neither pristine nor wholly applied.

    pristine   the release's own file            applied   the locked file
    older      what another lock applied here    partial   some patches of the series, not all
    edited     none of these                     missing   the release has it, the target does not
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from . import progress, series, state
from .errors import DirtyTarget, LockMismatch, NeedsWork, PatchsetError, Row
from .lock import LockedTarget
from .paths import inside
from .pins import Release
from .shadow import File, Files, Shadow
from .target import Target
from .transaction import Transaction, sha256_of

EXPECTED = "the release's or the locked file"


@dataclass(frozen=True)
class Plan:
    """verdict: pristine, applied, or refused (then `error` says why). paths: path -> its class."""

    target: Target
    release: Release
    locked: LockedTarget
    state: state.State | None
    verdict: str
    paths: dict[str, str]
    error: PatchsetError | None = None

    def demand(self) -> Plan:
        """Raise the refusal, if there is one."""
        if self.error:
            raise self.error
        return self


def read_files(root: Path, paths: set[str]) -> Files:
    """The target's own bytes for those of `paths` that exist."""
    found = {}
    for path in sorted(paths):
        place = inside(root, path)
        if sha256_of(place) is not None:
            found[path] = File(place.read_bytes(), "100755" if place.stat().st_mode & 0o100 else "100644")
    return found


def classify(target: Target, release: Release, locked: LockedTarget, root: Path) -> Plan:
    """root: the zero-mismatch checkout (for the intermediate states of the series). Reads only."""
    folder = target.root / target.state
    applied = state.load(folder)
    digests = {path: sha256_of(inside(target.root, path)) for path in locked.paths}
    older = {change.path: change.after for change in applied.changes} if applied else {}
    classes = {path: _class(locked, path, digest, older, applied is not None) for path, digest in digests.items()}
    plan = Plan(target, release, locked, applied, "refused", classes)
    if Transaction(target.root, folder).open:
        return _refuse(plan, NeedsWork(f"{target.root} was interrupted half way", remedy="run apply.py recover",
                                       rows=_rows(classes, {"pristine", "applied"})[:8]))
    if applied and applied.lock != locked.digest:
        return _another_lock(plan, applied)
    seen = set(classes.values())
    if seen <= {"applied"}:
        return replace(plan, verdict="applied")
    if seen <= {"pristine"} and not applied:
        return replace(plan, verdict="pristine")
    return _refuse(plan, _mixture(plan, root))


def _class(locked: LockedTarget, path: str, digest: str | None, older: dict, has_state: bool) -> str:
    entry = locked.paths[path]
    if digest == entry.after:
        return "applied"
    if digest == entry.before:
        return "missing" if digest is None and has_state else "pristine"
    if has_state and older.get(path) == digest and digest:
        return "older"
    return "missing" if digest is None else "edited"


def _refuse(plan: Plan, error: PatchsetError) -> Plan:
    return replace(plan, error=error)


def _rows(classes: dict[str, str], kinds: set[str]) -> list[Row]:
    return [Row(path, kind, EXPECTED) for path, kind in classes.items() if kind in kinds]


def edits(target: Target, applied: state.State) -> list[Row]:
    """Paths that are no longer what the state applied there."""
    rows = []
    for change in applied.changes:
        digest = sha256_of(inside(target.root, change.path))
        if digest != change.after and not change.path.endswith(".pyc"):
            rows.append(Row(change.path, "missing" if digest is None else "edited", "what was applied"))
    return rows


def unlocked(plan: Plan) -> list[Row]:
    """Files of an installed package that the lock does not name and that are not what the wheel's RECORD says.

    A source tree is not looked at: building in place writes files of the release (vllm/_version.py), and a checkout has
    git for it.
    """
    target, rows = plan.target, []
    if target.record:
        recorded = state.record_digests((target.root / target.record).read_bytes())
        others = [path for path in recorded
                  if path.startswith(f"{target.upstream.package}/") and path not in plan.locked.paths]
        with progress.bar(f"check {target.upstream.distribution}", len(others), unit="files") as advance:
            for path in others:
                if (digest := sha256_of(inside(target.root, path))) != recorded[path]:
                    rows.append(Row(path, "edited" if digest else "missing", "the wheel's file"))
                advance(1)
    return rows


def _another_lock(plan: Plan, applied: state.State) -> Plan:
    rows = edits(plan.target, applied)
    if rows:
        return _refuse(plan, DirtyTarget(
            f"{plan.target.root} was edited since it was patched (by another lock, {applied.lock[:12]})", rows=rows,
            remedy="apply.py revert --edits-to DIR moves the edits out and puts the originals back; then apply"))
    what = f"without {', '.join(applied.without)}" if applied.without else f"profile {applied.profile}"
    return _refuse(plan, LockMismatch(
        f"{plan.target.root} carries another lock's tree ({applied.lock[:12]}, {what}), "
        f"wanted {plan.locked.digest[:12]}",
        rows=_rows(plan.paths, {"older", "pristine", "missing", "edited"}),
        remedy="run apply.py revert (it restores the originals kept beside the state), then apply"))


def _mixture(plan: Plan, root: Path) -> PatchsetError:
    """The refusal for a target that is neither pristine nor wholly applied, by its own message."""
    where = plan.target.root
    classes = dict(plan.paths)
    if not plan.state and "edited" in classes.values():
        for path in _partial_paths(plan, root):
            classes[path] = "partial"
    missing, edited = _rows(classes, {"missing"}), _rows(classes, {"edited"})
    if plan.state:
        rows = _rows(classes, {"missing", "edited", "pristine"})
        return DirtyTarget(f"{where}: patched files were edited since", rows=rows,
                           remedy="apply.py refresh takes wanted edits into a patch; apply.py revert --edits-to DIR "
                                  "moves them out and puts the originals back")
    if edited:
        return DirtyTarget(f"{where}: files are locally edited", rows=edited + missing,
                           remedy="commit or stash your edits elsewhere; the series applies to the release's own files")
    if missing:
        return DirtyTarget(f"{where}: files of the release are missing", rows=missing,
                           remedy="take a complete copy of the release")
    rows = _rows(classes, {"partial", "applied", "pristine"})
    return DirtyTarget(f"{where} is half applied: some files are patched, some pristine, and no state says by whom",
                       rows=rows, remedy="take a fresh copy of the release, then apply")


def _partial_paths(plan: Plan, root: Path) -> list[str]:
    """Edited paths whose bytes are those after some, not all, patches of the series. Needs the originals' text:
    a path with an intermediate state is recognised by undoing patches from the front of the series."""
    edited = {path for path, kind in plan.paths.items() if kind == "edited"}
    files = read_files(plan.target.root, edited)
    slugs = {slug for slug, _ in plan.locked.patches}
    chain = [p for p in series.load(root, plan.target.upstream.name, plan.release.version) if p.slug in slugs]
    found = []
    for path, file in files.items():
        touching = [patch for patch in chain if path in patch.paths]
        if _reaches(path, file, touching, plan.locked.paths[path].before):
            found.append(path)
    return found


def _reaches(path: str, file: File, touching: list[series.Patch], before: str | None) -> bool:
    """Whether reversing the first k patches that touch `path` gives the release's file, for some k."""
    for count in range(1, len(touching)):
        with Shadow({path: file}) as shadow:
            for patch in reversed(touching[:count]):
                shadow.repository.run(["apply", "--cached", "--reverse", "--whitespace=nowarn", f"--include={path}",
                                       "-"], stdin=patch.text, index=shadow.index, allowed=(0, 1, 128))
            result = shadow.files().get(path)
            if result and result.sha256 == before:
                return True
    return False
