"""`new` starts a patch; `refresh` takes the edits made in a patched tree back into the patches and overlays.

A patch without a diff cannot be applied, so a new one begins as a draft: `patches/<upstream>/<slug>.draft` holds its
head alone and stands in no series, so every other verb goes on as before (lint reports it). The first `refresh SLUG`
gives it the edits as its diff, appends the slug to the series and removes the draft.
"""
from __future__ import annotations

import os
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from . import diff, export, series, target
from .edit_merge import rebuilt
from .edit_tree import Edits, applied, apply_again, find
from .errors import ConflictError, NeedsWork, Row, UsageError
from .lock import BaseFiles
from .pins import Pins, Upstream
from .series import Patch
from .shadow import File
from .ui import Result

SHOWN = 12  # lines about files left in the tree

DRAFT = f"""{export.ZERO}
From: {export.AUTHOR}
Date: {{date}}
Subject: TODO what is hooked, and which property it gives

TODO the cause, by upstream file:line, and why an overlay alone cannot do it.

Upstream-Status: Pending
Upstream-PR: none
Arch: any
Tests: TODO tests/….py::test_the_property
Counter-Test: TODO tests/….py::test_stock_differs
Drop-When: TODO the condition under which this patch can go
Load-Bearing: TODO yes — what breaks without it
Anchors: TODO path.py::Class.method of the functions the hunks rely on
"""


def new(root: Path, pins: Pins, upstream: str, slug: str) -> Result:
    """Write the draft of a patch."""
    name = pins.upstream(upstream).name
    folder = root / "patches" / name
    if not series.SLUG.match(slug):
        raise UsageError(f"{slug!r} is no slug", remedy="use lower-case words joined by '-'")
    draft = folder / f"{slug}.draft"
    if slug in series.slugs(root, name) or draft.exists() or (folder / f"{slug}.patch").exists():
        raise UsageError(f"{name}/{slug} exists already", remedy="choose another name, or apply.py refresh it")
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    export.replace_file(draft, DRAFT.format(date=format_datetime(today)).encode())
    shown = draft.relative_to(root).as_posix()
    return Result({"draft": shown}, [
        f"{shown}: written; fill in every TODO",
        (f"then edit files in {pins.upstream(name).target} (apply.py apply makes it) and run: "
         f"apply.py refresh --upstream {name} {slug}")])


def refresh(root: Path, pins: Pins, upstream: str, slug: str | None, tree: Path | None, add: list[str] | None = None,
            base: BaseFiles | None = None) -> Result:
    """Take the edits into the patch `slug` (default: the last one that touches those files), and move the later ones on
    top. Nothing is written unless all of them fit. The tree then carries the new lock.

    A patch takes edits of the files it touches; another file has to be named by `add`, or its edits stay in the tree
    and are listed. A draft touches no files yet and takes all.
    """
    if add and not slug:
        raise UsageError("--add widens one patch, so that patch has to be named",
                         remedy="apply.py refresh SLUG --add PATH")
    base = base or export.Sdists()
    up = pins.upstream(upstream)
    one = target.tree(up, tree or root / up.target)
    with one.locked(write=True):
        request, patches, built = applied(root, pins, one, base)
        edits = find(one, request, built, base)
    draft = root / "patches" / up.name / f"{slug}.draft"
    if draft.exists() and not edits.patched:
        raise NeedsWork(f"{one.root} holds no edits for {slug}", remedy="edit upstream's files there, then refresh")
    chosen = _choose(up, request.version, patches, draft, slug, edits) if edits.patched or add else None
    kept = _leave(chosen, patches, edits, [_named(one, path) for path in add or ()]) if chosen else {}
    if not edits.names:
        return Result({"patch": slug, "edited": [], "written": [], "left": edits.left},
                      [f"{one.root}: no edits, nothing written", *_left(edits)])
    texts = rebuilt(up.release(request.version), up, patches, chosen, edits.patched, base) if edits.patched else []
    written = _write(root, up, request.version, texts, edits)
    _lock_again(root, pins, base, written)
    apply_again(request, one, edits, kept, base)
    data = {"patch": chosen.slug if edits.patched else None, "edited": edits.names, "written": written,
            "left": edits.left}
    lines = [f"{path}: into {chosen.slug if path in edits.patched else 'the overlay'}" for path in edits.names]
    lines += [*(f"{name}: written" for name in written), f"{one.root}: carries the new lock"]
    return Result(data, lines + _left(edits))


def _named(one: target.Target, path: str) -> str:
    """A path given with --add, as the tree names it: from the tree's top, or any way to the file itself."""
    place = Path(os.path.abspath(path))
    return place.relative_to(one.root).as_posix() if place.is_relative_to(one.root) else path


