"""Evidence: a JSON record of one run on a GPU, bound to patchset.lock.

A record is bound in two ways: it holds the digest of the lock's entry, and it says whether the engine that ran is that
entry, by hashing every path the lock names in the folder the engine was imported from. A record of another engine is
still written, but it is no evidence: `complete` is false and the command that made it fails.
"""
from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import pathlib
import platform
import subprocess

from patchset import evidence
from prove import asked
from prove.recipe import ROOT

SCHEMA = 1


def bind(site: pathlib.Path, upstream: str = "vllm", lock_path: pathlib.Path = ROOT / "patchset.lock") -> dict:
    """Which of the lock's entries the tree under `site` is. `state`: locked, pristine, other or unlocked."""
    if not lock_path.is_file():
        return {"state": "unlocked", "why": f"{lock_path.name} does not exist; write it with apply.py export"}
    targets = {n: t for n, t in _targets(lock_path).items() if n.startswith(f"{upstream}@")}
    if not targets:
        return {"state": "unlocked", "why": f"{lock_path.name} has no entry for {upstream}"}
    best = None
    for name, target in sorted(targets.items()):
        found = {path: _sha(site / path) for path in target["paths"]}
        differs = sorted(path for path, entry in target["paths"].items() if found[path] != entry["after"])
        if not differs:
            return {"state": "locked", "entry": name, "digest": target["digest"]}
        pristine = all(found[path] == entry["before"] for path, entry in target["paths"].items())
        seen = {"state": "pristine" if pristine else "other", "entry": name, "digest": target["digest"],
                "differs": differs}
        # An untouched release is that, though an entry of another release with fewer paths differs in fewer.
        best = min(filter(None, (best, seen)), key=lambda one: (one["state"] != "pristine", len(one["differs"])))
    return best


def _targets(lock_path: pathlib.Path) -> dict[str, dict]:
    try:
        return dict(json.loads(lock_path.read_text())["targets"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{lock_path} is damaged ({error}): git checkout {lock_path.name}, or apply.py "
                         "export") from None


def digests(lock_path: pathlib.Path = ROOT / "patchset.lock") -> set[str]:
    """Of the lock's entries; none where there is no lock."""
    return {target["digest"] for target in _targets(lock_path).values()} if lock_path.is_file() else set()


def paths(entry: str | None, lock_path: pathlib.Path = ROOT / "patchset.lock") -> list[str]:
    """What an entry of the lock names; nothing where a tree was bound to none."""
    return list(_targets(lock_path)[entry]["paths"]) if entry else []


def _sha(path: pathlib.Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def stale(folder: pathlib.Path, lock_path: pathlib.Path) -> dict[str, str]:
    """Records that claim to have passed, but not with the lock of today: name -> why."""
    today = digests(lock_path)
    claimed = [path for path in evidence.paths(folder) if json.loads(path.read_text()).get("passed")]
    return {str(path.relative_to(folder)): why for path in claimed if (why := evidence.why_not(path, today))}


def commit(root: pathlib.Path = ROOT) -> str:
    """The repository's commit, `+` if the tree was edited; "unknown" where the tree travels without its history."""
    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None
    head = git("rev-parse", "HEAD")
    return "unknown" if head is None else head + ("+" if git("status", "--porcelain", "--", "prove", "recipes",
                                                              "overlays", "patches", "patchset.lock") else "")


class Record:
    """Collected while a command runs and written after every case, so that a killed run leaves what it had. A record
    that passed is not lost to a run that does not: it stays beside it, as NAME.json.passed, until one passes again. Nor
    to one that asks for less (asked.py): that has a name of its own."""

    declared_commit: str | None = None  # said by the user where the tree travels without its history

    def __init__(self, verb: str, subject: str, arguments: dict, folder: pathlib.Path):
        self.data = {
            "schema": SCHEMA, "verb": verb, "subject": subject,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": self.declared_commit or commit(),
            "host": {"machine": platform.machine(), "python": platform.python_version()},
            "arguments": arguments, "engines": {}, "rows": [], "complete": False, "passed": False,
        }
        if less := asked.less(folder, self.data, digests()):
            self.data["asks_less"] = less
        self.path = folder / asked.file_name(self.data)
        self.proof = asked.proof(self.path)

    def engine(self, name: str, info: dict, flags: dict, env: dict) -> dict:
        """Keeps what started and which tree it is; returns the latter."""
        # A path of the machine is of no use elsewhere.
        kept = {k: v for k, v in info.items() if k not in ("vllm_path", "megatron_path")}
        lock = bind(_site(info, "vllm"))
        self.data["engines"][name] = {**kept, "flags": _portable(flags), "env": env, "lock": lock}
        self.write()
        return lock

    def actor(self, info: dict) -> None:
        """The trainer beside that engine: its tree is bound as well."""
        self.data["actor_lock"] = bind(_site(info, "megatron"), "megatron")

    @property
    def locked(self) -> bool:
        """Whether everything that ran was a tree that patchset.lock names."""
        locks = [engine["lock"] for engine in self.data["engines"].values()]
        locks += [self.data["actor_lock"]] if "actor_lock" in self.data else []
        return bool(locks) and all(lock["state"] == "locked" for lock in locks)

    def row(self, row: dict) -> None:
        self.data["rows"].append(row)
        self.write()

    def finish(self, complete: bool, passed: bool, **more) -> None:
        self.data |= {"complete": complete, "passed": complete and passed, **more}
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if evidence.passed(self.path):
            os.replace(self.path, self.proof)
        partial = self.path.with_suffix(".json.partial")
        partial.write_text(text(self.data) + "\n")
        os.replace(partial, self.path)
        if self.data["passed"]:
            self.proof.unlink(missing_ok=True)


def text(data: dict) -> str:
    """As JSON, which has no NaN or infinity: a model that made one is written down and not lost to it."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _site(info: dict, package: str) -> pathlib.Path:
    return pathlib.Path(info[f"{package}_path"]).parent


def _portable(flags: dict) -> dict:
    return {k: v for k, v in flags.items() if k != "model"}
