"""patches/<upstream>/series and its .patch files: order, header, trailers, selection.

A patch for another release of the same upstream stands beside the main one as `<slug>@<version>.patch` and replaces it
there; the series file stays one. A missing series, patch or dependency is an error, never an empty list.
"""
from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import diff
from .errors import ConflictError, UsageError
from .pins import Profile

TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)*):(?: +(.*))?$")
RULER = re.compile(r"^---[ \t]*$", re.MULTILINE)
PREFIX = re.compile(r"^\[PATCH[^]]*\] *")
SLUG = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")


@dataclass
class Patch:
    """One .patch file, read but not applied. `text` is the diff alone; `trailers` keep every value in order."""

    upstream: str
    slug: str
    path: Path
    raw: bytes
    author: str = ""
    date: str = ""
    subject: str = ""
    body: str = ""
    trailers: dict[str, list[str]] = field(default_factory=dict)
    text: bytes = b""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def files(self) -> list[diff.FileDiff]:
        return diff.parse(self.text, self.path.name)

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.files]

    def values(self, name: str) -> list[str]:
        return self.trailers.get(name, [])

    @property
    def depends_on(self) -> list[str]:
        return [v for v in self.values("Depends-On") if v != "none"]

    @property
    def arch(self) -> set[str]:
        return {word.strip() for value in self.values("Arch") for word in value.split(",")}


def parse_patch(upstream: str, slug: str, path: Path, raw: bytes) -> Patch:
    """Split a patch file into header, body, trailers and diff. Raises ConflictError if it has no diff or no subject."""
    start = raw.find(b"\ndiff --git ")
    if start < 0:
        raise ConflictError(f"{path.name} holds no diff", remedy="make the change in the tree, then apply.py refresh")
    patch = Patch(upstream, slug, path, raw, text=raw[start + 1 :])
    read_head(patch, raw[: start + 1])
    if not patch.subject:
        raise ConflictError(f"{path.name} has no Subject", remedy="add one: what is hooked, which property it gives")
    return patch


def read_head(patch: Patch, head: bytes) -> None:
    """Fill in author, date, subject, body and trailers from what stands above the diff."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConflictError(f"{patch.path.name}: its header is not UTF-8: {error}", remedy="save it as UTF-8") from None
    header, _, message = text.partition("\n\n")
    for line in re.sub(r"\n[ \t]+", " ", header).split("\n"):
        key, _, value = line.partition(": ")
        if key == "From":
            patch.author = value.strip()
        elif key == "Date":
            patch.date = value.strip()
        elif key == "Subject":
            patch.subject = PREFIX.sub("", value).strip()
    message = RULER.split(message, maxsplit=1)[0].strip("\n")  # git, too, takes what follows `---` for a note
    body, _, last = message.rpartition("\n\n")
    block = last.split("\n")
    if TRAILER.match(block[0]) and all(TRAILER.match(line) or line[:1] in " \t" for line in block):
        patch.body, patch.trailers = body.strip("\n"), _trailers(block)
    else:
        patch.body = message


def _trailers(lines: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    key = ""
    for line in lines:
        match = TRAILER.match(line)
        if match:
            key = match[1]
            found.setdefault(key, []).append((match[2] or "").strip())
        else:
            found[key][-1] += " " + line.strip()
    return found


def slugs(root: Path, upstream: str) -> list[str]:
    """The order of patches/<upstream>/series. Raises UsageError if the file is missing or names a slug twice."""
    path = root / "patches" / upstream / "series"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UsageError(f"{path.relative_to(root)} does not exist",
                         remedy="create it; an empty series is an empty file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.relative_to(root)} is not UTF-8: {error}", remedy="save it as UTF-8") from None
    order = [line.split("#", 1)[0].strip() for line in lines]
    order = [slug for slug in order if slug]
    for slug in order:
        if not SLUG.match(slug):
            raise UsageError(f"{slug!r} in {upstream}/series is no slug", remedy="use lower-case words joined by '-'")
        if order.count(slug) > 1:
            raise UsageError(f"{slug} stands twice in {upstream}/series", remedy="keep one")
    return order


def load(root: Path, upstream: str, version: str) -> list[Patch]:
    """Every patch of the series for that release, in order."""
    return [load_one(root, upstream, slug, version) for slug in slugs(root, upstream)]


def load_one(root: Path, upstream: str, slug: str, version: str) -> Patch:
    folder = root / "patches" / upstream
    for path in (folder / f"{slug}@{version}.patch", folder / f"{slug}.patch"):
        if path.exists():
            return parse_patch(upstream, slug, path, path.read_bytes())
    raise UsageError(f"patches/{upstream}/{slug}.patch does not exist", remedy="add it or take it out of the series")


def select(patches: list[Patch], profile: Profile, without: tuple[str, ...] = ()) -> list[Patch]:
    """The patches of a profile, less `without` and less whatever depends on those left out by `without`.

    Raises UsageError for an unknown slug, and if the profile leaves out a patch that a selected one needs.
    """
    for slug in without:
        if slug not in {patch.slug for patch in patches}:
            raise UsageError(f"no patch named {slug!r}", remedy="apply.py report lists the series")
    chosen: list[Patch] = []
    dropped = set(without)
    names: set[str] = set()
    for patch in patches:
        if patch.slug in dropped or not patch.arch & {*profile.arch, "any"}:
            continue
        lacking = [slug for slug in patch.depends_on if slug not in names]
        if set(lacking) & dropped:
            dropped.add(patch.slug)
            continue
        if lacking:
            raise UsageError(f"{patch.slug} depends on {', '.join(lacking)}, which profile {profile.name} or the order "
                             "of the series leaves out", remedy="mend Depends-On, Arch or the series")
        chosen.append(patch)
        names.add(patch.slug)
    return chosen


def overlay_files(root: Path, upstream: str) -> dict[str, Path]:
    """Relative target path -> source file, for all of overlays/<upstream>/.

    Caches, hidden files and the folder's own notes (*.md) stay behind: none of them is code, and none enters the lock.
    """
    folder = root / "overlays" / upstream
    if not folder.is_dir():
        raise UsageError(f"overlays/{upstream} does not exist", remedy="create it; an empty overlay is an empty folder")
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part == "__pycache__" or part.startswith(".") for part in relative.parts)
        if hidden or path.suffix in (".pyc", ".md"):
            continue
        if path.is_symlink():
            raise UsageError(f"overlays/{upstream}/{relative} is a symbolic link",
                             remedy="overlays hold plain files only")
        if path.is_file():
            found[relative.as_posix()] = path
    return found
