"""`apply.py why PATH`: which patches touch a path, at which lines, why, and which overlay modules their hooks call."""
from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from . import archive, fetch, series, target
from .diff import FileDiff, Hunk
from .errors import NeedsWork, UsageError
from .pins import Pins, Release, Upstream
from .rebase_merge import groups_of
from .series import Patch
from .ui import Result

FROM = re.compile(r"from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n#]+)")
SCOPE = re.compile(r"(async def|def|class) ")
NEAR = 3  # how many suggestions
IMPORT = re.compile(r"^\s*import\s+([\w.]+)", re.MULTILINE)


def run(root: Path, pins: Pins, path: str, version: str | None) -> Result:
    """A path or folder of a release or of the overlay. That no patch touches it is an answer; that there is no such
    path is an error."""
    path, known, found, importers, overlay = _plain(root, pins, path), set(), [], [], False
    for upstream in upstreams(pins, version):
        overlays = set(series.overlay_files(root, upstream.name))
        overlay |= path in overlays
        known |= overlays
        for patch in series.load(root, upstream.name, upstream.release(version).version):
            known |= set(patch.paths)
            entry = _entry(root, patch, overlays)
            entry["files"] = [file for file in entry["files"] if _covers(path, file["path"])]
            if entry["files"]:
                found.append(entry)
            elif path in entry["imports"]:
                importers.append(entry["slug"])
    near = [] if found or overlay else _demand_upstream(root, pins, path, version, known)
    data = {"path": path, "overlay": overlay, "patches": found, "imported_by": importers, "near": near}
    return Result(data, _lines(data))


def upstreams(pins: Pins, version: str | None) -> list[Upstream]:
    """All of them, or those that pin that release; if none does, the first says which are."""
    if not version:
        return list(pins.upstreams.values())
    holding = [upstream for upstream in pins.upstreams.values() if version in upstream.releases]
    return holding or [next(iter(pins.upstreams.values()))]


def _plain(root: Path, pins: Pins, path: str) -> str:
    """The path as upstream names it, from one in build/ or overlays/, or from an absolute one in any other target."""
    plain = path.replace("\\", "/")
    if plain.startswith(("/", "../")):
        plain = os.path.realpath(plain)
    inside = plain.removeprefix(f"{root}/").removeprefix("./").rstrip("/")
    for upstream in pins.upstreams.values():
        for folder in (upstream.target, f"overlays/{upstream.name}"):
            inside = inside.removeprefix(f"{folder}/")
        if inside.startswith("/") and f"/{upstream.package}/" in inside:
            inside = upstream.package + "/" + inside.rpartition(f"/{upstream.package}/")[2]
    return inside


def _covers(wanted: str, path: str) -> bool:
    return path == wanted or path.startswith(f"{wanted}/")


def _entry(root: Path, patch: Patch, overlays: set[str]) -> dict:
    return {"upstream": patch.upstream, "slug": patch.slug, "patch": patch.path.relative_to(root).as_posix(),
            "subject": patch.subject, "body": patch.body, "trailers": patch.trailers,
            "files": [{"path": file.path, "hunks": [_hunk(hunk) for hunk in file.hunks],
                       "imports": sorted(imports(file, overlays))} for file in patch.files],
            "imports": sorted({module for file in patch.files for module in imports(file, overlays)})}


def _hunk(hunk: Hunk) -> dict:
    """Where its changes stand once this patch is in: first and last changed line, without the context. Removed lines
    stand at the line before them."""
    groups = groups_of(hunk)
    first, last = groups[0], groups[-1]
    return {"first": first.new if first.added else max(first.new - 1, 1),
            "last": max(last.new + len(last.added) - 1, 1),
            "added": sum(len(group.added) for group in groups), "removed": sum(len(group.removed) for group in groups),
            "section": hunk.section}


