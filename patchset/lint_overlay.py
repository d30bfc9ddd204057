"""One upstream's overlay: plain files under its package, none that a release has, nothing hidden in their text."""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import lint_diff
from .lint_rules import Finding
from .lock import BaseFiles
from .pins import Upstream


def files(root: Path, upstream: Upstream) -> dict[str, Path]:
    """What is delivered, by its path in the target: no links, caches, notes or hidden files."""
    folder = root / "overlays" / upstream.name
    return {path.relative_to(folder).as_posix(): path for path in _walk(folder)
            if path.is_file() and not path.is_symlink() and path.suffix not in (".pyc", ".md")}


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        yield from (Path(place, name) for name in sorted([*folders, *names]) if not name.startswith("."))


def in_the_way(targets: Iterable[str]) -> set[str]:
    """The paths that a release must not have as files: those of the overlay and the folders above them."""
    above = {parent.as_posix() for target in targets for parent in Path(target).parents}
    return {*targets, *above} - {"."}


def check(root: Path, upstream: Upstream, base: BaseFiles) -> Iterator[Finding]:
    folder = root / "overlays" / upstream.name
    if not folder.is_dir():
        yield Finding(f"overlays/{upstream.name}", 1, "overlay-place", "no such folder")
    for path in _walk(folder):
        if path.is_symlink():
            yield Finding(path.relative_to(root).as_posix(), 1, "overlay-link", f"a link to {os.readlink(path)}")
    targets = files(root, upstream)
    for target, path in targets.items():
        name = path.relative_to(root).as_posix()
        if not target.startswith(f"{upstream.package}/"):
            yield Finding(name, 1, "overlay-place", f"not under {upstream.package}/")
        yield from (Finding(name, *one) for one in _text(path))
    for release in upstream.releases.values():
        for path in sorted(base(upstream, release, in_the_way(targets))):
            hit = targets.get(path) or next(p for target, p in targets.items() if target.startswith(path + "/"))
            yield Finding(hit.relative_to(root).as_posix(), 1, "overlay-shadows", f"{release.version} has {path}")


def _text(path: Path) -> Iterator[lint_diff.Found]:
    data = path.read_bytes()
    if path.suffix == ".py" and (error := lint_diff.broken(data)):
        yield int(error.split(":")[0] if error[0].isdigit() else 1), "syntax", error
    for number, line in enumerate(data.split(b"\n"), 1):
        if hidden := lint_diff.INVISIBLE.search(line.decode("utf-8", "replace")):
            yield number, "invisible", f"U+{ord(hidden[0]):04X}"
        if lint_diff.MARKER.match(line):
            yield number, "conflict-marker", line.decode("utf-8", "replace")[:40]
