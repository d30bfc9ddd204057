"""Apply, verify, status, revert and recover one target. Every write goes through a Transaction."""
from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from . import lock as locks
from . import plan as plans
from . import state
from .errors import DirtyTarget, LockMismatch, NeedsWork, PatchsetError, Row
from .lock import BaseFiles, Built, Lock, LockedTarget
from .paths import inside
from .pins import Pins, Profile, Release
from .plan import Plan
from .shadow import Offset
from .target import Target
from .transaction import JOURNAL, PENDING, Change, Transaction, discard, make_folder, sha256_of, write_synced


@dataclass(frozen=True)
class Request:
    """What the user asked for: the checkout, its pins, and the choice of release, profile and patches."""

    root: Path
    pins: Pins
    profile: Profile
    version: str | None = None
    without: tuple[str, ...] = ()
    edits_to: Path | None = None

    @cached_property
    def lock(self) -> Lock:
        """patchset.lock, read and checked once for all targets."""
        return Lock.load(self.root)

    def locked(self, target: Target, release: Release) -> LockedTarget:
        return self.lock.target(target.upstream.name, release.version, self.profile.name)


@dataclass(frozen=True)
class Outcome:
    """What became of one target: `done` is applied, unchanged, reverted, finished, undone or a status."""

    target: Target
    done: str
    plan: Plan | None = None
    offsets: dict[str, list[Offset]] | None = None
    error: PatchsetError | None = None


def prepare(request: Request, target: Target) -> tuple[Plan, Built | None]:
    """Classify the target and, where it is pristine, work out the delivery and hold it against the lock."""
    release = target.release(request.version)
    if request.without:
        return _prepare_unlocked(request, target)
    locked = request.locked(target, release)
    plan = plans.classify(target, release, locked, request.root)
    if plan.verdict != "pristine":
        return plan, None
    built = _built_there(request, target)
    if built.locked.digest != locked.digest:
        raise locks.explain(locked, built.locked)
    return plan, built


def build(request: Request, target: Target, base: BaseFiles) -> Built:
    """The delivery that was asked for, worked out in memory on the base files."""
    release = target.release(request.version)
    return locks.build_target(request.root, target.upstream, release, request.profile, base, request.without)


def _built_there(request: Request, target: Target) -> Built:
    return build(request, target, lambda _u, _r, paths: plans.read_files(target.root, paths))


def _prepare_unlocked(request: Request, target: Target) -> tuple[Plan, Built | None]:
    """A series with patches left out, for counter-proofs. The target must first be pristine by the full lock."""
    release = target.release(request.version)
    plan = plans.classify(target, release, request.locked(target, release), request.root)
    if plan.state and plan.state.without == request.without:
        rows = plans.edits(target, plan.state)
        error = DirtyTarget(f"{target.root}: patched files were edited since", rows=rows) if rows else None
        return replace(plan, verdict="refused" if rows else "applied", error=error), None
    plan.demand()
    if plan.verdict != "pristine":
        raise LockMismatch(f"{target.root} carries the full series", remedy="run apply.py revert first")
    return plan, _built_there(request, target)


def apply(request: Request, target: Target) -> Outcome:
    """Deliver the locked tree, or find that it is there already. The target is untouched on any error."""
    with target.locked(write=True):
        _drop_leftovers(target)
        plan, built = prepare(request, target)
        plan.demand()
        if built is None:
            return Outcome(target, "unchanged", plan)
        _deliver(request, target, built)
        return Outcome(target, "applied", plan, built.offsets)


def _deliver(request: Request, target: Target, built: Built) -> None:
    folder = inside(target.root, target.state)
    try:
        changes, folders = _stage(request, target, built, folder)
        Transaction(target.root, folder).run("apply", changes, folders)
    except BaseException as error:
        _drop_leftovers(target)
        if not isinstance(error, OSError):
            raise
        raise NeedsWork(f"cannot write to {target.root}: {error.strerror or error}; it is as it was",
                        remedy="mend the cause (free space, permissions, read-only mount), then apply again") from error
    _drop_caches(target, [change.path for change in changes])


