"""Small libraries with GPU code in them, byte by byte: what image_arch reads and no more."""
import struct

import image_arch


def entry(kind: int, arch: int, payload: bytes = b"x" * 24) -> bytes:
    head = image_arch.ENTRY.pack(kind, 0x101, 64, len(payload), 0, 0, 0, 1, arch)
    return head.ljust(64, b"\0") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return image_arch.CONTAINER.pack(image_arch.MAGIC, 1, 16, len(body)) + body


def elf(**sections: bytes) -> bytes:
    """A file with these sections and their names: all that is read of one."""
    names, data, heads = b"\0", b"", []
    for name, content in [*sections.items(), ("shstrtab", b"")]:
        at = len(names)
        names += b"." + name.encode() + b"\0"
        content = names if name == "shstrtab" else content
        heads.append(struct.pack("<IIQQQQ", at, 1, 0, 0, 64 + len(data), len(content)).ljust(64, b"\0"))
        data += content
    start = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", start, 0x28, 64 + len(data))
    struct.pack_into("<HHH", start, 0x3A, 64, len(heads), len(heads) - 1)
    return bytes(start) + data + b"".join(heads)
