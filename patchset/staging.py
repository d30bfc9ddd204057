"""Make a file or folder under another name beside its place, then rename it there: it is there whole or not at all.

What a killed run left is removed by the next one. Whoever works on such a name holds a lock on it, and the kernel lets
that lock go with the process, so a name that can be locked belongs to nobody.
"""
from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import NeedsWork

MARK = ".incomplete-"


REMEDIES = {
    errno.ENOSPC: "free some space there, then run the command again",
    errno.EDQUOT: "free some of your quota there, then run the command again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then run the command again",
    errno.EROFS: "that file system is read-only; name a place that can be written",
    errno.EACCES: "name a place that you may write, or change its permissions",
    errno.EPERM: "name a place that you may write, or change its permissions",
}


def explained(error: OSError, final: Path, elsewhere: str = "") -> NeedsWork:
    """An error of the file system as a refusal with a remedy. elsewhere: how to name another place."""
    remedy = REMEDIES.get(error.errno, "mend the cause, then run the command again")
    return NeedsWork(f"{final} could not be made: {error.strerror or error}",
                     remedy=f"{remedy}; or {elsewhere}" if elsewhere else remedy)


@contextmanager
def folder(final: Path) -> Iterator[Path]:
    """An empty folder to fill; renamed to `final`, which must not exist, when the block ends without an error."""
    with _staged(final, lambda path: os.mkdir(path)) as path:
        yield path


@contextmanager
def file(final: Path, elsewhere: str = "") -> Iterator[Path]:
    """An empty file to fill; it replaces `final` when the block ends without an error."""
    with _staged(final, lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644)), elsewhere) as path:
        yield path


@contextmanager
def _staged(final: Path, create, elsewhere: str = "") -> Iterator[Path]:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final)
        path, handle = _claim(final, create)
    except OSError as error:
        raise explained(error, final, elsewhere) from error
    try:
        yield path
        os.rename(path, final)
    except OSError as error:
        _remove(path)
        raise explained(error, final, elsewhere) from error
    except BaseException:
        _remove(path)
        raise
    finally:
        os.close(handle)


def _claim(final: Path, create) -> tuple[Path, int]:
    """A new, locked name. Another run may take it for abandoned before it is locked; then take another name."""
    while True:
        path = final.with_name(f".{final.name}{MARK}{secrets.token_hex(4)}")
        create(path)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        if _lock(handle) is not False and os.path.lexists(path):
            return path, handle
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether the lock is ours now; None on a file system without locks, where nothing is ever taken for abandoned."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_abandoned(final: Path) -> None:
    prefix = f".{final.name}{MARK}"
    for entry in list(os.scandir(final.parent)):
        if not entry.name.startswith(prefix):
            continue
        try:
            handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        if _lock(handle):
            _remove(Path(entry.path))
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
