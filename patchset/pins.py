"""patchset.toml: the upstreams, their pinned releases, and the profiles. Unknown keys are refused by name."""
from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import UsageError
from .paths import why_unsafe

SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")
VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.!+_-]*")  # it becomes a part of file names
NUMBER, TEXT, TEXTS, TABLE, FLAG = "a number", "a text", "a list of texts", "a table", "true or false"
KINDS = {
    NUMBER: lambda value: type(value) is int,
    TEXT: lambda value: isinstance(value, str),
    TEXTS: lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    TABLE: lambda value: isinstance(value, dict),
    FLAG: lambda value: isinstance(value, bool),
}


@dataclass(frozen=True)
class Release:
    """One pinned release. Digests are sha256 in hex; `commit` may be a prefix, as the upstream's sdist records it."""

    version: str
    sdist: str
    tag: str = ""
    commit: str = ""
    wheel: str = ""


@dataclass(frozen=True)
class Upstream:
    name: str
    distribution: str
    package: str
    target: str
    version: str
    releases: dict[str, Release]
    optional: bool = False  # taken only where it is named

    def release(self, version: str | None = None) -> Release:
        version = version or self.version
        if version not in self.releases:
            known = ", ".join(sorted(self.releases))
            raise UsageError(
                f"{self.name} {version} is not pinned", remedy=f"pinned releases: {known} (patchset.toml)"
            )
        return self.releases[version]


@dataclass(frozen=True)
class Profile:
    name: str
    upstreams: tuple[str, ...]
    arch: tuple[str, ...]


@dataclass(frozen=True)
class Image:
    """What the container image needs beyond the upstreams: docker/ reads it."""

    python: str
    arch: tuple[str, ...]
    trainer: tuple[str, ...]


@dataclass(frozen=True)
class Pins:
    root: Path
    upstreams: dict[str, Upstream]
    profiles: dict[str, Profile]
    image: Image | None = None

    def standard(self, names: Iterable[str] | None = None) -> list[Upstream]:
        """Those of `names` (default: all) that are taken when nobody names one."""
        return [one for one in map(self.upstream, self.upstreams if names is None else names) if not one.optional]

    def upstream(self, name: str) -> Upstream:
        return self.upstreams[_choose("upstream", name, self.upstreams)]

    def profile(self, name: str) -> Profile:
        return self.profiles[_choose("profile", name, self.profiles)]


def _choose(what: str, name: str, known) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    raise UsageError(
        f"no {what} named {name!r}",
        remedy=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}",
    )


def _checked(where: str, table, kinds: dict[str, str], required: set[str]) -> dict:
    """The table itself. Raises UsageError naming a key that is unknown, lacking, or not of the kind it should be."""
    if not isinstance(table, dict):
        raise UsageError(f"patchset.toml: {where} is not a table", remedy=f"write it as [{where}]")
    for key, value in table.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(kinds))}"
            raise UsageError(f"patchset.toml: unknown key {key!r} in {where}", remedy=hint)
        if not KINDS[kinds[key]](value):
            raise UsageError(f"patchset.toml: {key} in {where} is not {kinds[key]}: {value!r}", remedy="mend it")
    missing = required - set(table)
    if missing:
        raise UsageError(f"patchset.toml: {where} lacks {', '.join(sorted(missing))}", remedy="add the missing keys")
    return table


def _release(upstream: str, version: str, table: dict) -> Release:
    where = f"upstream.{upstream}.release.{version}"
    if not VERSION.fullmatch(version):
        raise UsageError(f"patchset.toml: {version!r} in upstream.{upstream} is no version", remedy="mend it")
    _checked(where, table, {field.name: TEXT for field in fields(Release) if field.name != "version"}, {"sdist"})
    for kind in ("sdist", "wheel"):
        digest = table.get(kind, "")
        if (digest or kind == "sdist") and not DIGEST.fullmatch(digest):
            raise UsageError(f"patchset.toml: {kind} in {where} is no sha256", remedy="write the full 64 hex digits")
    return Release(version=version, **table)


def _upstream(name: str, table: dict) -> Upstream:
    kinds = {"distribution": TEXT, "package": TEXT, "target": TEXT, "version": TEXT, "release": TABLE}
    _checked(f"upstream.{name}", table, kinds | {"optional": FLAG}, set(kinds))
    for key in ("package", "target"):
        if reason := why_unsafe(table[key]):
            raise UsageError(f"patchset.toml: {key} in upstream.{name} leads elsewhere ({reason})",
                             remedy="write a plain relative path")
    releases = {version: _release(name, version, one) for version, one in table["release"].items()}
    found = Upstream(name, table["distribution"], table["package"], table["target"], table["version"], releases,
                     table.get("optional", False))
    found.release()
    return found


def load(root: Path) -> Pins:
    """Read `root`/patchset.toml. Raises UsageError naming the key at fault."""
    path = root / "patchset.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", remedy="run apply.py from a zero-mismatch checkout") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"patchset.toml is not TOML: {error}", remedy="mend the line it names") from None
    top = {"schema": NUMBER, "upstream": TABLE, "profile": TABLE, "image": TABLE}
    _checked("the top level", data, top, set(top) - {"image"})
    if data["schema"] != SCHEMA:
        raise UsageError(f"patchset.toml has schema {data['schema']}, this tool reads {SCHEMA}", remedy="update it")
    upstreams = {name: _upstream(name, table) for name, table in data["upstream"].items()}
    profiles = {}
    for name, table in data["profile"].items():
        kinds = {"upstreams": TEXTS, "arch": TEXTS}
        _checked(f"profile.{name}", table, kinds, set(kinds))
        for upstream in table["upstreams"]:
            _choose("upstream", upstream, upstreams)
        profiles[name] = Profile(name, tuple(table["upstreams"]), tuple(table["arch"]))
    return Pins(root, upstreams, profiles, _image(data["image"]) if "image" in data else None)


def _image(table: dict) -> Image:
    kinds = {"python": TEXT, "arch": TEXTS, "trainer": TEXTS}
    _checked("image", table, kinds, set(kinds))
    return Image(table["python"], tuple(table["arch"]), tuple(table["trainer"]))
