"""A patched tree and the edits made in it: find them, and let the tree carry the new lock once they are in the patches.

What counts as an edit: a file of the series or overlay that is not what was applied; any other file of the release
whose bytes differ; a new file in a folder of the overlay. Files that the tree lacks and no patch touches do not count,
as a checkout lacks what an sdist generates. Other new files stay where they are: what is new belongs into the overlay.
"""
from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import deliver, lock, series, state
from .deliver import Request
from .errors import DirtyTarget, LockMismatch, NeedsWork, Row, UsageError
from .export import replace_file
from .lock import BaseFiles, Built
from .paths import inside
from .pins import Pins
from .series import Patch
from .shadow import File, Files
from .target import Target
from .transaction import Transaction

GENERATED = ("_version.py", "PKG-INFO")  # written anew at every build


@dataclass
class Edits:
    """patched: files that go into a patch (None: deleted). overlay: new bytes of overlay files. left: edits that are
    taken by nothing and stay in the tree, each with the reason. Paths of the target."""

    patched: dict[str, File | None]
    overlay: Files
    left: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return sorted([*self.patched, *self.overlay])


def applied(root: Path, pins: Pins, one: Target, base: BaseFiles) -> tuple[Request, list[Patch], Built]:
    """What was applied to the tree; refused unless it is the whole series as it stands in the checkout."""
    folder = one.root / one.state
    was = state.load(folder)
    if Transaction(one.root, folder).open:
        raise NeedsWork(f"{one.root} was interrupted half way", remedy="run apply.py recover first")
    if was is None:
        raise NeedsWork(f"{one.root} is not patched", remedy="run apply.py apply, make the edits again, then refresh")
    profile = pins.profile(was.profile)
    patches = series.load(root, one.upstream.name, was.version)
    if was.without or len(series.select(patches, profile)) != len(patches):
        raise UsageError(f"{one.root} carries a part of the series", remedy="refresh a tree made by apply.py apply")
    built = lock.build_target(root, one.upstream, one.upstream.release(was.version), profile, base)
    if built.locked.digest != was.lock:
        raise LockMismatch(f"{one.root} was patched by another lock ({was.lock[:12]}) than the checkout's patches give "
                           f"({built.locked.digest[:12]})",
                           remedy="keep your edits with apply.py revert --edits-to DIR, apply, and make them again")
    return Request(root, pins, profile, was.version), patches, built


def find(one: Target, request: Request, built: Built, base: BaseFiles) -> Edits:
    """Compare the tree with what was applied and, for every other file, with the release."""
    present = dict(_walk(one.root)) | {path: place for path in built.locked.paths
                                       if (place := inside(one.root, path)).is_file()}
    pristine = base(one.upstream, one.upstream.release(request.version), set(present))
    overlays = {path for path, entry in built.locked.paths.items() if entry.by == (lock.OVERLAY,)}
    expected = pristine | built.after
    edits = Edits({}, {})
    for path, file in expected.items():
        data = present[path].read_bytes() if path in present else None
        if data == file.data:
            continue
        if path in overlays:
            if data is None:
                raise DirtyTarget(f"{path} is missing in the tree", rows=[Row(path, "missing", "the overlay's file")],
                                  remedy=f"put it back; to remove it, delete overlays/{one.upstream.name}/{path}")
            edits.overlay[path] = File(data)
        else:
            edits.patched[path] = None if data is None else File(data)
    for path in built.locked.paths:
        if built.locked.paths[path].after is None and path in present:
            edits.patched[path] = File(present[path].read_bytes())
    kinds = {Path(path).suffix for path in overlays}
    folders = {path.rsplit("/", 1)[0] + "/" for path in overlays} - {path.rsplit("/", 1)[0] + "/" for path in pristine}
    for path in sorted(present.keys() - expected.keys() - edits.patched.keys()):
        if not any(path.startswith(folder) for folder in folders):
            edits.left[path] = "new, and not in a folder of the overlay"
        elif Path(path).suffix not in kinds:
            edits.left[path] = f"new, and no {' or '.join(sorted(kinds))} file as the overlay holds"
        else:
            edits.overlay[path] = File(present[path].read_bytes())
    return edits


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """The plain files of a tree that may hold an edit: no caches, notes or links, nothing hidden."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            place = Path(folder, name)
            plain = place.is_file() and not place.is_symlink()
            if plain and name not in GENERATED and not name.endswith((".pyc", ".md")):
                yield place.relative_to(root).as_posix(), place


def apply_again(request: Request, one: Target, edits: Edits, kept: dict[str, File | None], base: BaseFiles) -> None:
    """Let the tree carry the new lock: back to the release, then apply. The edits are in the patches by now.

    kept: edits of other patches' files, which stay edits. They come back whatever happens in between.
    """
    known = {change.path for change in state.load(one.root / one.state).changes}
    pristine = base(one.upstream, one.upstream.release(request.version), set(edits.names))
    for path in set(edits.names) - known:
        place = inside(one.root, path)
        _put_back(place, pristine.get(path))
    try:
        with tempfile.TemporaryDirectory(prefix="zero-mismatch-") as folder:
            deliver.revert(replace(request, edits_to=Path(folder)), one)
        deliver.apply(request, one)
    finally:
        for path in kept.keys() & known:
            _put_back(inside(one.root, path), kept[path])


def _put_back(place: Path, file: File | None) -> None:
    if file is None:
        place.unlink(missing_ok=True)
        return
    mode = place.stat().st_mode & 0o7777 if place.exists() else 0o644
    replace_file(place, file.data)
    place.chmod(mode)