def _stage(request: Request, target: Target, built: Built, folder: Path) -> tuple[list[Change], list[str]]:
    """Fill state/applied with every new file. Returns the changes and the folders that will be created."""
    store = folder / "applied"
    make_folder(folder)
    make_folder(store)
    if target.kind == "tree":
        write_synced(folder / ".gitignore", b"*\n")
    locked = built.locked
    changes = [Change(n, path, entry.before, entry.after) for n, (path, entry) in enumerate(locked.paths.items())]
    for path in _caches(target, locked.paths):
        changes.append(Change(len(changes), path, sha256_of(target.root / path), None))
    for change in changes:
        if change.after:
            write_synced(store / str(change.n), built.after[change.path].data, _mode(target.root / change.path))
    if target.record:
        changes.append(_stage_record(target, built, changes, store))
    folders = _new_folders(target.root, [change.path for change in changes])
    text = state.State(target.upstream.name, locked.version, request.profile.name, request.without, locked.digest,
                       locked.tree, tuple(changes), tuple(folders)).dumps()
    n = len(changes)
    write_synced(store / str(n), text)
    changes.append(Change(n, f"{target.state}/{state.NAME}", None, sha256_of(store / str(n))))
    return changes, folders


def _mode(original: Path) -> int:
    return original.stat().st_mode & 0o7777 if original.exists() else 0o644


def _stage_record(target: Target, built: Built, changes: list[Change], store: Path) -> Change:
    n = len(changes)
    place = target.root / target.record
    ours = [f"{target.state}/{state.NAME}", f"{target.state}/pristine/{n}"]
    ours += [f"{target.state}/pristine/{change.n}" for change in changes if change.before]
    files = {change.path: built.after[change.path].data for change in changes if change.after}
    write_synced(store / str(n), state.record_after(place.read_bytes(), files, sorted(ours)), _mode(place))
    return Change(n, target.record, sha256_of(place), sha256_of(store / str(n)))


def _new_folders(root: Path, paths: list[str]) -> list[str]:
    """Folders that do not exist yet above the paths, outermost first."""
    wanted: set[str] = set()
    for path in paths:
        parent = Path(path).parent
        while str(parent) != "." and not inside(root, parent.as_posix()).exists():
            wanted.add(parent.as_posix())
            parent = parent.parent
    return sorted(wanted, key=lambda folder: folder.count("/"))


def _caches(target: Target, paths) -> list[str]:
    """Compiled files of those modules. A stale one is used if size and second of the source happen to agree."""
    found = []
    for path in paths:
        if path.endswith(".py"):
            folder = Path(path).parent / "__pycache__"
            stem = Path(path).stem
            if (target.root / folder).is_dir():
                found += sorted((folder / entry.name).as_posix() for entry in (target.root / folder).iterdir()
                                if entry.name.startswith(stem + ".") and entry.name.endswith(".pyc"))
    return found


def _drop_caches(target: Target, paths) -> None:
    for path in _caches(target, paths):
        (target.root / path).unlink(missing_ok=True)
    wanted = {Path(path).parent for path in paths}  # among them the folders of compiled files to be put back
    for folder in {Path(path).parent / "__pycache__" for path in paths} - wanted:
        try:
            os.rmdir(target.root / folder)
        except OSError:
            pass  # absent, or other modules' caches are inside


def _drop_leftovers(target: Target) -> None:
    """What a kill before the journal left: stores without a journal. The target itself was not touched then."""
    folder = inside(target.root, target.state)
    if folder.exists() and not (folder / JOURNAL).exists():
        if not (folder / state.NAME).exists():
            discard(folder)
            return
        if (folder / PENDING).exists():
            (folder / PENDING).unlink()
        if (folder / "applied").exists():
            discard(folder / "applied")


