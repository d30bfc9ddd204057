"""Upstream sources: the pinned sdist through pip's configuration, or a clone of the pinned commit.

An archive lives in the cache as <sha256>/<file name>, outside the repository. Its digest is compared while it comes in
and again before every use. It gets its name only when complete, so a broken download leaves nothing behind.
"""
from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import git, progress, staging
from .errors import DirtyTarget, LockMismatch, NeedsWork, Row, UsageError
from .pins import Pins, Release, Upstream
from .ui import Result

SCRIPT = Path(__file__).with_name("pip_stream.py")
CHUNK = 1 << 20
ELSEWHERE = "let XDG_CACHE_HOME name another folder to keep archives in"
log = logging.getLogger(__name__)  # without a handler, Python prints warnings on stderr


def cache_folder() -> Path:
    """Where archives are kept: $XDG_CACHE_HOME (if absolute, as its specification says) or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~") if os.environ.get("HOME") != "" else ""  # unset: the user database knows
        if not os.path.isabs(home):
            raise UsageError("there is no home folder to keep fetched archives in",
                             remedy="set XDG_CACHE_HOME to a folder that can be written (its absolute path)")
        base = f"{home}/.cache"
    return Path(base, "zero-mismatch")


def cached(upstream: Upstream, release: Release, cache: Path | None = None) -> Path:
    """The place of the sdist in the cache, whether or not it is there. PEP 625 fixes the file's name."""
    name = re.sub(r"[-_.]+", "_", upstream.distribution).lower()
    return (cache or cache_folder()) / release.sdist / f"{name}-{release.version}.tar.gz"


def sdist(upstream: Upstream, release: Release, *, cache: Path | None = None) -> Path:
    """The pinned sdist, verified a moment ago; downloaded if the cache lacks it or holds a damaged one."""
    place = cached(upstream, release, cache)
    if not intact(place, release.sdist):
        _download(upstream, release, place)
    return place


def held(archive: Path, digest: str) -> bool:
    """Whether the archive is there with that sha256; only looks."""
    return _digest(archive) == digest


def intact(archive: Path, digest: str) -> bool:
    """The same, but an archive with another digest is moved aside, with a warning."""
    found = _digest(archive)
    if found in (None, digest):
        return found == digest
    aside = archive.with_name(f"{archive.name}.damaged-{found[:12]}")
    os.replace(archive, aside)
    log.warning("%s was damaged (sha256 %s, not %s): moved to %s, fetched anew", archive, found, digest, aside.name)
    return False


