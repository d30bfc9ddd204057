"""Read and unpack an sdist (.tar.gz), safely and about as fast as tar.

An own reader, because tarfile stops without a word at a damaged header, holds a header of any size in memory, and takes
half of the whole time for the 9600 entries of vLLM's sdist. It knows what sdists consist of: folders, regular files,
and long names as pax or GNU tar write them. Everything else is refused by name: links, devices, sparse files, names
that leave the folder or stand there twice, a second top folder, and an archive that ends early or grows past LIMIT.
"""
from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from . import progress, staging
from .errors import DirtyTarget, LockMismatch, Row
from .paths import why_unsafe
from .shadow import File, Files

BLOCK = 512
ZERO = bytes(BLOCK)
CHUNK = 1 << 20
LIMIT = 2 << 30         # bytes after decompression; vLLM 0.33.0 has 0.15 GB
HEADER_LIMIT = 1 << 20  # bytes of a pax or GNU long-name header
KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
         b"S": "a sparse file"}


class Entry(NamedTuple):
    """A regular file or a folder; `path` is without the top folder, '' for the top folder itself."""

    path: str
    size: int
    mode: str
    is_folder: bool


def read_files(archive: Path, wanted: Collection[str] | None = None) -> Files:
    """The wanted files (all by default) with their modes; those the archive lacks are left out."""
    files: Files = {}
    missing = None if wanted is None else set(wanted)
    with _opened(archive, f"read {archive.name}") as stream:
        for entry in _entries(stream):
            if entry.is_folder:
                continue
            if missing is None or entry.path in missing:
                files[entry.path] = File(stream.take(entry.size), entry.mode)
                if missing is not None:
                    missing.remove(entry.path)
                    if not missing:
                        break
            else:
                stream.skip(entry.size)
    return files


def unpack(archive: Path, into: Path) -> None:
    """Make `into`, which must not exist, from what is below the archive's top folder; whole or not at all."""
    if os.path.lexists(into):
        raise DirtyTarget(f"{into} exists already", remedy="remove it, or name another folder")
    with staging.folder(into) as root, _opened(archive, f"unpack {archive.name}") as stream:
        folders = {""}
        for entry in _entries(stream):
            try:
                _write(stream, str(root), entry, folders)
            except (FileExistsError, NotADirectoryError):
                raise refused(archive, entry.path, "a name used twice (perhaps in another case)", "each name once"
                              ) from None


