"""A release that nobody has pinned: what pip brings, under its own digest, fetched once."""
from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from patchset import fetch
from patchset.errors import LockMismatch, NeedsWork, UsageError
from patchset.pins import Release, Upstream


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A folder that pip is set to use, with one sdist in it."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    place = tmp_path / "shelf"
    place.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    put(place, b"one")
    return place


def put(shelf: Path, filling: bytes) -> str:
    path = shelf / "toy_core-2.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("toy_core-2.0/PKG-INFO")
        info.size = len(filling)
        archive.addfile(info, io.BytesIO(filling))
    return hashlib.sha256(path.read_bytes()).hexdigest()


UPSTREAM = Upstream("toy", "toy-core", "toy_core", "build/toy", "1.0", {"1.0": Release("1.0", "0" * 64)})


def test_it_comes_with_its_own_digest_and_is_kept_under_it(shelf, tmp_path):
    digest = hashlib.sha256((shelf / "toy_core-2.0.tar.gz").read_bytes()).hexdigest()
    release = fetch.unpinned(UPSTREAM, "2.0", cache=tmp_path / "cache")
    assert (release.version, release.sdist) == ("2.0", digest)
    cache = tmp_path / "cache"
    files = [path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()]
    assert files == [f"{digest}/toy_core-2.0.tar.gz"]
    kept = fetch.sdist(UPSTREAM, release, cache=cache)
    assert kept.read_bytes() == (shelf / "toy_core-2.0.tar.gz").read_bytes()


def test_it_is_fetched_once_and_again_if_the_cache_was_damaged(shelf, tmp_path):
    first = fetch.unpinned(UPSTREAM, "2.0", cache=tmp_path / "cache")
    later = put(shelf, b"two")
    assert fetch.unpinned(UPSTREAM, "2.0", cache=tmp_path / "cache") == first
    fetch.cached(UPSTREAM, first, tmp_path / "cache").write_bytes(b"damaged")
    assert fetch.unpinned(UPSTREAM, "2.0", cache=tmp_path / "cache").sdist == later != first.sdist


def test_a_pinned_digest_is_still_insisted_on(shelf, tmp_path):
    with pytest.raises(LockMismatch):
        fetch.sdist(UPSTREAM, Release("2.0", "0" * 64), cache=tmp_path / "cache")


@pytest.mark.parametrize("version, error", [("3.0", NeedsWork), ("2.*", UsageError), ("../2.0", UsageError)])
def test_what_is_no_release_is_refused_and_leaves_nothing(shelf, tmp_path, version, error):
    with pytest.raises(error):
        fetch.unpinned(UPSTREAM, version, cache=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
