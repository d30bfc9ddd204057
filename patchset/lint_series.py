"""One upstream's series as a whole: its files, its order, what each patch does to each pinned release, its overlay."""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import diff, export, lint_diff, lint_head, series
from .errors import PatchsetError
from .lint_rules import Finding
from .lock import BaseFiles
from .ownership import Ownership
from .pins import Pins, Release, Upstream
from .rebase_replay import REBASED_FROM, state_of
from .series import Patch
from .shadow import File, Files, Shadow


def check(root: Path, pins: Pins, upstream: Upstream, base: BaseFiles) -> Iterator[Finding]:
    folder = f"patches/{upstream.name}"
    try:
        slugs = series.slugs(root, upstream.name)
    except PatchsetError as error:
        yield Finding(f"{folder}/series", 1, "series", error.message)
        return
    yield from _strays(root, upstream, slugs)
    done: set[Path] = set()
    default = upstream.release()
    for release in [default, *(r for r in upstream.releases.values() if r is not default)]:
        patches = []
        for slug in slugs:
            try:
                patches.append(series.load_one(root, upstream.name, slug, release.version))
                _ = patches[-1].files
            except PatchsetError as error:
                kind = "unreadable" if (root / folder / f"{slug}.patch").exists() else "series"
                yield Finding(f"{folder}/{slug}.patch", 1, kind, error.message)
                patches = [patch for patch in patches if patch.slug != slug]
        yield from _release(root, pins, upstream, release, patches, base, done)
    yield from _overlay(root, upstream, base)


def _strays(root: Path, upstream: Upstream, slugs: list[str]) -> Iterator[Finding]:
    for path in sorted((root / "patches" / upstream.name).iterdir()):
        name = path.relative_to(root).as_posix()
        slug, _, version = path.stem.partition("@")
        if path.suffix == ".draft":
            yield Finding(name, 1, "draft", "a patch without a diff")
        elif path.suffix != ".patch":
            if path.name not in ("series", "README.md"):
                yield Finding(name, 1, "unlisted", "no patch")
        elif slug not in slugs:
            yield Finding(name, 1, "unlisted", f"{slug} is not in the series")
        elif version and version not in upstream.releases:
            yield Finding(name, 1, "variant", f"{upstream.name} {version} is not pinned")


def _release(root: Path, pins: Pins, upstream: Upstream, release: Release, patches: list[Patch], base: BaseFiles,
             done: set[Path]) -> Iterator[Finding]:
    """Walk the series on one release. A patch file is read where it is used first; applying is tried everywhere."""
    wanted = {path for patch in patches for path in [*patch.paths, *lint_head.anchor_paths(patch)]}
    overlay = _modules(root, upstream)
    pristine = base(upstream, release, wanted | set(overlay) | _above(overlay))  # one reading of the archive
    order, subjects = [patch.slug for patch in patches], {}
    touched = {path for patch in patches for path in patch.paths}
    with Shadow({path: file for path, file in pristine.items() if path in touched}) as shadow:
        ownership, files = Ownership(shadow.base), shadow.base
        for number, patch in enumerate(patches):
            name = patch.path.relative_to(root).as_posix()
            found: list[lint_diff.Found] = []
            if fresh := patch.path not in done:
                done.add(patch.path)
                found += lint_head.check(patch, pins, root, pristine)
                found += lint_diff.check(patch)
                found += _order(patch, order[:number])
                found += _stale(root, patch)
                if (other := subjects.setdefault(patch.subject, patch.slug)) != patch.slug:
                    found.append((4, "duplicate-claim", f"{other} has the same subject"))
            before = shadow.tree
            try:
                shadow.apply(patch)
            except PatchsetError as error:
                rows = "; ".join(f"{row.path}: {row.found}" for row in error.rows)
                found.append((1, "applies", f"{release.version}: {error.message} ({rows})"))
            else:
                after = shadow.files()
                exact = diff.parse(export.diff_trees(shadow, before, shadow.tree), patch.slug)
                leans = ownership.follow(patch.slug, exact)
                if fresh:
                    found += lint_diff.check_result(patch, files, after, overlay)
                    found += [(line, "undeclared-dependency", f"its hunks hold lines of {slug}")
                              for line, slug in _undeclared(patch, patches[:number], leans)]
                files = after
            yield from (Finding(name, *one) for one in found)


