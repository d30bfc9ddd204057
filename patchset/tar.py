"""The headers of a tar, read forward and strictly: plain files and folders, with long names in pax, GNU or ustar form.

Python's tarfile takes four times as long over the 20,000 headers of vLLM's sdist, and ends quietly at a damaged one.
Format: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header".
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
END = bytes(BLOCK)
LONGEST = 1 << 20  # bytes of an extended header; they are held in memory
FILE, FOLDER, EXTENDED, GLOBAL, GNU_NAME, GNU_LINK = b"0", b"5", b"x", b"g", b"L", b"K"
NAMING = (EXTENDED, GLOBAL, GNU_NAME, GNU_LINK)  # not members, but about the next one
OTHER = {b"1": "a hard link", b"2": "a symbolic link"}


class Damaged(ValueError):
    """What was read is no header of a tar."""


class Member(NamedTuple):
    """kind: FILE, FOLDER, or the header's own for anything else. A folder's name has no '/' at its end."""

    name: str
    kind: bytes
    size: int
    mode: int


def members(stream) -> Iterator[Member]:
    """Every member before the end mark. Its content is what the stream gives next; what is left of it is passed over.

    stream: exactly(n) gives the next n bytes, tell() the position, seek(position) goes forward to it.
    """
    every: dict[bytes, bytes] = {}  # by global headers
    own: dict[bytes, bytes] = {}  # for the next member alone
    while (header := stream.exactly(BLOCK)) != END:
        member = _member(header, {**every, **own})
        begin = stream.tell()
        if member.kind in NAMING and member.size > LONGEST:
            raise Damaged(f"an extended header of {member.size} bytes")
        if member.kind in (EXTENDED, GLOBAL):
            (own if member.kind == EXTENDED else every).update(_records(stream.exactly(member.size)))
        elif member.kind == GNU_NAME:
            own[b"path"] = stream.exactly(member.size).split(b"\0")[0]
        elif member.kind != GNU_LINK:
            yield member
            own = {}
        stream.seek(begin + (member.size + BLOCK - 1) // BLOCK * BLOCK)


def _member(header: bytes, extended: dict[bytes, bytes]) -> Member:
    if _octal(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise Damaged("a header is damaged")
    kind, name, size = header[156:157], header[:100].split(b"\0")[0], _octal(header[124:136])
    if kind == b"\0":  # as before POSIX, when a name alone said that it was a folder
        kind = FOLDER if name.endswith(b"/") else FILE
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0")[0] + b"/" + name
    if extended and kind not in NAMING:
        name, size = extended.get(b"path", name), _number(extended.get(b"size", b"%d" % size))
        if any(key.startswith(b"GNU.sparse.") for key in extended):
            kind = b"S"
    if kind == FOLDER:
        name, size = name.rstrip(b"/"), 0
    return Member(name.decode("utf-8", "surrogateescape"), kind, size, _octal(header[100:108]))


def _octal(field: bytes) -> int:
    return _number(field.strip(b" \0") or b"0", 8)


def _number(digits: bytes, base: int = 10) -> int:
    try:
        if digits.isdigit():  # int() alone takes signs and underscores too
            return int(digits, base)
    except ValueError:
        pass  # an 8 or 9
    raise Damaged(f"a header holds {digits!r} where a number belongs")


def _records(data: bytes) -> dict[bytes, bytes]:
    """The fields of an extended header: `<length of the record> <key>=<value>\\n`, one after another."""
    found = {}
    while data:
        digits, _, _ = data.partition(b" ")
        length = _number(digits)
        record, data = data[:length], data[length:]
        key, equals, value = record[len(digits) + 1 :].partition(b"=")
        if len(record) < length or not equals or not value.endswith(b"\n"):
            raise Damaged(f"an extended header holds {record[:40]!r}")
        found[key] = value[:-1]
    return found