def _write(stream: _Stream, root: str, entry: Entry, folders: set[str]) -> None:
    folder = entry.path if entry.is_folder else entry.path.rpartition("/")[0]
    if folder not in folders:
        os.makedirs(f"{root}/{folder}", exist_ok=True)
        folders.add(folder)
    if entry.is_folder:
        return
    # O_EXCL never opens through a link, and root is new and holds only what this loop made.
    handle = os.open(f"{root}/{entry.path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, int(entry.mode, 8) & 0o777)
    try:
        for piece in stream.pieces(entry.size):
            while piece:
                piece = piece[os.write(handle, piece):]
    finally:
        os.close(handle)


class _Stream:
    """The decompressed bytes of a gzip file, in the amounts asked for."""

    def __init__(self, archive: Path, file, advance):
        self.archive, self.file, self.advance = archive, file, advance
        self.gzip = zlib.decompressobj(wbits=31)
        self.buffer, self.at, self.total = b"", 0, 0

    def _refill(self) -> bool:
        """Replace the used-up buffer; False at the end of the archive, whose checksum zlib has then compared."""
        self.buffer, self.at = b"", 0
        while not self.buffer and not self.gzip.eof:
            packed = self.gzip.unconsumed_tail
            if not packed:
                packed = self.file.read(CHUNK)
                self.advance(len(packed))
            if not packed:
                raise damaged(self.archive, "it ends early")
            try:
                self.buffer = self.gzip.decompress(packed, CHUNK)
            except zlib.error as error:
                raise damaged(self.archive, str(error)) from None
        self.total += len(self.buffer)
        if self.total > LIMIT:
            raise refused(self.archive, "(all files)", f"over {LIMIT} bytes unpacked", "the size of an sdist")
        return bool(self.buffer)

    def pieces(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, in the pieces they come in."""
        while size:
            if self.at == len(self.buffer) and not self._refill():
                raise damaged(self.archive, "it ends early")
            piece = self.buffer[self.at : self.at + size]
            self.at += len(piece)
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        return b"".join(self.pieces(size))

    def skip(self, size: int) -> None:
        for _ in self.pieces(size):
            pass

    def finish(self) -> None:
        """Read what follows the end mark: nothing but zeros may."""
        while True:
            if self.buffer[self.at :].strip(b"\0"):
                raise damaged(self.archive, "something follows its end mark")
            if not self._refill():
                break
        if self.gzip.unused_data.strip(b"\0") or self.file.read(CHUNK).strip(b"\0"):
            raise damaged(self.archive, "something follows its end")


@contextmanager
def _opened(archive: Path, label: str) -> Iterator[_Stream]:
    with open(archive, "rb") as file, progress.bar(label, os.fstat(file.fileno()).st_size) as advance:
        yield _Stream(archive, file, advance)


def damaged(archive: Path, reason: str) -> LockMismatch:
    return LockMismatch(f"{archive.name} is damaged: {reason}", remedy=f"remove {archive} and run the command again")


def refused(archive: Path, path: str, found: str, expected: str) -> DirtyTarget:
    return DirtyTarget(f"{archive.name} is no plain sdist, so nothing of it was kept",
                       rows=[Row(path, found, expected)], remedy="check where the archive comes from")


def _entries(stream: _Stream) -> Iterator[Entry]:
    """Every file and folder in order. The caller must consume exactly `size` bytes after each file."""
    archive, top, long, seen = stream.archive, "", {}, set()
    while (header := stream.take(BLOCK)) != ZERO:
        _check_sum(archive, header)
        kind, size = header[156:157], _number(archive, header[124:136])
        if kind in b"xgLK":
            long = long | _long_header(stream, kind, size)
            continue
        name = long.get("path") or _short_name(header)
        size = _number(archive, long["size"].encode(), base=10) if "size" in long else size
        is_folder = kind == b"5" or name.endswith("/")
        if kind not in b"0\x005":
            raise refused(archive, name, KINDS.get(kind, f"an entry of kind {kind!r}"), "a file or folder")
        if any(key.startswith("GNU.sparse") for key in long):
            raise refused(archive, name, KINDS[b"S"], "a file or folder")
        first, _, path = name.rstrip("/").partition("/")
        top = top or first
        reason = why_unsafe(f"{first}/{path}" if path else first) or ("outside the top folder" if first != top else "")
        if reason or not (path or is_folder):
            raise refused(archive, name, reason or "a file as top folder", f"a name inside {top}/")
        if path in seen and not is_folder:
            raise refused(archive, name, "a name used twice", "each name once")
        seen.add(path)
        mode = "100755" if _number(archive, header[100:108]) & 0o100 else "100644"
        yield Entry(path, 0 if is_folder else size, mode, is_folder)
        if not is_folder:
            stream.skip(-size % BLOCK)
        long = {}
    stream.finish()
    if not top:
        raise damaged(archive, "it is empty")


def _check_sum(archive: Path, header: bytes) -> None:
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != _number(archive, header[148:156]):
        raise damaged(archive, "the checksum of a header differs")


def _number(archive: Path, field: bytes, base: int = 8) -> int:
    text = field.strip(b" \0")
    if text and not text.isdigit():
        raise damaged(archive, "a header has no number where one is due")
    try:
        return int(text or b"0", base)
    except ValueError:
        raise damaged(archive, "a header has no number where one is due") from None


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _short_name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _long_header(stream: _Stream, kind: bytes, size: int) -> dict[str, str]:
    """What a pax or GNU header says of the next entry. Global ones (git's comment) and link names say nothing here."""
    if size > HEADER_LIMIT:
        raise refused(stream.archive, "(a header)", f"{size} bytes long", f"at most {HEADER_LIMIT}")
    data = stream.take(size)
    stream.skip(-size % BLOCK)
    if kind == b"L":
        return {"path": _text(data)}
    return _pax_records(stream.archive, data) if kind == b"x" else {}


def _pax_records(archive: Path, data: bytes) -> dict[str, str]:
    """Records "<length> <key>=<value>\\n"; the length counts all of the record."""
    records, at = {}, 0
    while at < len(data):
        digits, _, _ = data[at : at + 20].partition(b" ")
        length = _number(archive, digits, base=10)
        record = data[at : at + length]
        if len(record) <= len(digits) + 1 or len(record) < length or not record.endswith(b"\n"):
            raise damaged(archive, "a pax header is malformed")
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += length
    return records
