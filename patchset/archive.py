"""Read and unpack an sdist (.tar.gz) safely: plain files and folders under one top folder, nothing else.

Links, devices, sparse files, names that leave the folder or stand there twice, a second top folder and an archive that
grows past LIMIT are refused by name. The archive's digest has been compared before (fetch.py).
"""
from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import progress, staging, tar
from .errors import DirtyTarget, LockMismatch, Row
from .paths import why_unsafe
from .shadow import File, Files

LIMIT = 2 << 30  # bytes of all files; vLLM 0.33.0 has 0.15 GB
CHUNK = 1 << 17


def read_files(archive: Path, wanted: Collection[str] | None = None) -> Files:
    """The wanted files (all by default) with their modes; those the archive lacks are left out."""
    files: Files = {}
    with _damage_named(archive):
        for content, member, path in _members(archive, f"read {archive.name}"):
            if member.kind == tar.FILE and (wanted is None or path in wanted):
                files[path] = File(content.exactly(member.size), _mode(member))
                if wanted is not None and len(files) == len(set(wanted)):
                    break
    return files


def names(archive: Path) -> set[str]:
    """The path of every file in it."""
    with _damage_named(archive):
        return {path for _, member, path in _members(archive, f"read {archive.name}") if member.kind == tar.FILE}


def unpack(archive: Path, into: Path) -> None:
    """Make `into`, which must not exist, from what is below the archive's top folder; whole or not at all."""
    if os.path.lexists(into):
        raise DirtyTarget(f"{into} exists already", remedy="remove it, or name another folder")
    with staging.folder(into) as root, _damage_named(archive):
        folders = {""}
        for content, member, path in _members(archive, f"unpack {archive.name}"):
            try:
                _write(content, member, path, str(root), folders)
            except (FileExistsError, NotADirectoryError):
                raise refused(archive, member.name, "a name used twice (perhaps in another case)", "each name once"
                              ) from None


def _write(content: _Unzipped, member: tar.Member, path: str, root: str, folders: set[str]) -> None:
    folder = path if member.kind == tar.FOLDER else path.rpartition("/")[0]
    if folder not in folders:
        os.makedirs(f"{root}/{folder}", exist_ok=True)
        folders.add(folder)
    if member.kind == tar.FOLDER:
        return
    # O_EXCL never opens through a link, and root is new and holds only what this loop made.
    handle = os.open(f"{root}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, int(_mode(member), 8) & 0o777)
    try:
        left = member.size
        while left:
            piece = content.exactly(min(left, CHUNK))
            left -= len(piece)
            while piece:
                piece = piece[os.write(handle, piece):]
    finally:
        os.close(handle)


def _mode(member: tar.Member) -> str:
    return "100755" if member.mode & 0o100 else "100644"


class _Unzipped:
    """The tar inside a .tar.gz, forward only. GzipFile's layers of buffers cost as much as unpacking."""

    def __init__(self, file, advance):
        self.file, self.advance = file, advance
        self.gzip = zlib.decompressobj(wbits=31)
        self.buffer, self.at, self.begin = b"", 0, 0  # begin: where in the tar the buffer begins

    def tell(self) -> int:
        return self.begin + self.at

    def seek(self, position: int) -> None:
        """Go forward to `position`, or to the end if that comes first."""
        while position > self.begin + len(self.buffer) and self._refill():
            pass
        self.at = min(position - self.begin, len(self.buffer))

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end."""
        piece = self.buffer[self.at : self.at + size]
        self.at += len(piece)
        if len(piece) == size:
            return piece
        pieces = [piece]
        while (size := size - len(piece)) and self._refill():
            piece = self.buffer[:size]
            self.at = len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def exactly(self, size: int) -> bytes:
        piece = self.read(size)
        if len(piece) < size:
            raise EOFError("it ends within a file")
        return piece

    def _refill(self) -> bool:
        """Replace the buffer by what follows it; False at the end, where zlib has compared the checksum."""
        data = b""
        while not data and not self.gzip.eof:
            packed = self.gzip.unconsumed_tail
            if not packed:
                packed = self.file.read(CHUNK)
                self.advance(len(packed))
            if not packed:
                raise EOFError("it ends early")
            data = self.gzip.decompress(packed, CHUNK)
        if data:
            self.begin += len(self.buffer)
            self.buffer, self.at = data, 0
        return bool(data)


@contextmanager
def _damage_named(archive: Path) -> Iterator[None]:
    """Whatever a broken tar or gzip raises, as one error that names the archive."""
    try:
        yield
    except (tar.Damaged, zlib.error, EOFError) as error:
        raise damaged(archive, str(error)) from None


def _members(archive: Path, label: str) -> Iterator[tuple[_Unzipped, tar.Member, str]]:
    """Every file and folder in order, with its checked path below the top folder ('' for the top folder itself).

    The content of a file is what its stream gives next.
    """
    top, total, seen = "", 0, set()
    with open(archive, "rb") as file, progress.bar(label, os.fstat(file.fileno()).st_size) as advance:
        unzipped = _Unzipped(file, advance)
        for member in tar.members(unzipped):
            first, _, path = member.name.partition("/")
            top, total = top or first, total + member.size
            if reason := _why_refused(member, first, path, top, total, seen):
                raise refused(archive, member.name, reason, "plain files and folders under one top folder")
            seen.add(path)
            yield unzipped, member, path
        while data := unzipped.read(CHUNK):
            if data.strip(b"\0"):
                raise damaged(archive, "something follows the end mark")
        if unzipped.gzip.unused_data.strip(b"\0") or file.read(CHUNK).strip(b"\0"):
            raise damaged(archive, "something follows the end mark")
    if not top:
        raise damaged(archive, "it is empty")


def _why_refused(member: tar.Member, first: str, path: str, top: str, total: int, seen: set[str]) -> str:
    if member.kind not in (tar.FILE, tar.FOLDER):
        return tar.OTHER.get(member.kind, "a device, a pipe or a sparse file")
    if reason := why_unsafe(f"{first}/{path}" if path else first):
        return reason
    if first != top:
        return "outside the top folder"
    if not path and member.kind == tar.FILE:
        return "a file as top folder"
    if path in seen and member.kind == tar.FILE:
        return "a name used twice"
    return f"over {LIMIT} bytes unpacked" if total > LIMIT else ""


def damaged(archive: Path, reason: str) -> LockMismatch:
    return LockMismatch(f"{archive.name} is damaged: {reason}", remedy=f"remove {archive} and run the command again")


def refused(archive: Path, path: str, found: str, expected: str) -> DirtyTarget:
    return DirtyTarget(f"{archive.name} is no plain sdist, so nothing of it was kept",
                       rows=[Row(path, found, expected)], remedy="check where the archive comes from")
