#!/usr/bin/env python3
"""Which GPU architectures a compiled library holds code for, read from the file itself: no CUDA toolkit is needed.

    image_arch.py LIBRARY...          one line a library
    image_arch.py --need 9.0 10.0 LIBRARY...    exit 1 if one lacks code for an architecture

nvcc puts a fat binary into the ELF section .nv_fatbin (with relocatable device code: __nv_relfatbin): containers, each
a header and entries, each entry a header that says its kind (1: PTX, 2: machine code for one architecture) and its
architecture. The layout is not documented; it was read off the libraries of the vLLM 0.33.0 wheel and agrees there
with what cuobjdump lists (docker/README.md). A container of another layout is an error, never an empty answer.
"""
from __future__ import annotations

import argparse
import re
import struct
import sys
from pathlib import Path

CONTAINER = struct.Struct("<IHHQ")   # magic, version, bytes of this header, bytes of the entries after it
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, header bytes, payload bytes, .., .., minor, major, architecture
MAGIC = 0xBA55ED50
PTX, SASS = 1, 2
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


class BadLibrary(ValueError):
    """Not a library this reads; the text says why."""


def sections(data: bytes) -> dict[bytes, bytes]:
    """The sections of a 64-bit little-endian ELF file by name."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise BadLibrary("not a 64-bit little-endian ELF file")
    offset, = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, offset + size * number) for number in range(count)]
    names = data[heads[names_at][4]:][:heads[names_at][5]]
    return {names[head[0]:names.index(b"\0", head[0])]: data[head[4]:head[4] + head[5]] for head in heads}


def fat_entries(section: bytes) -> list[tuple[int, int]]:
    """(kind, architecture) of every entry of every container of a section."""
    found, at = [], 0
    while at + CONTAINER.size <= len(section):
        magic, version, head, size = CONTAINER.unpack_from(section, at)
        if magic == 0:  # padding between containers
            at += 8
            continue
        if magic != MAGIC or version != 1 or head != CONTAINER.size:
            raise BadLibrary(f"unknown fat binary container at byte {at}: {section[at:at + 16].hex()}")
        at += head
        end = at + size
        if end > len(section):
            raise BadLibrary(f"the fat binary container at byte {at - head} runs past its section")
        while at < end:
            kind, _, head, payload, *_, arch = ENTRY.unpack_from(section, at)
            if kind not in (PTX, SASS) or head < ENTRY.size or at + head + payload > end:
                raise BadLibrary(f"unknown fat binary entry at byte {at}: {section[at:at + ENTRY.size].hex()}")
            found.append((kind, arch))
            at += head + payload
    return found


def architectures(path: Path) -> list[str]:
    """sm_90 for machine code, compute_90 for PTX, sorted; empty for a library without GPU code."""
    data = path.read_bytes()
    found = {entry for name, section in sections(data).items() if name in SECTIONS for entry in fat_entries(section)}
    return [f"{'sm' if kind == SASS else 'compute'}_{arch}" for kind, arch in sorted(found, key=lambda e: (e[1], e[0]))]


def lacking(found: list[str], needed: list[str]) -> list[str]:
    """Which of the needed architectures ("9.0") have no machine code in a library that has GPU code."""
    return [one for one in needed if found and "sm_" + one.replace(".", "") not in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--need", action="append", default=[], metavar="ARCH", help="e.g. 9.0; repeat for several")
    parser.add_argument("library", nargs="+", type=Path)
    args = parser.parse_args()
    if wrong := [one for one in args.need if not re.fullmatch(r"\d+\.\d", one)]:
        parser.error(f"no architecture: {', '.join(wrong)}; write 9.0")
    code = 0
    for path in args.library:
        try:
            found = architectures(path)
        except BadLibrary as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        without = lacking(found, args.need)
        print(f"{path.name}: {' '.join(found) or 'no GPU code'}{'; lacks ' + ', '.join(without) if without else ''}")
        code |= bool(without)
    return code


if __name__ == "__main__":
    sys.exit(main())