def _digest(archive: Path) -> str | None:
    """Its sha256; None if there is no such file."""
    try:
        with open(archive, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NeedsWork(f"{archive} cannot be read: {error.strerror}",
                        remedy=f"mend its permissions, or remove it, or {ELSEWHERE}") from error


def _download(upstream: Upstream, release: Release, place: Path) -> None:
    by_hand = f"or put {place.name} there by hand: {place}"
    with staging.file(place, ELSEWHERE) as pending, open(pending, "wb") as file:
        found = _stream(upstream, release, file, by_hand)
        if found != release.sdist:
            raise LockMismatch(
                f"the {upstream.distribution} {release.version} that came is not the pinned one, and was not kept",
                rows=[Row(place.name, f"sha256 {found}", f"sha256 {release.sdist}")],
                remedy=f"check the index, mirror or folder that pip is set to use; {by_hand}")


def unpinned(upstream: Upstream, version: str, *, cache: Path | None = None) -> Release:
    """A release that patchset.toml does not pin, with the digest of what pip brings, or brought once before."""
    if not re.fullmatch(r"[0-9A-Za-z.!+_-]+", version):
        raise UsageError(f"{version!r} is no version", remedy="name a release as the index does, e.g. 0.32.0")
    folder = cache or cache_folder()
    there = cached(upstream, Release(version, sdist="*"), folder).relative_to(folder)
    for place in sorted(folder.glob(str(there))):
        if len(place.parent.name) == 64 and intact(place, place.parent.name):
            return Release(version, sdist=place.parent.name)
    arrival = cached(upstream, Release(version, sdist="unpinned"), folder)
    with staging.file(arrival, ELSEWHERE) as pending, open(pending, "wb") as file:
        digest = _stream(upstream, Release(version, sdist=""), file, f"or pin {version} in patchset.toml")
    release = Release(version, sdist=digest)
    place = cached(upstream, release, folder)
    place.parent.mkdir(exist_ok=True)
    os.replace(arrival, place)
    return release


def _stream(upstream: Upstream, release: Release, file, by_hand: str) -> str:
    """Write what pip brings to `file`; its sha256. Tries one Python after another until one has a pip that can."""
    refusals = []
    for python in _pythons():
        with _running([python, "-I", str(SCRIPT), upstream.distribution, release.version, release.sdist]) as child:
            header = child.header()
            if header.get("error") == "no-pip":
                refusals.append(Row(python, header["detail"], "pip 22.0 or later"))
            elif "error" in header:
                raise _refusal(upstream, release, header, child.last_words(), by_hand)
            else:
                return child.receive(file, header["size"], f"fetch {upstream.distribution} {release.version}", by_hand)
    raise NeedsWork("no Python here has a pip that can fetch", rows=refusals,
                    remedy=f"install pip (python3 -m ensurepip, or your system's python3-pip), {by_hand}")


def _pythons() -> Iterator[str]:
    """Our own interpreter first, then those on PATH."""
    names = ["python3", "python", *(f"python3.{minor}" for minor in range(20, 6, -1))]
    yield from dict.fromkeys(path for path in [sys.executable, *map(shutil.which, names)] if path)


class _Child:
    """The running script: its header line, then its bytes."""

    def __init__(self, process: subprocess.Popen, said):
        self.process, self.said = process, said

    def header(self) -> dict:
        try:
            return json.loads(self.process.stdout.readline())
        except ValueError:
            return {"error": "no-pip", "detail": f"exit {self.process.wait()}: {self.last_words()}"}

    def receive(self, file, size: int | None, label: str, by_hand: str) -> str:
        digest, done = hashlib.sha256(), 0
        with progress.bar(label, size) as advance:
            while piece := self.process.stdout.read1(CHUNK):
                digest.update(piece)
                file.write(piece)
                done += len(piece)
                advance(len(piece))
        if self.process.wait() or (size and done != size):
            raise NeedsWork(f"the download ended early: {self.last_words() or f'{done} of {size} bytes'}",
                            remedy=f"run the command again, {by_hand}")
        return digest.hexdigest()

    def last_words(self) -> str:
        if self.said is None:
            return ""
        self.process.wait()
        self.said.seek(0)
        lines = self.said.read().decode("utf-8", "replace").strip().splitlines()
        return _without_secrets(lines[-1]) if lines else ""


@contextmanager
def _running(command: list[str]) -> Iterator[_Child]:
    """Isolated (-I): no folder named pip and no PYTHON* variable gets in. pip's own variables and files still count.

    On a terminal pip may ask for a password; otherwise what it says is kept for the error.
    """
    asking = sys.stdin is not None and sys.stdin.isatty() and progress.on_terminal()
    with tempfile.TemporaryFile() as said, subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=None if asking else subprocess.DEVNULL, stderr=None if asking else said
    ) as process:
        try:
            yield _Child(process, None if asking else said)
        finally:
            process.kill()


def _refusal(upstream: Upstream, release: Release, header: dict, said: str, by_hand: str) -> NeedsWork | LockMismatch:
    what = f"{upstream.distribution} {release.version}"
    if header["error"] == "pip":
        return NeedsWork(f"pip refuses to look for {what}: {_without_secrets(header['detail']) or said}",
                         remedy=f"mend what it names (pip config list, PIP_* variables), {by_hand}")
    if header["error"] == "other-digest":
        return LockMismatch(f"the index has another sdist of {what} than the pinned one",
                            rows=[Row(_without_secrets(header["url"]), f"sha256 {header['digest']}",
                                      f"sha256 {release.sdist}")],
                            remedy=f"check the index, mirror or folder that pip is set to use; {by_hand}")
    if header["error"] == "request":
        return NeedsWork(f"the sdist of {what} was found but did not come",
                         rows=[Row(_without_secrets(header["url"]), _without_secrets(header["detail"]), "the file")],
                         remedy=f"check network, proxy and certificates (pip config list), {by_hand}")
    versions = header["versions"]
    unread = [line for line in header["unread"] if "404 Client Error" not in line]
    rows = [_unread_row(_without_secrets(line)) for line in unread]
    if versions:
        near = difflib.get_close_matches(release.version, versions, n=4, cutoff=0)
        return NeedsWork(f"there is no sdist of {what}; near it: {', '.join(near)}", rows=rows,
                         remedy=f"pin a version that exists (patchset.toml), {by_hand}")
    if unread:
        return NeedsWork(f"no index could be read for {what}", rows=rows,
                         remedy=f"check network, proxy and certificates (pip config list), {by_hand}")
    return NeedsWork(f"no index or folder that pip is set to use has {upstream.distribution}",
                     remedy=f"see pip config list and PIP_* variables, {by_hand}")


