"""patchset.toml: the upstreams, their pinned releases, and the profiles. Unknown keys are refused by name."""
from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import UsageError

SCHEMA = 1


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
class Pins:
    root: Path
    upstreams: dict[str, Upstream]
    profiles: dict[str, Profile]

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


def _checked(where: str, table: dict, allowed: set[str], required: set[str]) -> dict:
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(allowed))}"
            raise UsageError(f"patchset.toml: unknown key {key!r} in {where}", remedy=hint)
    missing = required - set(table)
    if missing:
        raise UsageError(f"patchset.toml: {where} lacks {', '.join(sorted(missing))}", remedy="add the missing keys")
    return table


def _release(upstream: str, version: str, table: dict) -> Release:
    names = {field.name for field in fields(Release)} - {"version"}
    _checked(f"upstream.{upstream}.release.{version}", table, names, {"sdist"})
    for kind in ("sdist", "wheel"):
        digest = table.get(kind, "")
        if digest and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
            raise UsageError(
                f"patchset.toml: {kind} of {upstream} {version} is no sha256", remedy="write the full 64 hex digits"
            )
    return Release(version=version, **table)


def load(root: Path) -> Pins:
    """Read `root`/patchset.toml. Raises UsageError naming the key at fault."""
    path = root / "patchset.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", remedy="run apply.py from a zero-mismatch checkout") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"patchset.toml is not TOML: {error}", remedy="mend the line it names") from None
    _checked("the top level", data, {"schema", "upstream", "profile"}, {"schema", "upstream", "profile"})
    if data["schema"] != SCHEMA:
        raise UsageError(f"patchset.toml has schema {data['schema']}, this tool reads {SCHEMA}", remedy="update it")
    upstreams = {}
    for name, table in data["upstream"].items():
        keys = {"distribution", "package", "target", "version", "release"}
        _checked(f"upstream.{name}", table, keys, keys)
        releases = {v: _release(name, v, r) for v, r in table["release"].items()}
        upstreams[name] = Upstream(name, table["distribution"], table["package"], table["target"],
                                   table["version"], releases)
        upstreams[name].release()
    profiles = {}
    for name, table in data["profile"].items():
        _checked(f"profile.{name}", table, {"upstreams", "arch"}, {"upstreams", "arch"})
        for upstream in table["upstreams"]:
            _choose("upstream", upstream, upstreams)
        profiles[name] = Profile(name, tuple(table["upstreams"]), tuple(table["arch"]))
    return Pins(root, upstreams, profiles)
