"""Fetching: pip's own configuration says where from, the pinned digest says what is kept, and nothing is kept half."""
from __future__ import annotations

import errno
import gzip
import hashlib
import http.server
import io
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import types

import pytest
from toy_release import toy

from patchset import fetch
from patchset.errors import DirtyTarget, LockMismatch, NeedsWork, UsageError
from patchset.pins import Pins, Release, Upstream

ROOT = pathlib.Path(__file__).resolve().parents[2]


def build_sdist(folder: pathlib.Path, version: str = "1.0", filling: bytes = b"") -> pathlib.Path:
    """A toy sdist whose setup.py leaves a mark if anything ever runs it, and that asks for a Python nobody has."""
    mark = folder / "was-built"
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: toy-core\nVersion: {version}\nRequires-Python: >=3.99\n\n".encode(),
        "setup.py": f"open({str(mark)!r}, 'w').close()\n".encode(),
        "filling": filling,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"toy_core-{version}.tar.gz"
    with open(path, "wb") as out, gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(f"toy_core-{version}/{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Only what a test sets up itself can be reached, whatever pip is set to use on this machine."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def links(monkeypatch, tmp_path) -> pathlib.Path:
    folder = tmp_path / "a folder with spaces & more"
    build_sdist(folder, filling=os.urandom(300_000))
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


class Index(http.server.ThreadingHTTPServer):
    """A package index on this machine. `behaviour` may cut, change or refuse the archive; `asked` are the requests."""

    def __init__(self, archive: pathlib.Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.archive, self.asked, self.cut, self.ranges = archive, [], None, True
        self.digest, self.user, self.status, self.repeat_cut = "", None, 200, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Index

    def log_message(self, *_):
        pass

    def do_GET(self):
        index = self.server
        index.asked.append((self.path, dict(self.headers)))
        if index.user and self.headers.get("Authorization") != index.user:
            return self._send(401, b"", **{"WWW-Authenticate": "Basic"})
        if self.path == "/simple/toy-core/":
            mark = f"#sha256={index.digest}" if index.digest else ""
            href = f"../../files/{index.archive.name}{mark}"
            page = f'<a href="{href}" data-requires-python="&gt;=3.99">{index.archive.name}</a>'.encode()
            return self._send(200, page, **{"Content-Type": "text/html"})
        if self.path.startswith("/files/") and index.status == 200:
            return self._archive(index)
        return self._send(404 if index.status == 200 else index.status, b"")

    def _archive(self, index: Index):
        data, start = index.archive.read_bytes(), 0
        if index.ranges and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if index.cut is not None:
            self.wfile.write(data[start : start + index.cut])
            if not index.repeat_cut:
                index.cut = None
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _send(self, code: int, body: bytes, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def index(monkeypatch, tmp_path):
    server = Index(build_sdist(tmp_path / "served", filling=os.urandom(2_000_000)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()


def left(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_find_links_folder_is_enough_and_nothing_is_built(links, tmp_path):
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    path = fetch.sdist(upstream, release)
    assert path == tmp_path / "cache" / "zero-mismatch" / release.sdist / "toy_core-1.0.tar.gz"
    assert path.read_bytes() == (links / "toy_core-1.0.tar.gz").read_bytes()
    assert not (links / "was-built").exists() and left(tmp_path) == ["toy_core-1.0.tar.gz"]


def test_a_users_configuration_file_is_followed(links, monkeypatch, tmp_path):
    monkeypatch.delenv("PIP_FIND_LINKS")
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {links.as_uri()}\nonly-binary = :all:\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    assert fetch.sdist(upstream, release).exists()


def test_the_cache_folder_can_be_named(links, tmp_path):
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    assert fetch.sdist(upstream, release, cache=tmp_path / "mine").parent.parent == tmp_path / "mine"


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert fetch.cache_folder() == pathlib.Path.home() / ".cache" / "zero-mismatch"


def test_a_cached_archive_needs_no_pip(links, monkeypatch):
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    path = fetch.sdist(upstream, release)
    monkeypatch.setattr(fetch, "_pythons", lambda: pytest.fail("asked pip"))
    assert fetch.sdist(upstream, release) == path


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_cached_archive_is_moved_aside_told_and_fetched_again(damage, links, caplog, tmp_path):
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    path = fetch.sdist(upstream, release)
    whole = path.read_bytes()
    bad = {"cut": whole[:-1], "flip": bytes([whole[0] ^ 1]) + whole[1:], "empty": b""}[damage]
    path.write_bytes(bad)
    assert fetch.sdist(upstream, release).read_bytes() == whole
    aside = path.with_name(f"{path.name}.damaged-{hashlib.sha256(bad).hexdigest()[:12]}")
    assert aside.read_bytes() == bad
    assert "was damaged" in caplog.text and str(path) in caplog.text and aside.name in caplog.text


def test_an_archive_put_into_the_cache_by_hand_is_taken(links, monkeypatch):
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(NeedsWork) as caught:
        fetch.sdist(upstream, release)
    place = pathlib.Path(caught.value.remedy.rpartition("by hand: ")[2])
    place.write_bytes((links / "toy_core-1.0.tar.gz").read_bytes())
    assert fetch.sdist(upstream, release) == place


def test_another_archive_than_the_pinned_one_is_not_kept(links, tmp_path):
    upstream, release = toy("0" * 64)
    with pytest.raises(LockMismatch, match="not the pinned one") as caught:
        fetch.sdist(upstream, release)
    assert sha256(links / "toy_core-1.0.tar.gz") in caught.value.rows[0].found
    assert left(tmp_path) == []


def test_an_index_that_says_another_digest_is_not_even_downloaded_from(index, tmp_path):
    index.digest = sha256(index.archive)
    with pytest.raises(LockMismatch, match="another sdist"):
        fetch.sdist(*toy("0" * 64))
    assert left(tmp_path) == [] and not any(path.startswith("/files/") for path, _ in index.asked)


def test_a_candidate_with_the_pinned_digest_is_preferred_to_one_without(index, links):
    """A stale file in a find-links folder must not stand in the way of the right one on the index."""
    index.digest = sha256(index.archive)
    assert sha256(links / "toy_core-1.0.tar.gz") != index.digest
    assert sha256(fetch.sdist(*toy(index.digest))) == index.digest


def test_another_version_is_not_taken_and_the_near_ones_are_named(links):
    with pytest.raises(NeedsWork, match=r"no sdist of toy-core 1\.1; near it: 1\.0"):
        fetch.sdist(*toy("0" * 64, version="1.1"))


def test_nothing_anywhere_is_told_apart_from_an_unreachable_index(monkeypatch):
    with pytest.raises(NeedsWork, match="no index or folder that pip is set to use has toy-core"):
        fetch.sdist(*toy("0" * 64))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://name:secret@127.0.0.1:9/simple")
    with pytest.raises(NeedsWork, match="no index could be read") as caught:
        fetch.sdist(*toy("0" * 64))
    [row] = caught.value.rows
    assert "127.0.0.1:9/simple/toy-core" in row.path and "Connection refused" in row.found
    assert "secret" not in str(caught.value.as_json()) and "proxy" in caught.value.remedy


def test_an_index_without_the_project_is_not_called_unreachable(index):
    index.archive = index.archive.rename(index.archive.with_name("other-1.0.tar.gz"))
    upstream = Upstream("toy", "absent-toy", "toy_core", "build/toy", "1.0", {})
    with pytest.raises(NeedsWork, match="no index or folder"):
        fetch.sdist(upstream, Release("1.0", "0" * 64))


def test_a_setting_that_pip_refuses_is_quoted(links, monkeypatch):
    monkeypatch.setenv("PIP_TIMEOUT", "soon")
    with pytest.raises(NeedsWork, match="refuses to look for toy-core 1.0: .*soon"):
        fetch.sdist(*toy("0" * 64))


def test_credentials_of_the_index_url_are_used(index, monkeypatch):
    index.user = "Basic bmFtZTpzZWNyZXQ="  # name:secret
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//name:secret@"))
    assert fetch.sdist(*toy(sha256(index.archive))).exists()


def test_without_credentials_nothing_asks_and_the_reason_is_told(index, tmp_path):
    index.user = "Basic bmFtZTpzZWNyZXQ="
    with pytest.raises(NeedsWork):
        fetch.sdist(*toy(sha256(index.archive)))
    assert left(tmp_path) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_transfer_that_breaks_off_goes_on(ranges, index, tmp_path):
    index.cut, index.ranges = 700_000, ranges
    upstream, release = toy(sha256(index.archive))
    assert fetch.sdist(upstream, release).read_bytes() == index.archive.read_bytes()
    files = [headers for path, headers in index.asked if path.startswith("/files/")]
    assert len(files) == 2 and "Range" in files[1]


def test_a_transfer_that_keeps_breaking_off_leaves_nothing(index, tmp_path):
    index.cut, index.repeat_cut, index.ranges = 1000, True, False
    with pytest.raises(NeedsWork, match="ended early"):
        fetch.sdist(*toy(sha256(index.archive)))
    assert left(tmp_path) == []


def test_a_server_error_names_the_file_and_leaves_nothing(index, tmp_path):
    index.status = 503
    with pytest.raises(NeedsWork, match="found but did not come") as caught:
        fetch.sdist(*toy(sha256(index.archive)))
    assert "503" in caught.value.rows[0].found and index.archive.name in caught.value.rows[0].path
    assert left(tmp_path) == []


def test_a_pip_folder_in_the_working_directory_is_not_run(links, monkeypatch, tmp_path):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("raise SystemExit('ran a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert fetch.sdist(*toy(sha256(links / "toy_core-1.0.tar.gz"))).exists()


def test_another_python_is_asked_if_ours_has_no_pip(links, monkeypatch, tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    with_pip = tmp_path / "bin"
    with_pip.mkdir()
    (with_pip / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (with_pip / "python3").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    monkeypatch.setenv("PATH", str(with_pip))
    assert fetch.sdist(*toy(sha256(links / "toy_core-1.0.tar.gz"))).exists()


def test_without_any_pip_the_error_lists_what_was_tried(links, monkeypatch, tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.setattr(fetch, "_pythons", lambda: [str(bare / "bin" / "python"), "/bin/false"])
    with pytest.raises(NeedsWork, match="no Python here has a pip") as caught:
        fetch.sdist(*toy("0" * 64))
    assert "No module named 'pip'" in caught.value.rows[0].found and "exit 1" in caught.value.rows[1].found
    assert "ensurepip" in caught.value.remedy and "by hand" in caught.value.remedy


def run_in_child(code: str, **options) -> subprocess.Popen:
    """A Python of its own that imports the helpers of this folder; killed or limited without harm to the test run."""
    path = os.pathsep.join([str(ROOT), str(pathlib.Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], text=True, stderr=subprocess.PIPE,
                            env=os.environ | {"PYTHONPATH": path}, **options)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_download_leaves_nothing_that_counts_and_the_next_one_cleans_up(by, index, tmp_path):
    """The server goes quiet half way, so the kill always falls into the transfer."""
    hold = threading.Event()
    whole = index.archive.read_bytes()

    def slowly(self, _):
        self.send_response(200)
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole[:1_000_000])
        self.wfile.flush()
        hold.wait(60)

    upstream, release = toy(sha256(index.archive))
    normal, Handler._archive = Handler._archive, slowly
    try:
        child = run_in_child(f"""
            from toy_release import toy
            from patchset import fetch
            fetch.sdist(*toy({release.sdist!r}))
        """)
        folder = fetch.cached(upstream, release).parent
        deadline = time.monotonic() + 30
        while not any(p.stat().st_size for p in folder.glob(".*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(by)
        child.communicate(timeout=30)
        assert child.returncode != 0 and not fetch.cached(upstream, release).exists()
        assert by != signal.SIGINT or left(tmp_path) == []  # Python cleans up after itself only on an interrupt
    finally:
        Handler._archive = normal
        hold.set()
    assert fetch.sdist(upstream, release).read_bytes() == whole
    assert left(tmp_path) == ["toy_core-1.0.tar.gz"]


def test_no_room_for_the_archive_is_told_and_leaves_nothing(links, tmp_path):
    """A limit on file sizes is the same failed write as a full disk, and needs no rights."""
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    child = run_in_child(f"""
        import resource, signal
        from toy_release import toy
        from patchset import fetch
        from patchset.errors import NeedsWork
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            fetch.sdist(*toy({release.sdist!r}))
        except NeedsWork as error:
            raise SystemExit(error.message + " | " + error.remedy)
    """)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 1 and "File too large | raise the limit" in said
    assert left(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_told(links, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NeedsWork, match="could not be made|cannot be read") as caught:
        fetch.sdist(*toy("0" * 64))
    assert "XDG_CACHE_HOME" in caught.value.remedy


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOENT])
def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(code, links, monkeypatch):
    """Also for a release that is not pinned."""
    def refused(path, *_):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(fetch.staging, "_claim", lambda final, create: refused(final))
    for call in (lambda: fetch.sdist(*toy("0" * 64)), lambda: fetch.unpinned(toy("0" * 64)[0], "1.0")):
        with pytest.raises(NeedsWork, match=os.strerror(code)) as caught:
            call()
        assert "XDG_CACHE_HOME" in caught.value.remedy


@pytest.mark.parametrize("home", ["", "relative", None])
def test_without_a_home_folder_the_cache_has_to_be_named(home, monkeypatch):
    """An empty HOME would put it at the root of the file system, a relative one wherever the command is run."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: home or path)  # None: a user whom no database knows
    with pytest.raises(UsageError, match="no home folder") as caught:
        fetch.cache_folder()
    assert "XDG_CACHE_HOME" in caught.value.remedy


def test_the_archive_is_never_held_in_memory(index):
    """Neither here nor in pip's process, whose cache would hold it whole: both get less room than the archive takes."""
    index.archive.write_bytes(os.urandom(1 << 20) * 400)
    digest = sha256(index.archive)
    child = run_in_child(f"""
        import resource
        from patchset import fetch
        from toy_release import toy
        resource.setrlimit(resource.RLIMIT_AS, (350 << 20, 350 << 20))
        fetch.sdist(*toy({digest!r}))
    """)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said


def pins_of(upstream: Upstream, root: pathlib.Path) -> Pins:
    return Pins(root, {upstream.name: upstream}, {})


def test_the_verb_says_what_is_there_and_what_was_downloaded(links, tmp_path):
    upstream, release = toy(sha256(links / "toy_core-1.0.tar.gz"))
    first = fetch.run(pins_of(upstream, tmp_path), ["toy"], None, None)
    second = fetch.run(pins_of(upstream, tmp_path), ["toy"], None, None)
    assert [r.data["archives"][0]["downloaded"] for r in (first, second)] == [True, False]
    assert first.data["archives"][0]["sha256"] == release.sdist and first.code == 0
    assert "downloaded" in first.lines[0] and "already there" in second.lines[0]


def test_the_verb_refuses_a_version_or_a_url_for_several_upstreams(tmp_path):
    upstream, _ = toy("0" * 64)
    other, _ = toy("0" * 64)
    pins = Pins(tmp_path, {"toy": upstream, "other": other}, {})
    for version, url in (("1.0", None), (None, "x")):
        with pytest.raises(UsageError, match="for one upstream"):
            fetch.run(pins, ["toy", "other"], version, url)


@pytest.fixture
def origin(tmp_path):
    """A repository with a tagged commit and one more after it."""
    folder = tmp_path / "origin repository"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x.invalid", "-c", "init.defaultBranch=main", "-C", folder]
    folder.mkdir()
    subprocess.run([*git, "init", "-q"], check=True)
    (folder / "a.py").write_bytes(b"one\n")
    (folder / "dos.txt").write_bytes(b"one\r\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "1"], check=True)
    subprocess.run([*git, "tag", "v1.0"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "a.py").write_bytes(b"two\n")
    subprocess.run([*git, "commit", "-qam", "2"], check=True)
    return types.SimpleNamespace(url=str(folder), head=head)


def test_a_clone_is_the_pinned_tag_with_a_clean_index(origin, tmp_path):
    upstream, release = toy("0" * 64, tag="v1.0", commit=origin.head[:9])
    into = tmp_path / "build" / "toy"
    assert fetch.clone(origin.url, upstream, release, into) == origin.head
    assert (into / "a.py").read_bytes() == b"one\n" and (into / "dos.txt").read_bytes() == b"one\r\n"
    status = subprocess.run(["git", "-C", into, "status", "--porcelain"], capture_output=True, check=True).stdout
    assert status == b""


def test_a_users_git_settings_and_hooks_do_not_change_the_clone(origin, tmp_path, monkeypatch):
    home = tmp_path / "home"
    hooks = home / "template" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text("#!/bin/sh\necho changed > a.py\n")
    (hooks / "post-checkout").chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf\n")
    (home / ".gitconfig").write_text(
        f"[core]\n\tautocrlf = true\n\tattributesFile = {home}/attributes\n\thooksPath = {hooks}\n"
        f"[init]\n\ttemplateDir = {home}/template\n[clone]\n\tdefaultRemoteName = elsewhere\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "not-this-one"))
    upstream, release = toy("0" * 64, tag="v1.0", commit=origin.head)
    fetch.clone(origin.url, upstream, release, tmp_path / "toy")
    assert (tmp_path / "toy" / "a.py").read_bytes() == b"one\n"
    assert (tmp_path / "toy" / "dos.txt").read_bytes() == b"one\r\n"


def test_a_commit_without_a_tag_is_cloned_too(origin, tmp_path):
    upstream, release = toy("0" * 64, commit=origin.head[:9])
    assert fetch.clone(origin.url, upstream, release, tmp_path / "toy") == origin.head
    assert (tmp_path / "toy" / "a.py").read_bytes() == b"one\n"


def test_a_moved_tag_is_refused_and_nothing_is_kept(origin, tmp_path):
    upstream, release = toy("0" * 64, tag="v1.0", commit="4ba787ec9")
    into = tmp_path / "build" / "toy"
    with pytest.raises(LockMismatch, match="not the pinned commit") as caught:
        fetch.clone(origin.url, upstream, release, into)
    assert caught.value.rows[0].found == origin.head and list(into.parent.iterdir()) == []


def test_a_missing_tag_or_repository_quotes_git(origin, tmp_path):
    upstream, release = toy("0" * 64, tag="v9")
    for url, words in ((origin.url, "v9"), (str(tmp_path / "nowhere"), "nowhere")):
        with pytest.raises(NeedsWork, match=words):
            fetch.clone(url, upstream, release, tmp_path / "build" / "toy")
    assert list((tmp_path / "build").iterdir()) == []


def test_an_existing_folder_is_not_cloned_over(origin, tmp_path):
    upstream, release = toy("0" * 64, tag="v1.0")
    with pytest.raises(DirtyTarget, match="exists already"):
        fetch.clone(origin.url, upstream, release, tmp_path)


def test_a_url_that_looks_like_an_option_is_a_url(tmp_path):
    upstream, release = toy("0" * 64, tag="v1.0")
    with pytest.raises(NeedsWork):
        fetch.clone(f"--upload-pack=touch {tmp_path}/ran", upstream, release, tmp_path / "toy")
    assert not (tmp_path / "ran").exists()


def test_the_verb_clones_into_the_target_folder(origin, tmp_path):
    upstream, _ = toy("0" * 64, tag="v1.0", commit=origin.head[:9])
    result = fetch.run(pins_of(upstream, tmp_path), ["toy"], None, origin.url)
    assert result.data["clone"]["commit"] == origin.head
    assert (tmp_path / "build" / "toy" / "a.py").exists() and "the pinned commit" in result.lines[0]
