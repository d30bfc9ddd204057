"""An sdist is unpacked exactly, or refused by name with nothing left behind; nothing ever lands outside its folder."""
from __future__ import annotations

import fcntl
import gzip
import io
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchset import archive
from patchset.errors import DirtyTarget, LockMismatch, NeedsWork
from patchset.shadow import File


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = "",
           pax: dict | None = None) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.mode, info.linkname = len(data), kind, mode, link
    info.pax_headers = pax or {}
    return info, data


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.DIRTYPE, mode=0o755)


def pack(path, *members, form: int = tarfile.PAX_FORMAT):
    with tarfile.open(path, "w:gz", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def pack_raw(path, tar: bytes):
    path.write_bytes(gzip.compress(tar))
    return path


def tar_bytes(*members, form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def tree(root) -> dict:
    return {path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
            for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def sdist(tmp_path):
    return pack(tmp_path / "toy-1.tar.gz", folder("toy-1"), folder("toy-1/empty"), member("toy-1/a.py", b"a\n"),
                member("toy-1/deep/er/run.sh", b"#!/bin/sh\n", mode=0o755), member("toy-1/big", bytes(3_000_000)))


def test_unpacks_bytes_modes_and_empty_folders(sdist, tmp_path):
    old = os.umask(0o022)
    try:
        archive.unpack(sdist, tmp_path / "out")
    finally:
        os.umask(old)
    assert tree(tmp_path / "out") == {"a.py": (b"a\n", 0o644), "deep/er/run.sh": (b"#!/bin/sh\n", 0o755),
                                      "big": (bytes(3_000_000), 0o644)}
    assert (tmp_path / "out" / "empty").is_dir()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_reads_files_without_the_top_folder(sdist):
    assert archive.read_files(sdist) == {"a.py": File(b"a\n"), "deep/er/run.sh": File(b"#!/bin/sh\n", "100755"),
                                         "big": File(bytes(3_000_000))}


def test_reads_only_what_is_wanted_and_stops_there(sdist):
    whole = sdist.read_bytes()
    sdist.write_bytes(whole[: len(whole) - 8])  # without the gzip trailer: reading on to the end would fail
    assert archive.read_files(sdist, {"a.py"}) == {"a.py": File(b"a\n")}
    with pytest.raises(LockMismatch, match="damaged"):
        archive.read_files(sdist, {"a.py", "absent"})


def test_a_wanted_file_that_is_absent_is_left_out(sdist):
    assert archive.read_files(sdist, {"a.py", "absent", "empty"}) == {"a.py": File(b"a\n")}


def test_an_existing_folder_is_never_unpacked_into(sdist, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(DirtyTarget, match="exists already"):
        archive.unpack(sdist, tmp_path / "out")
    os.rmdir(tmp_path / "out")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirtyTarget, match="exists already"):
        archive.unpack(sdist, tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()


HOSTILE = {
    "parent": (member("toy-1/../../evil"), "'..'"),
    "parent alone": (member("../evil"), "'..'"),
    "absolute": (member("/evil"), "absolute"),
    "other top folder": (member("evil/x"), "outside the top folder"),
    "file as top folder": (member("toy-1"), "top folder"),
    "dot": (member("toy-1/./x"), "'.'"),
    "empty part": (member("toy-1//x"), "''"),
    "git folder": (member("toy-1/.git/config"), ".git"),
    "git folder in another case": (member("toy-1/sub/.GIT/hooks/post-checkout"), ".git"),
    "backslash": (member("toy-1/..\\evil"), "backslash"),
    "newline": (member("toy-1/a\nb"), "control"),
    "symbolic link": (member("toy-1/l", kind=tarfile.SYMTYPE, link="../../etc"), "symbolic link"),
    "symbolic link as folder": (member("toy-1/l/", kind=tarfile.SYMTYPE, link="/etc"), "symbolic link"),
    "hard link": (member("toy-1/l", kind=tarfile.LNKTYPE, link="toy-1/a"), "hard link"),
    "character device": (member("toy-1/null", kind=tarfile.CHRTYPE), "device"),
    "block device": (member("toy-1/disk", kind=tarfile.BLKTYPE), "device"),
    "pipe": (member("toy-1/fifo", kind=tarfile.FIFOTYPE), "pipe"),
    "duplicate": (member("toy-1/a", b"other"), "twice"),
    "folder in the place of a file": (folder("toy-1/a"), "twice"),
    "file under a file": (member("toy-1/a/b"), "twice"),
    "file in the place of a folder": (member("toy-1/sub"), "twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_entry_is_refused_and_nothing_is_kept(name, tmp_path):
    bad, reason = HOSTILE[name]
    inside = tmp_path / "inside"
    inside.mkdir()
    path = pack(inside / "toy-1.tar.gz", folder("toy-1"), member("toy-1/a", b"a"), member("toy-1/sub/b", b"b"), bad,
                member("toy-1/z", b"z"))
    with pytest.raises(DirtyTarget) as caught:
        archive.unpack(path, inside / "out")
    assert reason in caught.value.rows[0].found
    assert [p.name for p in inside.iterdir()] == ["toy-1.tar.gz"] and [p.name for p in tmp_path.iterdir()] == ["inside"]


def test_names_that_differ_in_case_are_two_files_or_a_refusal(tmp_path):
    path = pack(tmp_path / "toy-1.tar.gz", member("toy-1/Readme", b"1"), member("toy-1/README", b"2"))
    (tmp_path / "probe").touch()
    if (tmp_path / "PROBE").exists():
        with pytest.raises(DirtyTarget, match="another case"):
            archive.unpack(path, tmp_path / "out")
    else:
        archive.unpack(path, tmp_path / "out")
        assert {name: data for name, (data, _) in tree(tmp_path / "out").items()} == {"Readme": b"1", "README": b"2"}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_unusual_names_come_through_in_every_format(form, tmp_path):
    names = ["with space", "ünïcødé", "quote'\"", "-dash", "$(x)", "tilde~", "a" * 90 + "/" + "b" * 90, "e\u0301", " "]
    path = pack(tmp_path / "toy-1.tar.gz", *(member(f"toy-1/{name}", name.encode()) for name in names), form=form)
    archive.unpack(path, tmp_path / "out")
    assert {name: data for name, (data, _) in tree(tmp_path / "out").items()} == {n: n.encode() for n in names}


def test_a_name_that_is_not_utf8_keeps_its_bytes(tmp_path):
    with tarfile.open(tmp_path / "toy-1.tar.gz", "w:gz", format=tarfile.USTAR_FORMAT, encoding="latin-1") as tar:
        tar.addfile(member("toy-1/caf\xe9")[0])
    archive.unpack(tmp_path / "toy-1.tar.gz", tmp_path / "out")
    assert os.listdir(os.fsencode(tmp_path / "out")) == [b"caf\xe9"]


def test_a_global_header_as_git_archive_writes_it_is_ignored(tmp_path):
    path = tmp_path / "toy-1.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, pax_headers={"comment": "4ba787ec9"}) as tar:
        tar.addfile(member("toy-1/a", b"a")[0], io.BytesIO(b"a"))
    assert archive.read_files(path) == {"a": File(b"a")}


@pytest.mark.parametrize("cut", [1, 8, 9, 400, 5000, 20_000])
def test_a_truncated_archive_is_refused(cut, tmp_path):
    path = pack(tmp_path / "toy-1.tar.gz", *(member(f"toy-1/{n}", os.urandom(3000)) for n in range(8)))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(LockMismatch, match="damaged"):
        archive.unpack(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["toy-1.tar.gz"]


@settings(deadline=None, max_examples=150)
@given(at=st.integers(0, 6 * 512 - 1), flip=st.integers(1, 255))
def test_a_damaged_header_or_content_is_never_taken_silently(at, flip, tmp_path_factory):
    """One changed byte is an error, unless it only changes content."""
    tmp_path = tmp_path_factory.mktemp("flip")
    good = tar_bytes(member("toy-1/a", b"a" * 600), member("toy-1/b", b"b"), member("toy-1/c", b"c"))
    bad = bytearray(good)
    bad[at] ^= flip
    expected = archive.read_files(pack_raw(tmp_path / "good.tar.gz", good))
    try:
        found = archive.read_files(pack_raw(tmp_path / "bad.tar.gz", bytes(bad)))
    except (LockMismatch, DirtyTarget):
        return
    assert found.keys() == expected.keys()  # only a byte of content or padding: the pinned digest catches that


def test_a_tar_that_ends_within_a_file_is_refused(tmp_path):
    path = pack_raw(tmp_path / "toy-1.tar.gz", tar_bytes(member("toy-1/a", b"a" * 2000))[:1500])
    for act in (lambda: archive.unpack(path, tmp_path / "out"), lambda: archive.read_files(path, {"a"})):
        with pytest.raises(LockMismatch, match="within a file"):
            act()


def test_a_wrong_gzip_checksum_is_refused(tmp_path):
    path = pack(tmp_path / "toy-1.tar.gz", member("toy-1/a", b"a"))
    whole = bytearray(path.read_bytes())
    whole[-8] ^= 1
    path.write_bytes(whole)
    with pytest.raises(LockMismatch, match="damaged"):
        archive.unpack(path, tmp_path / "out")


def test_something_after_the_end_is_refused(tmp_path):
    whole = tar_bytes(member("toy-1/a", b"a"))
    with pytest.raises(LockMismatch, match="follows the end mark"):
        archive.read_files(pack_raw(tmp_path / "1.tar.gz", whole + tar_bytes(member("toy-1/b"))))
    path = pack_raw(tmp_path / "2.tar.gz", whole)
    path.write_bytes(path.read_bytes() + gzip.compress(tar_bytes(member("toy-1/b"))))
    with pytest.raises(LockMismatch, match="follows the end mark"):
        archive.read_files(path)


@pytest.mark.parametrize("content", [b"", b"not gzip", gzip.compress(b""), gzip.compress(bytes(1024)),
                                     gzip.compress(b"x" * 2048)],
                         ids=["nothing", "no gzip", "gzip of nothing", "gzip of an end mark", "gzip of no tar"])
def test_what_is_no_archive_is_refused(content, tmp_path):
    (tmp_path / "toy-1.tar.gz").write_bytes(content)
    with pytest.raises(LockMismatch):
        archive.unpack(tmp_path / "toy-1.tar.gz", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["toy-1.tar.gz"]


def test_a_bomb_is_stopped_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LIMIT", 8 << 20)
    path = pack(tmp_path / "toy-1.tar.gz", member("toy-1/a", b"a"), member("toy-1/zeros", bytes(64 << 20)))
    assert path.stat().st_size < 100_000
    with pytest.raises(DirtyTarget) as caught:
        archive.unpack(path, tmp_path / "out")
    assert "over 8388608 bytes" in caught.value.rows[0].found
    assert [p.name for p in tmp_path.iterdir()] == ["toy-1.tar.gz"]


@pytest.mark.parametrize("size", [b"00000000zz9\0", b"-0000000001\0", b"+0000000001\0", b"0000000_001\0",
                                  b"00000000008\0", b"\x80" + bytes(10) + b"\x01"])
def test_a_size_that_is_no_octal_number_is_refused(size, tmp_path):
    header = bytearray(member("toy-1/a")[0].tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = size
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    with pytest.raises(LockMismatch, match="damaged"):
        archive.read_files(pack_raw(tmp_path / "toy-1.tar.gz", bytes(header) + bytes(1024)))


def extended(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    """An extended header with that content, before the file toy-1/a."""
    return tar_bytes(member("pax", data, kind=kind))[: 512 + (len(data) + 511) // 512 * 512] + \
        tar_bytes(member("toy-1/a", b"a"))


@pytest.mark.parametrize("data", [b"x", b"0 ", b"-1 path=toy-1/b\n", b"11 path=b\n", b"8 path=b\n", b"6 path\n",
                                  b"9 size=-1\n", b"10 size=1e9\n", b"9" * 5000 + b" path=b\n"])
def test_a_damaged_extended_header_is_refused(data, tmp_path):
    with pytest.raises(LockMismatch, match="header"):
        archive.read_files(pack_raw(tmp_path / "toy-1.tar.gz", extended(data)))


def test_an_extended_header_names_the_next_file_alone(tmp_path):
    tar = extended(b"16 path=toy-1/b\n")[:-1024 * 9] + tar_bytes(member("toy-1/c", b"c"))
    assert archive.read_files(pack_raw(tmp_path / "toy-1.tar.gz", tar)) == {"b": File(b"a"), "c": File(b"c")}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_is_not_let_into_memory_whatever_its_size(kind, tmp_path):
    with pytest.raises(LockMismatch, match="extended header of 2000000 bytes"):
        archive.read_files(pack_raw(tmp_path / "toy-1.tar.gz", extended(bytes(2_000_000), kind)))


def test_a_sparse_file_is_refused(tmp_path):
    path = pack_raw(tmp_path / "toy-1.tar.gz", extended(b"22 GNU.sparse.major=1\n"))
    with pytest.raises(DirtyTarget) as caught:
        archive.read_files(path)
    assert "sparse" in caught.value.rows[0].found


def test_a_killed_unpack_is_cleaned_up_and_a_running_one_is_left_alone(sdist, tmp_path):
    dead, live = tmp_path / ".out.incomplete-00000000", tmp_path / ".out.incomplete-11111111"
    for path in (dead, live):
        path.mkdir()
        (path / "half").touch()
    handle = os.open(live, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    archive.unpack(sdist, tmp_path / "out")
    os.close(handle)
    assert not dead.exists() and live.exists() and (tmp_path / "out" / "a.py").exists()


def test_a_full_disk_is_told_and_leaves_nothing(sdist, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NeedsWork, match="No space left") as caught:
        archive.unpack(sdist, tmp_path / "out")
    assert "free some space" in caught.value.remedy
    assert [p.name for p in tmp_path.iterdir()] == ["toy-1.tar.gz"]


def test_short_writes_lose_nothing(sdist, tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:1000]))
    archive.unpack(sdist, tmp_path / "out")
    assert tree(tmp_path / "out")["big"][0] == bytes(3_000_000)


def test_content_survives_any_split_of_the_compressed_stream(sdist, monkeypatch):
    expected = archive.read_files(sdist)
    for chunk in (1, 7, 511, 512, 513):
        monkeypatch.setattr(archive, "CHUNK", chunk)
        wanted = {"a.py", "deep/er/run.sh"}
        assert archive.read_files(sdist, wanted) == {name: expected[name] for name in wanted}