def revert(request: Request, target: Target) -> Outcome:
    """Put every original back from the state's own store; needs no lock and no network."""
    with target.locked(write=True):
        _drop_leftovers(target)
        folder = inside(target.root, target.state)
        transaction = Transaction(target.root, folder)
        if transaction.open:
            raise NeedsWork(f"{target.root} was interrupted half way", remedy="run apply.py recover first")
        applied = state.load(folder)
        if applied is None:
            return _nothing_to_revert(request, target)
        rows = plans.edits(target, applied)
        if rows and not request.edits_to:
            raise DirtyTarget(f"{target.root}: patched files were edited since; reverting would lose the edits",
                              rows=rows, remedy="take wanted edits into a patch with apply.py refresh, or move them "
                                                "out of the way with apply.py revert --edits-to DIR")
        _save(target, rows, request.edits_to)
        _drop_caches(target, [change.path for change in applied.changes])
        try:
            transaction.run("revert", _changes_back(target, applied), list(applied.folders))
        except BaseException as error:
            _drop_leftovers(target)
            if not isinstance(error, OSError):
                raise
            raise NeedsWork(f"cannot write to {target.root}: {error.strerror or error}; it is still patched",
                            remedy="mend the cause (free space, permissions, read-only mount), then revert again"
                            ) from error
        return Outcome(target, "reverted")


def _save(target: Target, rows: list[Row], folder: Path | None) -> None:
    """Copy edited files to `folder` under their own paths, before revert replaces them."""
    for row in rows:
        source = target.root / row.path
        if source.exists():
            copy = folder / row.path
            if copy.exists():
                raise DirtyTarget(f"{copy} exists already", remedy="name an empty folder for --edits-to", rows=[row])
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())


def _changes_back(target: Target, applied: state.State) -> list[Change]:
    """The applied changes as the target has them now (edits included), and the state file last."""
    own = f"{target.state}/{state.NAME}"
    changes = [replace(change, after=sha256_of(inside(target.root, change.path))) for change in applied.changes]
    return [*changes, Change(len(changes), own, None, sha256_of(target.root / own))]


def _nothing_to_revert(request: Request, target: Target) -> Outcome:
    plan, _ = prepare(request, target)
    if plan.verdict == "applied" and plan.paths:
        raise NeedsWork(f"{target.root} is patched, but holds no originals (it was built from a patched tree)",
                        remedy="install or unpack the release again")
    plan.demand()
    return Outcome(target, "unchanged", plan)


def recover(target: Target) -> Outcome:
    """Settle an interrupted apply or revert."""
    with target.locked(write=True):
        folder = inside(target.root, target.state)
        transaction = Transaction(target.root, folder)
        if not transaction.open:
            _drop_leftovers(target)
            return Outcome(target, "unchanged")
        end = transaction.recover()
        return Outcome(target, "recovered to applied" if end == "apply" else "recovered to pristine")


def status(request: Request, target: Target) -> Outcome:
    """Where the target stands; the profile is the one it was applied with, if any."""
    with target.locked(write=False):
        applied = state.load(target.root / target.state)
        if applied and applied.profile in request.pins.profiles:
            request = replace(request, profile=request.pins.profile(applied.profile))
        release = target.release(request.version)
        plan = plans.classify(target, release, request.locked(target, release), request.root)
        return Outcome(target, plan.verdict, plan, error=plan.error)


def verify(request: Request, target: Target) -> Outcome:
    """Like status, but anything other than exactly the locked tree is an error; in an installed wheel, another file of
    the package that was changed is one too."""
    outcome = status(request, target)
    if outcome.error:
        raise outcome.error
    if outcome.done == "pristine":
        raise NeedsWork(f"{target.root} is pristine: the series is not applied", remedy="run apply.py apply")
    if rows := plans.unlocked(outcome.plan):
        raise DirtyTarget(f"{target.root}: unlocked change: files that no patch touches are not the wheel's", rows=rows,
                          remedy="run apply.py revert, install the wheel again with pip, then apply.py apply")
    return outcome
