"""patchset.lock: what every selected series turns every pinned release into, path by path.

An entry is named by upstream, release and profile. It holds the digest of each patch, and for each touched path the
sha256 before and after (None: no such file). `tree` is the git tree id of the paths after; `digest` names the whole
entry and is what states, evidence and manifests are bound to. The same function makes the lock and checks a delivery
against it, so the two cannot drift apart.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import jsonfile, progress, series
from .errors import ConflictError, LockMismatch, Row
from .pins import Pins, Profile, Release, Upstream
from .shadow import File, Files, Offset, Shadow

NAME = "patchset.lock"
SCHEMA = 1
OVERLAY = "overlay"

BaseFiles = Callable[[Upstream, Release, set[str]], Files]


@dataclass(frozen=True)
class Entry:
    """sha256 of a path before and after; `by` lists the slugs that touch it, or [OVERLAY]."""

    before: str | None
    after: str | None
    by: tuple[str, ...]


@dataclass(frozen=True)
class LockedTarget:
    upstream: str
    version: str
    profile: str
    patches: tuple[tuple[str, str], ...]
    paths: dict[str, Entry]
    tree: str

    @property
    def name(self) -> str:
        return f"{self.upstream}@{self.version}/{self.profile}"

    def as_json(self) -> dict:
        return {
            "patches": [list(pair) for pair in self.patches],  # in the order of the series
            "paths": {p: {"before": e.before, "after": e.after, "by": list(e.by)}
                      for p, e in sorted(self.paths.items())},
            "tree": self.tree,
        }

    @property
    def digest(self) -> str:
        """sha256 over the entry's name and content."""
        text = json.dumps([self.name, self.as_json()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Built:
    """One delivery worked out in memory: what is locked, the bytes after, and the hunks that moved."""

    locked: LockedTarget
    after: Files
    offsets: dict[str, list[Offset]]


def build_target(root: Path, upstream: Upstream, release: Release, profile: Profile, base: BaseFiles,
                 without: tuple[str, ...] = ()) -> Built:
    """Apply the selected series and the overlay to the base files, in memory. `base` may leave out absent paths."""
    patches = series.select(series.load(root, upstream.name, release.version), profile, without)
    by: dict[str, list[str]] = {}
    for patch in patches:
        for path in patch.paths:
            by.setdefault(path, []).append(patch.slug)
    overlay = {path: File(source.read_bytes()) for path, source in series.overlay_files(root, upstream.name).items()}
    # Modes are left out of the lock: wheels and checkouts carry them differently. A delivery keeps the target's own.
    before = {path: File(file.data) for path, file in base(upstream, release, set(by) | set(overlay)).items()}
    shadowing = sorted(set(overlay) & (set(before) | set(by)))
    if shadowing:
        raise ConflictError(f"the {upstream.name} overlay shadows upstream or patched files",
                            remedy="rename the overlay module; a hook in upstream's file is a patch's work",
                            rows=[Row(path, "exists upstream", "a new path") for path in shadowing])
    with Shadow(before | overlay) as shadow:
        try:
            offsets = shadow.apply_all(patches)
        except ConflictError as error:
            raise on_release(error, upstream, release) from None
        after, tree = shadow.files(), shadow.tree
    paths = {path: Entry(_sha(before, path), _sha(after, path), tuple(by.get(path, [OVERLAY])))
             for path in sorted(set(by) | set(overlay))}
    shas = tuple((patch.slug, patch.sha256) for patch in patches)
    locked = LockedTarget(upstream.name, release.version, profile.name, shas, paths, tree)
    return Built(locked, after, {slug: found for slug, found in offsets.items() if found})


def on_release(error: ConflictError, upstream: Upstream, release: Release) -> ConflictError:
    """The same refusal, with the release it is about and the way to that release."""
    other = f"apply.py rebase --upstream {upstream.name} --to {release.version} proposes a patch for that release"
    return ConflictError(f"{error.message} ({upstream.distribution} {release.version})", rows=error.rows,
                         remedy=error.remedy if release == upstream.release() else other)


def _sha(files: Files, path: str) -> str | None:
    return files[path].sha256 if path in files else None


@dataclass(frozen=True)
class Lock:
    targets: dict[str, LockedTarget]

    @classmethod
    def load(cls, root: Path) -> Lock:
        """Raises LockMismatch if the lock is missing, unreadable or of another schema."""
        try:
            data = jsonfile.read(root / NAME)
            if data["schema"] != SCHEMA:
                raise LockMismatch(f"{NAME} has schema {data['schema']}, this tool reads {SCHEMA}",
                                   remedy="write it again with apply.py export")
            return cls({name: _read_target(name, entry) for name, entry in data["targets"].items()})
        except FileNotFoundError:
            raise LockMismatch(f"{NAME} does not exist", remedy="write it with apply.py export") from None
        except jsonfile.WRONG as error:
            raise LockMismatch(f"{NAME} cannot be read: {error!r}", remedy="write it again with apply.py export"
                               ) from None

    def target(self, upstream: str, version: str, profile: str) -> LockedTarget:
        name = f"{upstream}@{version}/{profile}"
        if name not in self.targets:
            raise LockMismatch(f"{NAME} has no entry {name}", remedy="write it again with apply.py export")
        return self.targets[name]

    def dumps(self) -> str:
        """The canonical text of the lock."""
        targets = {name: target.as_json() | {"digest": target.digest} for name, target in self.targets.items()}
        return json.dumps({"schema": SCHEMA, "targets": targets}, sort_keys=True, indent=1) + "\n"


def _read_target(name: str, entry: dict) -> LockedTarget:
    upstream, _, rest = name.partition("@")
    version, _, profile = rest.partition("/")
    paths = {path: Entry(e["before"], e["after"], tuple(e["by"])) for path, e in entry["paths"].items()}
    target = LockedTarget(upstream, version, profile, tuple(map(tuple, entry["patches"])), paths, entry["tree"])
    if target.digest != entry["digest"]:
        raise LockMismatch(f"{NAME} was edited by hand: the entry {name} does not match its digest",
                           remedy="write it again with apply.py export")
    return target


def build(root: Path, pins: Pins, base: BaseFiles) -> Lock:
    """The lock of every pinned release under every profile that includes its upstream."""
    wanted = [(profile, upstream, release) for profile in pins.profiles.values()
              for upstream in map(pins.upstream, profile.upstreams) for release in upstream.releases.values()]
    targets = {}
    with progress.bar("lock", len(wanted), unit="targets") as advance:
        for profile, upstream, release in wanted:
            locked = build_target(root, upstream, release, profile, base).locked
            targets[locked.name] = locked
            advance(1)
    return Lock(targets)


def explain(wanted: LockedTarget, found: LockedTarget) -> LockMismatch:
    """Why what the checkout would deliver is not what the lock says."""
    rows = []
    want, have = dict(wanted.patches), dict(found.patches)
    for slug in sorted(want.keys() | have.keys()):
        if want.get(slug) != have.get(slug):
            rows.append(Row(f"patches/{wanted.upstream}/{slug}", _short(have.get(slug)), _short(want.get(slug))))
    for path in sorted(wanted.paths.keys() | found.paths.keys()):
        if wanted.paths.get(path) != found.paths.get(path):
            old, new = wanted.paths.get(path), found.paths.get(path)
            rows.append(Row(path, _short(new and new.after), _short(old and old.after)))
    return LockMismatch(f"the patches or overlays of {wanted.name} have changed since {NAME} was written",
                        remedy="write the lock again with apply.py export, and commit it", rows=rows)


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "absent"