def _leave(chosen: Patch, patches: list[Patch], edits: Edits, add: list[str]) -> dict[str, File | None]:
    """Move what `chosen` does not take from edits.patched to edits.left; returns those edits."""
    last = {path: patch.slug for patch in patches for path in patch.paths}
    rows = [Row(path, edits.left.get(path, "not edited"), "an edited file of the release")
            for path in add if path not in edits.patched]
    if rows:
        raise UsageError(f"{chosen.slug} cannot take these", rows=rows,
                         remedy="name edited files from the top of the tree; what is new belongs into the overlay")
    if not chosen.text:
        return {}
    kept = {path: file for path, file in edits.patched.items() if path not in {*chosen.paths, *add}}
    for path in kept:
        del edits.patched[path]
        edits.left[path] = f"edited, {f'of {last[path]}' if path in last else 'of no patch'}"
    if kept and not edits.names:
        raise UsageError(f"{chosen.slug} touches none of the edited files",
                         rows=[Row(path, edits.left[path], f"a file of {chosen.slug}") for path in kept],
                         remedy=f"to take one in: apply.py refresh {chosen.slug} --add PATH")
    return kept


def _left(edits: Edits) -> list[str]:
    """What refresh did not take. New files may be the many of a build, so not all of them are listed."""
    lines = [f"{path}: left in the tree ({why})" for path, why in edits.left.items()]
    if any(why.startswith("edited") for why in edits.left.values()):
        lines.append("to take an edited one into a patch: apply.py refresh SLUG --add PATH")
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"… and {len(lines) - SHOWN} more (--json lists all)"]


def _choose(up: Upstream, version: str, patches: list[Patch], draft: Path, slug: str | None, edits: Edits) -> Patch:
    """The patch that takes the edits; for a draft, a patch that is not in the list yet."""
    if slug is None:
        last = {path: patch for patch in patches for path in patch.paths}
        owners = {path: last[path].slug if path in last else "no patch" for path in edits.patched}
        if len(set(owners.values())) > 1 or "no patch" in owners.values():
            raise UsageError("the edited files do not belong to one patch",
                             remedy="name it: apply.py refresh SLUG (a new one: apply.py new SLUG first)",
                             rows=[Row(path, f"last touched by {by}", "one patch") for path, by in owners.items()])
        return last[next(iter(owners))]
    if draft.exists():
        if version != up.version:
            raise UsageError(f"{slug} is new, and this tree is {up.name} {version}",
                             remedy=f"write it for {up.version} first")
        patch = Patch(up.name, slug, draft.with_suffix(".patch"), b"")
        series.read_head(patch, draft.read_bytes())
        return patch
    for patch in patches:
        if patch.slug == slug:
            return patch
    raise UsageError(f"{up.name} has no patch {slug!r}", remedy="apply.py new starts one; apply.py report lists them")


def _write(root: Path, up: Upstream, version: str, texts: list[tuple[Patch, bytes]], edits: Edits) -> list[str]:
    """Patches first, then the overlay; a draft goes last, when its patch stands in the series."""
    written = []
    for patch, text in texts:
        path = _place(up, version, patch, text, chosen=patch is texts[0][0])
        data = export.canonical(patch, text)
        if path and not (path.exists() and path.read_bytes() == data):
            written.append(path)
            export.replace_file(path, data)
    for path, file in edits.overlay.items():
        written.append(root / "overlays" / up.name / path)
        export.replace_file(written[-1], file.data)
    for patch, _ in texts:
        if not patch.text:
            order = patch.path.with_name("series")
            lines = order.read_text(encoding="utf-8").splitlines()
            export.replace_file(order, "\n".join([*lines, patch.slug, ""]).encode())
            patch.path.with_suffix(".draft").unlink()
            written.append(order)
    return [path.relative_to(root).as_posix() for path in written]


def _place(up: Upstream, version: str, patch: Patch, text: bytes, *, chosen: bool) -> Path | None:
    """Where the patch is written. On another release than the default, what differs becomes that release's variant; a
    later patch whose hunks only moved stays as it is."""
    if version == up.version or "@" in patch.path.name:
        return patch.path
    hunks = [[hunk.lines for hunk in file.hunks] for file in diff.parse(text, patch.slug)]
    if not chosen and hunks == [[hunk.lines for hunk in file.hunks] for file in patch.files]:
        return None
    return patch.path.with_name(f"{patch.slug}@{version}.patch")


def _lock_again(root: Path, pins: Pins, base: BaseFiles, written: list[str]) -> None:
    try:
        export.run(root, pins, False, base)
    except ConflictError as error:
        raise ConflictError(f"{', '.join(written)}: written, but another release does not take it, so the lock is "
                            f"stale: {error.message}", rows=error.rows,
                            remedy=f"{error.remedy}; then apply.py export") from error