def imports(file: FileDiff, overlays: set[str]) -> set[str]:
    """The overlay files that the lines added to one file import."""
    added = b"\n".join(line[1:] for hunk in file.hunks for line in hunk.lines if line[:1] == b"+")
    text = added.decode("utf-8", "replace")
    found = {path for match in IMPORT.finditer(text) if (path := _module(match[1], overlays))}
    for match in FROM.finditer(text):
        names = [name.split()[0] for name in match[2].strip("()").split(",") if name.split()]
        modules = {path for name in names if (path := _module(f"{match[1]}.{name}", overlays))}
        found |= modules or {path for path in [_module(match[1], overlays)] if path}
    return found


def _module(name: str, overlays: set[str]) -> str | None:
    place = name.replace(".", "/")
    return next((path for path in (f"{place}.py", f"{place}/__init__.py") if path in overlays), None)


def _demand_upstream(root: Path, pins: Pins, path: str, version: str | None, known: set[str]) -> list[str]:
    """What is near a path of a release that no patch touches. Raises UsageError if no release has it."""
    seen, unseen, every = [], [], set(known)
    for upstream in upstreams(pins, version):
        release = upstream.release(version)
        names = source_names(root, upstream, release)
        if any(_covers(path, name) for name in names or ()):
            return _near(path, known)
        (unseen if names is None else seen).append(f"{upstream.distribution} {release.version}")
        every |= names or set()
    near = _near(path, every)
    meant = f"did you mean {' or '.join(near)}?" if near else ""
    if unseen:
        raise NeedsWork(f"no patch touches {path}; whether {' or '.join(unseen)} has it cannot be told without its "
                        "sources", remedy=" ".join([meant, "run apply.py fetch, then ask again"]).strip())
    raise UsageError(f"neither {' nor '.join(seen)} nor the overlay has a path {path}",
                     remedy=meant or "name it from the top of the source tree, as patches do")


def source_names(root: Path, upstream: Upstream, release: Release) -> set[str] | None:
    """Every path of a release, from its archive in the cache or else from build/; None if neither is there."""
    place = fetch.cached(upstream, release)
    if fetch.held(place, release.sdist):
        return archive.names(place)
    try:
        built = target.tree(upstream, root / upstream.target)
    except UsageError:
        return None
    if built.declared not in ("", release.version):
        return None
    return {path.relative_to(built.root).as_posix() for path in built.root.rglob("*") if path.is_file()}


def _near(path: str, known: set[str]) -> list[str]:
    """Paths that may be meant, the likest first: of like spelling, or of the same file name elsewhere."""
    name = path.rsplit("/", 1)[-1]
    same = {other for other in known if other.rsplit("/", 1)[-1] == name}
    alike = difflib.get_close_matches(path, sorted(known), n=NEAR)
    return sorted(same.union(alike), key=lambda one: (-difflib.SequenceMatcher(None, path, one).ratio(), one))[:NEAR]


def _lines(data: dict) -> list[str]:
    path = data["path"]
    if not data["patches"]:
        lines = [f"no patch touches {path}" + ("; it is a module of our overlay" if data["overlay"] else "")]
        lines += [f"  hooked in by {slug}" for slug in data["imported_by"]]
        return lines + ([f"  near: {', '.join(data['near'])}"] if data["near"] else [])
    lines = []
    for entry in data["patches"]:
        lines += [f"{entry['slug']} ({entry['patch']})", f"  {entry['subject']}"]
        for file in entry["files"]:
            for hunk in file["hunks"]:
                where = f"{hunk['first']}-{hunk['last']}" if hunk["first"] != hunk["last"] else str(hunk["first"])
                inside = f" in {hunk['section'].rstrip(':(')}" if SCOPE.match(hunk["section"]) else ""
                lines.append(f"  {file['path']}:{where} (+{hunk['added']} -{hunk['removed']}){inside}")
            lines += [f"  calls overlay {module}" for module in file["imports"]]
        lines += ["", *(f"  {line}".rstrip() for line in entry["body"].split("\n")), ""]
        lines += [f"  {name}: {value}" for name, found in entry["trailers"].items() for value in found]
        lines.append("")
    return lines[:-1]
