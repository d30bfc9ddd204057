"""The canonical form of patches and lock: what stands in the repository is what this module writes, byte for byte.

Header, body and trailers come from the file that is there; the diff is taken again from a shadow repository. Every
flag that a user's git could have set otherwise is named, and git runs without any user's configuration.
"""
from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from . import archive, fetch, lock, progress, series, staging
from .errors import ConflictError
from .lock import BaseFiles
from .pins import Pins, Release, Upstream
from .series import Patch
from .shadow import Files, Shadow
from .ui import Result

ZERO = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001"
AUTHOR = "zero-mismatch <maintainers@zero-mismatch.invalid>"
ORDER = ("Upstream-Status", "Upstream-PR", "Depends-On", "Arch", "Tests", "Counter-Test", "Drop-When", "Load-Bearing",
         "Anchors", "Contract-Read", "Rebased-From")
WIDTH = 120
DIFF = [
    "diff-tree", "-r", "-p", "--no-commit-id",
    "--full-index",  # a 3-way merge on another release must find the blob
    "--no-renames",  # whether git sees a rename depends on limits and similarity
    "--diff-algorithm=myers", "--no-indent-heuristic",  # where a hunk begins
    "-U3", "--inter-hunk-context=0", "--no-function-context",  # how far it reaches
    "--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "-O/dev/null",
    "--no-color", "--no-ext-diff", "--no-textconv",
]
VERBATIM = re.compile(r"^([ \t>|*+-]|\d+[.)] )")  # the line of a list, table, quotation or code


@dataclass
class Sdists:
    """The pristine files of the pinned releases, from their sdists, each path read once."""

    found: dict[tuple[str, str], Files] = field(default_factory=dict)
    asked: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def __call__(self, upstream: Upstream, release: Release, wanted: set[str]) -> Files:
        key = upstream.name, release.version
        new = wanted - self.asked.setdefault(key, set())
        files = self.found.setdefault(key, {})
        if new:
            files |= archive.read_files(fetch.sdist(upstream, release), new)
            self.asked[key] |= new
        return {path: files[path] for path in wanted if path in files}


def run(root: Path, pins: Pins, check: bool, base: BaseFiles | None = None) -> Result:
    """Write every patch and the lock in canonical form; with `check` only name those that are not."""
    base = base or Sdists()
    wanted = {path: data for path, data in canonical_patches(root, pins, base).items() if path.read_bytes() != data}
    built = lock.build(root, pins, base)  # whatever refuses does so before anything is written
    if wanted and not check:
        for path, data in wanted.items():
            replace_file(path, data)
        built = lock.build(root, pins, base)
    changed = list(wanted)
    path, text = root / lock.NAME, built.dumps().encode()
    if not path.exists() or path.read_bytes() != text:
        changed.append(path)
        if not check:
            replace_file(path, text)
    return _result([path.relative_to(root).as_posix() for path in changed], check)


def _result(names: list[str], check: bool) -> Result:
    if not names:
        return Result({"changed": [], "written": False}, ["patches and lock are canonical"])
    said = "is not canonical; apply.py export writes it" if check else "written"
    return Result({"changed": names, "written": not check}, [f"{name}: {said}" for name in names], int(check))


def replace_file(path: Path, data: bytes) -> None:
    """Atomically: a reader sees the old bytes or the new ones."""
    with staging.file(path) as pending:
        pending.write_bytes(data)


def canonical_patches(root: Path, pins: Pins, base: BaseFiles) -> dict[Path, bytes]:
    """The canonical bytes of every patch file that a series uses.

    A file is taken against the release it was written for: `<slug>@<version>.patch` against that one, `<slug>.patch`
    against the pinned default. Another release that uses it too only has to accept it, at whatever offset.
    """
    texts: dict[Path, bytes] = {}
    for upstream in pins.upstreams.values():
        default = upstream.release()
        for release in [default, *(r for r in upstream.releases.values() if r is not default)]:
            patches = series.load(root, upstream.name, release.version)
            if all(patch.path in texts for patch in patches):
                continue
            files = base(upstream, release, {path for patch in patches for path in patch.paths})
            label = f"export {upstream.name} {release.version}"
            try:
                with progress.bar(label, len(patches), unit="patches") as advance:
                    for patch, text in diffs(patches, files):
                        texts.setdefault(patch.path, canonical(patch, text))
                        advance(1)
            except ConflictError as error:
                raise lock.on_release(error, upstream, release) from None
    return texts


def diffs(patches: Iterable[Patch], files: Files) -> Iterator[tuple[Patch, bytes]]:
    """Each patch with its diff taken again on top of those before it. Raises ConflictError if one does not apply."""
    with Shadow(files) as shadow:
        after = shadow.tree
        for patch in patches:
            shadow.apply(patch)
            before, after = after, shadow.tree
            yield patch, diff_trees(shadow, before, after)


def diff_trees(shadow: Shadow, before: str, after: str) -> bytes:
    return shadow.repository.run([*DIFF, before, after]).stdout


def canonical(patch: Patch, text: bytes) -> bytes:
    """The whole file. Raises ConflictError if git or this tool would read it back differently."""
    parts = [_header(patch), *_paragraphs(patch.body), "\n".join(_trailers(patch.trailers))]
    head = "\n\n".join(part for part in parts if part)
    data = f"{head}\n---\n".encode() + text
    again = series.parse_patch(patch.upstream, patch.slug, patch.path, data)
    if (again.body.split(), again.trailers, again.text) != (patch.body.split(), patch.trailers, text):
        raise ConflictError(f"{patch.slug}: its body holds a line that ends it ('---', 'diff --git')",
                            remedy="indent that line, or say it in other words")
    return data


def _header(patch: Patch) -> str:
    named = {"From": patch.author or AUTHOR, "Date": patch.date, "Subject": patch.subject}
    return "\n".join([ZERO, *(f"{name}: {value}" for name, value in named.items() if value)])


def _paragraphs(body: str) -> Iterator[str]:
    """Plain text wrapped again; lists, tables and code stay as they are."""
    stripped = [line.rstrip() for line in body.split("\n")]
    for is_text, group in groupby(stripped, key=bool):
        lines = list(group)
        if is_text:
            yield "\n".join(lines) if any(map(VERBATIM.match, lines)) else _wrap(" ".join(lines))


def _wrap(text: str, name: str = "") -> str:
    """One paragraph or, with its name, one trailer, which folds as git folds it."""
    words = " ".join(re.split(r"[ \t\n]+", text.strip()))
    return textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False,
                         initial_indent=name, subsequent_indent=" " if name else "") or name.rstrip()


def _trailers(trailers: dict[str, list[str]]) -> Iterator[str]:
    names = [name for name in ORDER if name in trailers] + [name for name in trailers if name not in ORDER]
    for name in names:
        for value in trailers[name]:
            yield _wrap(value, f"{name}: ")
