"""Run git in a private bare repository. Knows no project.

Three rules keep the user's machine out of the result and the result out of the user's repositories:
- no configuration but ours: system and user files are off, and every GIT_* variable of the caller is dropped;
- the working directory is the private repository, never a target: `git apply` run inside a folder that lies in some
  other repository exits 0 and changes nothing (seen in a site-packages inside a checkout);
- argument lists, never a shell string.
"""
from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

from .errors import NeedsWork

OLDEST = (2, 32)  # older ones do not know GIT_CONFIG_GLOBAL and GIT_CONFIG_COUNT: the user's configuration would count
MERGING = (2, 38)  # merge-tree --write-tree
CONFIG = {
    "core.quotePath": "true",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.fsync": "none",  # a private, temporary repository
    "core.compression": "0",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "merge.conflictStyle": "diff3",
    "merge.renames": "true",
    "gc.auto": "0",
}


class GitError(Exception):
    """git exited non-zero. `stderr` is what it said."""

    def __init__(self, args: list[str], code: int, stderr: str):
        super().__init__(f"git {' '.join(args[:3])}…: exit {code}: {stderr.strip()[-2000:]}")
        self.code, self.stderr = code, stderr


@functools.cache
def demand(oldest: tuple[int, int] = OLDEST, what: str = "apply.py") -> None:
    """Raises NeedsWork if there is no git, or one too old for `what`."""
    wanted = ".".join(map(str, oldest))
    try:
        said = subprocess.run(["git", "version"], capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        raise NeedsWork("git was not found", remedy=f"install git {wanted} or newer, or put it on PATH") from None
    found = re.match(r"git version (\d+)\.(\d+)", said)
    if not found or tuple(map(int, found.groups())) < oldest:
        raise NeedsWork(f"{what} needs git {wanted} or newer; here is {said or 'one that names no version'}",
                        remedy="update git, or put a newer one first on PATH")


def environment() -> dict[str, str]:
    """The caller's environment without any GIT_* variable or locale, plus a fixed identity and our configuration."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_AUTHOR_NAME": "zero-mismatch",
        "GIT_AUTHOR_EMAIL": "maintainers@zero-mismatch.invalid",
        "GIT_COMMITTER_NAME": "zero-mismatch",
        "GIT_COMMITTER_EMAIL": "maintainers@zero-mismatch.invalid",
        "GIT_AUTHOR_DATE": "@0 +0000",
        "GIT_COMMITTER_DATE": "@0 +0000",
        "GIT_CONFIG_COUNT": str(len(CONFIG)),
    }
    for index, (key, value) in enumerate(CONFIG.items()):
        env[f"GIT_CONFIG_KEY_{index}"], env[f"GIT_CONFIG_VALUE_{index}"] = key, value
    return env


class Repository:
    """A bare repository at `path`; `run` and `out` act on it with an optional private index."""

    def __init__(self, path: Path):
        self.path = path
        self.env = environment() | {"GIT_DIR": str(path)}

    @classmethod
    def create(cls, path: Path) -> Repository:
        demand()
        path.mkdir(parents=True, exist_ok=True)
        repository = cls(path)
        repository.run(["init", "-q", "--bare", "--template=", str(path)])
        return repository

    def run(self, args: list[str], *, stdin: bytes = b"", index: Path | None = None,
            allowed: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[bytes]:
        """Run one git command; raises GitError unless its exit code is among `allowed`."""
        env = self.env | ({"GIT_INDEX_FILE": str(index)} if index else {})
        done = subprocess.run(["git", *args], input=stdin, capture_output=True, env=env, cwd=self.path, check=False)
        if done.returncode not in allowed:
            raise GitError(args, done.returncode, done.stderr.decode("utf-8", "replace"))
        return done

    def out(self, args: list[str], **options) -> str:
        return self.run(args, **options).stdout.decode("utf-8", "surrogateescape").strip()

    def read_blobs(self, ids: list[str]) -> list[bytes]:
        """The bytes of many blobs by one `cat-file --batch`."""
        stream = self.run(["cat-file", "--batch"], stdin="".join(f"{i}\n" for i in ids).encode()).stdout
        blobs, at = [], 0
        for _ in ids:
            end = stream.index(b"\n", at)
            size = int(stream[at:end].split()[2])
            blobs.append(stream[end + 1 : end + 1 + size])
            at = end + 1 + size + 1
        return blobs
