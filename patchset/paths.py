"""Which relative paths a patch, overlay or archive may name, and how they are reached without leaving the target.

A path is refused if it is absolute, has an empty, `.`, `..` or `.git` part, a backslash, a colon in its first part
(a drive), or a control character. On disk no part of it may be a symbolic link: a write would follow it out.
"""
from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from .errors import DirtyTarget, Row

CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def why_unsafe(path: str) -> str:
    """The reason `path` is refused, or an empty string."""
    parts = path.split("/")
    if not path or path.startswith("/"):
        return "absolute or empty"
    if "\\" in path or ":" in parts[0]:
        return "backslash or drive"
    if CONTROL.search(path):
        return "control character"
    for part in parts:
        if part in ("", ".", ".."):
            return f"part {part!r}"
        if part.lower() == ".git":
            return "inside .git"
    return ""


def inside(root: Path, path: str) -> Path:
    """`root`/`path` once no component below root is a symbolic link. Raises DirtyTarget otherwise."""
    reason = why_unsafe(path)
    if reason:
        raise DirtyTarget(f"refusing the path {path!r}", remedy="mend the patch or overlay that names it",
                          rows=[Row(path, reason, "a plain relative path")])
    here = root
    for part in path.split("/"):
        here = here / part
        try:
            mode = os.lstat(here).st_mode
        except FileNotFoundError:
            break
        except NotADirectoryError:
            raise DirtyTarget("a file stands where a folder is needed", remedy="move it away, then run it again",
                              rows=[Row(path, f"{here.parent} is a file", "a folder")]) from None
        if stat.S_ISLNK(mode):
            raise DirtyTarget(
                "a symbolic link lies in the way; a write would follow it",
                remedy="replace the link by the real file or folder, then run the command again",
                rows=[Row(path, f"{here.relative_to(root)} -> {os.readlink(here)}", "no links")],
            )
    return root / path
