"""What the delivery tests share: a copy of this checkout, the real releases as targets, an exact look at a target."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from patchset import archive, fetch, pins
from patchset.errors import NeedsWork

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = ["apply.py", "patchset", "patchset.toml", "patchset.lock", "patches", "overlays"]
# A wheel is chosen for the machines that the pinned ones are built for, whatever machine the test runs on.
PLATFORM = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.12",
            "--platform", "manylinux_2_28_x86_64"]
Snapshot = dict[str, tuple[int, str]]


class Checkout:
    """A copy of this checkout, so that `build/` and edits of the series stay out of ours.

    `env` has a folder of its own for temporary files: a killed run leaves its shadow repository there.
    """

    def __init__(self, folder: Path):
        self.root = folder
        folder.mkdir()
        temporary = folder.with_name(folder.name + "-tmp")
        temporary.mkdir()
        self.env = os.environ | {"TMPDIR": str(temporary)}
        for name in CHECKOUT:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)

    @property
    def pins(self) -> pins.Pins:
        return pins.load(self.root)

    def command(self, *arguments) -> list[str]:
        return [sys.executable, str(self.root / "apply.py"), *map(str, arguments), "--json"]

    def run(self, *arguments, code: int = 0, **options) -> dict:
        """Run a verb; its JSON once it has exited with `code`."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, env=self.env,
                              **options)
        assert done.returncode == code, f"exit {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return json.loads(done.stdout)

    def refused(self, *arguments, code: int, **options) -> dict:
        """Run a verb that must refuse; the error it gives."""
        said = self.run(*arguments, code=code, **options)
        return said.get("error") or next(one["error"] for one in said["targets"] if "error" in one)


@functools.lru_cache(maxsize=200_000)
def _digest(path: str, device: int, inode: int, size: int, mtime: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def snapshot(root: Path, *, leave_out: tuple[str, ...] = (), fresh: bool = False) -> Snapshot:
    """Everything under root: type and mode, and the sha256 of a file, the target of a link, '' for a folder.

    A file that was hashed before is known again by inode, size and time; `fresh` hashes all of them.
    """
    found: Snapshot = {}
    digest = _digest.__wrapped__ if fresh else _digest
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in leave_out]
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            content = ""
            if stat.S_ISREG(info.st_mode):
                content = digest(path, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            found[os.path.relpath(path, root)] = (info.st_mode, content)
    return found


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """The paths that differ, for a message; empty if the snapshots are equal."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def assert_same(before: Snapshot, after: Snapshot, what: str) -> None:
    differing = difference(before, after)
    assert not differing, f"{what}: {len(differing)} paths differ, first {differing[0]}: " \
                          f"{before.get(differing[0])} before, {after.get(differing[0])} after"


def link_copy(source: Path, copy: Path) -> Path:
    """A copy whose files are hard links to the originals: nothing may ever be written into them."""
    return Path(shutil.copytree(source, copy, copy_function=os.link, symlinks=True))


class Store:
    """The real releases, fetched and unpacked once; tests work on copies. `check` tells whether any was touched."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pins = pins.load(ROOT)
        self.taken: dict[Path, Snapshot] = {}

    def tree(self, name: str, version: str | None = None) -> Path:
        """The unpacked sdist."""
        upstream = self.pins.upstream(name)
        release = upstream.release(version)
        return self._made(f"{name}-{release.version}", lambda into: archive.unpack(sdist(upstream, release), into))

    def site(self) -> Path:
        """Both wheels in one folder, by pip install --target."""
        return self._made("site", lambda into: pip(
            "install", "--no-deps", "--no-index", "--no-compile", "--ignore-requires-python", *PLATFORM,
            "--target", into, *(wheel(upstream) for upstream in self.pins.standard())))

    def repository(self) -> Path:
        """vLLM's tree as the one commit of a repository. Look at a copy: `git status` rewrites the index."""
        return self._made("repository", lambda into: make_repository(link_copy(self.tree("vllm"), into)))

    def _made(self, name: str, make) -> Path:
        place = self.folder / name
        if place not in self.taken:
            make(place)
            self.taken[place] = snapshot(place)
        return place

    def check(self) -> None:
        for place, before in self.taken.items():
            assert_same(before, snapshot(place, fresh=True), f"written through to the originals in {place.name}")


def git(folder: Path, *arguments) -> str:
    """git without the configuration of this machine's user."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "x", "GIT_COMMITTER_NAME": "x",
        "GIT_AUTHOR_EMAIL": "x@x.invalid", "GIT_COMMITTER_EMAIL": "x@x.invalid"}
    settings = ["-c", "gc.auto=0", "-c", "core.compression=0"]  # nothing in the background, and quickly
    return subprocess.run(["git", *settings, "-C", str(folder), *arguments], env=env, check=True, capture_output=True,
                          text=True).stdout


def make_repository(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-qm", "release")
    git(folder, "tag", "released")


def sdist(upstream: pins.Upstream, release: pins.Release) -> Path:
    try:
        return fetch.sdist(upstream, release)
    except NeedsWork as error:
        if "no index could be read" not in error.message:
            raise
        pytest.skip(f"offline: {error.message}")


def wheel(upstream: pins.Upstream) -> Path:
    """The pinned wheel, brought by pip and kept in the same cache, by digest."""
    release = upstream.release()
    folder = fetch.cache_folder() / release.wheel
    for path in folder.glob("*.whl"):
        if fetch.intact(path, release.wheel):
            return path
    incoming = folder / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    pip("download", "--no-deps", *PLATFORM, "--dest", incoming, f"{upstream.distribution}=={release.version}")
    [path] = incoming.iterdir()
    assert fetch.intact(path, release.wheel), f"{path.name} is not the pinned wheel"
    place = path.rename(folder / path.name)
    incoming.rmdir()
    return place


def pip(*arguments) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
                          capture_output=True, text=True, check=False)
    if done.returncode and "NewConnectionError" in done.stderr:
        pytest.skip(f"offline: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]


@contextlib.contextmanager
def mounted(place: Path, *arguments):
    """A mount for the time of a test; skips where that is not permitted."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *map(str, arguments), str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