def _unread_row(line: str) -> Row:
    """From pip's "Could not fetch URL <url>: <what>: <library's words> (Caused by <cause>) - skipping"."""
    match = re.match(r"Could not fetch URL (\S+): (.+?) - skipping$", line, re.S)
    if not match:
        return Row("(pip)", line, "an answer")
    cause = match[2].rpartition("Caused by ")[2].removesuffix(")")
    return Row(match[1], re.sub(r"<[^<>]* object at [^<>]*>[:,] ", "", cause), "an answer")


def _without_secrets(text: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]+@", "****@", text)


def clone(url: str, upstream: Upstream, release: Release, into: Path) -> str:
    """Clone the pinned tag (else commit) to `into`, which must not exist. Returns the commit, compared with the pin.

    The user's git configuration counts here, as for any clone (proxy, credentials), except what would change bytes.
    """
    if os.path.lexists(into):
        raise DirtyTarget(f"{into} exists already", remedy="remove it, or patch it: apply.py apply --from DIR")
    if not (release.tag or release.commit):
        raise UsageError(f"{upstream.name} {release.version} has neither tag nor commit in patchset.toml",
                         remedy="add one of them")
    with staging.folder(into) as folder:
        shallow = ["--depth=1", f"--branch={release.tag}"] if release.tag else []
        _git(["clone", "--no-local", "--template=", *shallow, *([] if progress.on_terminal() else ["--quiet"]),
              "--", url, str(folder)])
        if not release.tag:
            _git(["-C", str(folder), "checkout", "--quiet", "--detach", release.commit])
        head = _git(["-C", str(folder), "rev-parse", "HEAD"], quiet=True)
        if not head.startswith(release.commit):
            raise LockMismatch(f"{release.tag} of that repository is not the pinned commit, and was not kept",
                               rows=[Row(_without_secrets(url), head, release.commit)],
                               remedy="clone from upstream, or pin the commit you mean (patchset.toml)")
    return head


def _git(arguments: list[str], *, quiet: bool = False) -> str:
    git.demand()
    own = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE",
           "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX", "GIT_TEMPLATE_DIR"}
    env = {key: value for key, value in os.environ.items() if key not in own} | {"LC_ALL": "C"}
    fixed = ["core.autocrlf=false", "core.eol=lf", f"core.attributesFile={os.devnull}", f"core.hooksPath={os.devnull}",
             "core.symlinks=true", "submodule.recurse=false"]
    shown = progress.on_terminal() and not quiet  # git draws its own progress, and may ask for a password
    done = subprocess.run(["git", *(word for setting in fixed for word in ("-c", setting)), *arguments], env=env,
                          stdout=subprocess.PIPE, stderr=None if shown else subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = (done.stderr or "").strip().splitlines()
        raise NeedsWork(f"git {'clone' if 'clone' in arguments else arguments[2]} failed"
                        + (f": {_without_secrets(said[-1])}" if said else ""),
                        remedy="check the URL and that it has the pinned tag or commit, "
                               "or patch a checkout of your own: apply.py apply --from DIR")
    return done.stdout.strip()


def run(pins: Pins, upstreams: list[str], version: str | None, git_url: str | None) -> Result:
    """The verb: archives into the cache, or one clone into the upstream's target folder."""
    chosen = [pins.upstream(name) for name in upstreams]
    if (version or git_url) and len(chosen) != 1:
        raise UsageError("--version and --git are for one upstream", remedy="add --upstream NAME")
    if git_url:
        return _run_clone(pins, chosen[0], chosen[0].release(version), git_url)
    archives, lines = [], []
    for upstream in chosen:
        release = upstream.release(version)
        path = cached(upstream, release)
        was_there = intact(path, release.sdist)
        if not was_there:
            sdist(upstream, release)
        size = path.stat().st_size
        archives.append({"upstream": upstream.name, "version": release.version, "path": str(path),
                         "sha256": release.sdist, "bytes": size, "downloaded": not was_there})
        lines.append(f"{upstream.name} {release.version}: {path} ({size / 1e6:.1f} MB, sha256 {release.sdist[:12]} "
                     f"verified, {'already there' if was_there else 'downloaded'})")
    return Result({"archives": archives}, lines)


def _run_clone(pins: Pins, upstream: Upstream, release: Release, url: str) -> Result:
    into = pins.root / upstream.target
    head = clone(url, upstream, release, into)
    data = {"upstream": upstream.name, "version": release.version, "path": str(into), "commit": head,
            "commit_pinned": bool(release.commit)}
    checked = "the pinned commit" if release.commit else "its commit is not pinned"
    return Result({"clone": data}, [f"{upstream.name} {release.version}: {into} at {head[:12]} ({checked})"])
