"""What a rebase leaves on disk: proposed patches, and those that are left to a person as files.

conflicts/<slug>/ holds four folders of whole files: base (the old release with the patches before this one), patched
(base with this patch), upstream (the new release as carried so far) and merged (what could be carried, with diff3
markers where it could not). A person edits merged/ and creates an empty file `settled` beside it; the next run takes
merged/ as this patch's result.
"""
from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

from .errors import NeedsWork, Row
from .export import canonical, replace_file
from .paths import inside
from .rebase_merge import Merger
from .rebase_replay import REBASED_FROM, PatchResult, state_of, without_blobs
from .rebase_verdicts import ABSORBED, FAILED, MERGED, RESOLVED
from .series import Patch
from .shadow import Files

INPUTS = ("base", "upstream", "patched")
MARKER = re.compile(rb"^(<{7}|>{7}|\|{7}|={7})( |$)", re.MULTILINE)
SETTLED = "settled"
WRITTEN = ".merged-as-written"  # the digest of merged/ before anyone edited it


def proposal(git: Merger, result: PatchResult, base: str) -> bytes | None:
    """The patch for the new release, or None if the one that is there says the same."""
    absorbed = result.text == ABSORBED and not result.resolved
    if absorbed or result.verdict in FAILED or result.resolved.endswith(".patch"):
        return None
    text = git.text(result.before, result.after)
    if not text or without_blobs(text) == without_blobs(result.patch.text):
        return None
    return canonical(_with_trailers(result, base), text)


def _with_trailers(result: PatchResult, base: str) -> Patch:
    """The patch with its anchors in the files where the release has them now, and what it was made from."""
    moved = {file.path: file.target for file in result.files if file.target != file.path}
    trailers = result.patch.trailers | {REBASED_FROM: [f"{base} {state_of(result.patch)}"]}
    anchors = [value.partition("::") for value in result.patch.values("Anchors")]
    if moved and anchors:
        trailers["Anchors"] = [moved.get(path, path) + mark + name for path, mark, name in anchors]
    return replace(result.patch, trailers=trailers)


def installable(result: PatchResult) -> bool:
    """Whether the release needs a patch file of its own and no person has to look at it first.

    A patch that is clean or offset is used as it is: `apply` accepts it at any offset, and the lock pins the result.
    """
    return result.verdict in (MERGED, RESOLVED)


def write_proposals(folder: Path, texts: dict[str, bytes], version: str) -> dict[str, Path]:
    """Slug -> file. Proposals of an earlier run are removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return install(folder, texts, version)


def install(folder: Path, texts: dict[str, bytes], version: str) -> dict[str, Path]:
    """Write `<slug>@<version>.patch` files; slug -> file."""
    written = {}
    for slug, data in texts.items():
        written[slug] = folder / f"{slug}@{version}.patch"
        replace_file(written[slug], data)
    return written


def write_conflict(folder: Path, sides: dict[str, Files]) -> None:
    """Leave a person's work in merged/ alone as long as the other three sides are what they were."""
    if folder.exists():
        if all(_read(folder / side) == _bytes(sides[side]) for side in INPUTS) and (folder / "merged").is_dir():
            return
        written = folder / WRITTEN
        if written.exists() and written.read_text() == _digest(_read(folder / "merged")):
            shutil.rmtree(folder)
        else:
            _set_aside(folder)
    for side, files in sides.items():
        (folder / side).mkdir(parents=True)
        for path, file in files.items():
            place = inside(folder / side, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.data)
    (folder / WRITTEN).write_text(_digest(_bytes(sides["merged"])))


def _digest(files: dict[str, bytes]) -> str:
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def _set_aside(folder: Path) -> None:
    number = 1
    while (older := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(older)


def settled(folder: Path, result: PatchResult) -> tuple[str, dict[str, bytes]] | None:
    """What the touched files become by merged/, if a person has marked this very conflict as settled.

    Raises NeedsWork if a marker is left in them. A file that merged/ lacks stays as the release has it, unless the
    patch removes it.
    """
    if not (folder / SETTLED).exists():
        return None
    if any(_read(folder / side) != _bytes(result.sides[side]) for side in INPUTS):
        result.notes.append(f"{folder.name}/{SETTLED} was made for another state of the series, so it is set aside")
        return None
    found = _read(folder / "merged")
    marked = {path: data[: match.start()].count(b"\n") + 1
              for path, data in found.items() if (match := MARKER.search(data))}
    rows = [Row(f"{folder.name}/merged/{path}", f"a conflict marker at line {line}", "none")
            for path, line in marked.items()]
    if rows:
        raise NeedsWork("a conflict that is marked as settled still has conflict markers", rows=rows,
                        remedy=f"settle them, or remove the file {SETTLED}")
    removed = {file.target for file in result.files if file.path not in result.sides["patched"]}
    kept = {path: file.data for path, file in result.before.items() if path not in removed}
    return f"conflicts/{folder.name}", kept | found


def _bytes(files: Files) -> dict[str, bytes]:
    return {path: file.data for path, file in files.items()}


def _read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