def _modules(root: Path, upstream: Upstream) -> Files:
    folder = root / "overlays" / upstream.name
    return {path.relative_to(folder).as_posix(): File(path.read_bytes())
            for path in sorted(folder.rglob("*.py")) if path.is_file()}


def _stale(root: Path, patch: Patch) -> Iterator[lint_diff.Found]:
    """A patch for one release names the state of the patch that it was made from."""
    for line, value in lint_head.values(patch, REBASED_FROM):
        base, _, state = value.partition(" ")
        if state != state_of(series.load_one(root, patch.upstream, patch.slug, base)):
            yield line, "variant", f"{patch.slug} for {base} has changed since this was made from it"


def _order(patch: Patch, earlier: list[str]) -> Iterator[lint_diff.Found]:
    for line, value in lint_head.values(patch, "Depends-On"):
        if value not in (*earlier, "none"):
            where = "is this patch itself" if value == patch.slug else "is no earlier patch of the series"
            yield line, "depends-on", f"{value} {where}"


def _undeclared(patch: Patch, earlier: list[Patch], leans: set[str]) -> Iterator[tuple[int, str]]:
    by_slug = {one.slug: one for one in earlier}
    declared, left = set(), list(patch.depends_on)
    while left:
        slug = left.pop()
        if slug in by_slug and slug not in declared:
            declared.add(slug)
            left += by_slug[slug].depends_on
    end = patch.raw[: len(patch.raw) - len(patch.text)].count(b"\n")
    return ((end, slug) for slug in sorted(leans - declared))


def _overlay(root: Path, upstream: Upstream, base: BaseFiles) -> Iterator[Finding]:
    folder = root / "overlays" / upstream.name
    if not folder.is_dir():
        yield Finding(f"overlays/{upstream.name}", 1, "overlay-place", "no such folder")
        return
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for path in (Path(place, name) for name in sorted([*folders, *names])):
            if path.is_symlink():
                yield Finding(path.relative_to(root).as_posix(), 1, "overlay-link", f"a link to {os.readlink(path)}")
            elif path.is_file() and not path.name.startswith(".") and path.suffix not in (".pyc", ".md"):
                files.append(path)
    targets = {path.relative_to(folder).as_posix(): path for path in files}
    for target, path in targets.items():
        name = path.relative_to(root).as_posix()
        if not target.startswith(f"{upstream.package}/"):
            yield Finding(name, 1, "overlay-place", f"not under {upstream.package}/")
        yield from (Finding(name, *one) for one in _overlay_text(path))
    yield from _shadowing(root, upstream, targets, base)


def _overlay_text(path: Path) -> Iterator[lint_diff.Found]:
    data = path.read_bytes()
    if path.suffix == ".py" and (error := lint_diff.broken(data)):
        yield int(error.split(":")[0] if error[0].isdigit() else 1), "syntax", error
    for number, line in enumerate(data.split(b"\n"), 1):
        if hidden := lint_diff.INVISIBLE.search(line.decode("utf-8", "replace")):
            yield number, "invisible", f"U+{ord(hidden[0]):04X}"
        if lint_diff.MARKER.match(line):
            yield number, "conflict-marker", line.decode("utf-8", "replace")[:40]


def _above(paths: Iterable[str]) -> set[str]:
    return {parent.as_posix() for path in paths for parent in Path(path).parents} - {"."}


def _shadowing(root: Path, upstream: Upstream, targets: dict[str, Path], base: BaseFiles) -> Iterator[Finding]:
    """An overlay path that a release has, or one below a file of the release."""
    for release in upstream.releases.values():
        for path in sorted(base(upstream, release, set(targets) | _above(targets))):
            hit = targets.get(path) or next(p for target, p in targets.items() if target.startswith(path + "/"))
            yield Finding(hit.relative_to(root).as_posix(), 1, "overlay-shadows", f"{release.version} has {path}")
