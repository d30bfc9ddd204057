"""Where a delivery goes: a source tree (unpacked sdist or git checkout) or an installed package in a site folder.

A target is a folder that holds the upstream's package. Its state lives beside it: `.zero-mismatch/` in a tree (with a
`.gitignore` of its own, so a checkout stays clean), `<dist-info>/zero_mismatch/` in a site folder (listed in RECORD, so
uninstalling removes it).
"""
from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import git, jsonfile
from .errors import DirtyTarget, LockMismatch, NeedsWork, Row, UsageError
from .pins import Pins, Release, Upstream

TREE_STATE = ".zero-mismatch"
SITE_STATE = "zero_mismatch"
INSTALLED = (".dist-info", ".egg-info")  # <name with _>-<version>; an egg has no RECORD and is refused for that


@dataclass(frozen=True)
class Target:
    """root: the folder above the package. declared: the version it says it is, '' if it does not. record: RECORD."""

    upstream: Upstream
    root: Path
    declared: str
    record: str | None = None

    @property
    def kind(self) -> str:
        return "site" if self.record else "tree"

    @property
    def state(self) -> str:
        """The state folder, relative to root, with '/'."""
        return f"{Path(self.record).parent.as_posix()}/{SITE_STATE}" if self.record else TREE_STATE

    def release(self, version: str | None) -> Release:
        """The pinned release this target holds. Raises LockMismatch on another version."""
        pinned = self.upstream.releases
        declared = self.declared.split("+")[0]
        if version and declared and declared != version:
            raise LockMismatch(f"{self.root} holds {self.upstream.name} {self.declared}, not {version}",
                               remedy="name the version it holds, or another folder",
                               rows=[Row(str(self.root), self.declared, version)])
        if declared and declared not in pinned:
            raise LockMismatch(
                f"{self.root} holds {self.upstream.name} {self.declared}, a wrong version",
                remedy=f"take one of {', '.join(pinned)}, or move the series: "
                       f"apply.py rebase --upstream {self.upstream.name} --to {declared}",
                rows=[Row(str(self.root), self.declared, " or ".join(pinned))])
        return self.upstream.release(version or declared or None)

    @contextmanager
    def locked(self, *, write: bool):
        """Hold the target alone (write) or with other readers. Locks the folder itself, so nothing is created."""
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise NeedsWork(f"another apply.py is at work on {self.root}",
                            remedy="wait until it has ended, then run the command again") from None
        try:
            yield self
        finally:
            os.close(handle)


def tree(upstream: Upstream, folder: Path) -> Target:
    """A source tree of that upstream. Raises UsageError if the folder holds no such package."""
    root = folder.resolve()
    if not (root / upstream.package).is_dir():
        raise UsageError(f"{folder} holds no {upstream.package}/ folder",
                         remedy=f"name the top of a {upstream.distribution} source tree")
    return Target(upstream, root, _tree_version(upstream, root))


def identify(pins: Pins, folder: Path, names: list[str]) -> Target:
    """Which of the upstreams `folder` is a source tree of, by the project name it declares."""
    root = folder.resolve()
    if not root.is_dir():
        raise UsageError(f"{folder} is no folder", remedy="name the top of a source tree")
    project = _project_name(root)
    for name in names:
        upstream = pins.upstream(name)
        if project == _normal(upstream.distribution):
            return tree(upstream, root)
    raise UsageError(f"{folder} is no source tree of {' or '.join(names)}: it declares {project or 'no project'}",
                     remedy="name the folder that holds pyproject.toml; for installed wheels use --installed or --site")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _project_name(root: Path) -> str:
    try:
        return _normal(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])
    except (FileNotFoundError, KeyError, TypeError, ValueError, RecursionError):  # there is none, or it names none
        return _normal(_field(root / "PKG-INFO", "Name"))


def _field(path: Path, key: str) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    match = re.search(rf"^{key}: (.+)$", text.split("\n\n", 1)[0], re.MULTILINE)
    return match[1].strip() if match else ""


def _tree_version(upstream: Upstream, root: Path) -> str:
    """An sdist says it in PKG-INFO; a checkout by its commit; megatron-core also in package_info.py; else unknown."""
    if version := _field(root / "PKG-INFO", "Version"):
        return version
    info = root / upstream.package / "core" / "package_info.py"
    if info.exists():
        parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", info.read_text(encoding="utf-8"), re.MULTILINE))
        if len(parts) == 3:
            return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    if (root / ".git").exists():
        git.demand()
        done = subprocess.run(["git", f"--git-dir={root / '.git'}", "rev-parse", "HEAD"], capture_output=True,
                              text=True, env=git.environment(), check=False)
        for release in upstream.releases.values():
            if release.commit and done.stdout.startswith(release.commit):
                return release.version
    return ""


def site(upstream: Upstream, folder: Path) -> Target | None:
    """The upstream as installed in a site folder, or None. Raises DirtyTarget if editable or without RECORD."""
    root = folder.resolve()
    found = [path for kind in INSTALLED for path in sorted(root.glob(f"*{kind}"))
             if _normal(path.name.removesuffix(kind).split("-")[0]) == _normal(upstream.distribution)]
    if not found:
        return None
    if len(found) > 1:
        raise DirtyTarget(f"{folder} holds {len(found)} versions of {upstream.distribution}",
                          remedy="remove all but one dist-info folder",
                          rows=[Row(str(path), path.name, "one version") for path in found])
    [info] = found
    if _editable(info):
        raise DirtyTarget(f"{upstream.distribution} is an editable install",
                          remedy="patch the checkout it points to: apply.py apply --from DIR")
    if not (info / "RECORD").exists():
        raise _broken(info, "has no RECORD")
    version = _field(info / "METADATA", "Version")
    if not version:
        raise _broken(info, "names no version in METADATA")
    return Target(upstream, root, version, f"{info.name}/RECORD")


def _editable(info: Path) -> bool:
    """By direct_url.json, where pip notes an installation from elsewhere than an index."""
    try:
        return bool(jsonfile.read(info / "direct_url.json").get("dir_info", {}).get("editable"))
    except FileNotFoundError:
        return False
    except jsonfile.WRONG:
        raise _broken(info, "has a damaged direct_url.json") from None


def _broken(info: Path, what: str) -> DirtyTarget:
    return DirtyTarget(f"{info.name} {what}, so what is installed cannot be told",
                       remedy="install the wheel again with pip")


def site_folders(python: str) -> list[Path]:
    """The site folders of an interpreter, as it reports them itself."""
    code = "import sysconfig,json; p=sysconfig.get_paths(); print(json.dumps(sorted({p['purelib'], p['platlib']})))"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"{python} is no working Python: {error}", remedy="name an interpreter, e.g. .venv/bin/python"
                         ) from None
    return [Path(p) for p in json.loads(done.stdout)]
