"""One upstream's series as a whole: its files, its order, what each patch does to each pinned release, its overlay."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import diff, export, lint_diff, lint_head, lint_overlay, progress, series
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
    overlay = {target: File(path.read_bytes()) for target, path in lint_overlay.files(root, upstream).items()}
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
        yield from _release(root, pins, upstream, release, patches, base, done, overlay)
    yield from lint_overlay.check(root, upstream, base)


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
             done: set[Path], overlay: Files) -> Iterator[Finding]:
    """Walk the series on one release. A patch file is read where it is used first; applying is tried everywhere."""
    wanted = {path for patch in patches for path in [*patch.paths, *lint_head.anchor_paths(patch)]}
    pristine = base(upstream, release, wanted | lint_overlay.in_the_way(overlay))  # one reading of the archive
    order, subjects = [patch.slug for patch in patches], {}
    touched = {path for patch in patches for path in patch.paths}
    bar = progress.bar(f"lint {upstream.name} {release.version}", len(patches), unit="patches")
    with Shadow({path: file for path, file in pristine.items() if path in touched}) as shadow, bar as advance:
        ownership, files = Ownership(shadow.base), shadow.base
        for number, patch in enumerate(patches):
            advance(1)
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
