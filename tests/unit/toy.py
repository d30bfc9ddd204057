"""A toy upstream and a checkout that patches it, small enough to try every step of a transaction."""
from __future__ import annotations

import base64
import hashlib
import subprocess
from pathlib import Path

from patchset import git, lock, pins
from patchset.deliver import Request
from patchset.shadow import File

SOURCES = {
    "toy/__init__.py": b"",
    "toy/a.py": b"".join(b"line_%d = %d\n" % (n, n) for n in range(40)),
    "toy/sub/b.py": b"def f(x):\n    return x\n\n\ndef g(x):\n    return f(x) + 1\n",
    "README": b"toy\n",
}
CHANGED = {
    "first": {"toy/a.py": (b"line_3 = 3\n", b"line_3 = 33\n")},
    "second": {"toy/a.py": (b"line_30 = 30\n", b"line_30 = 3030\n"),
               "toy/sub/b.py": (b"return x\n", b"return 2 * x\n")},
}
OVERLAY = {"toy/extra/__init__.py": b"", "toy/extra/op.py": b"def op():\n    return 42\n"}
TRAILERS = "Upstream-Status: Pending\nArch: any\nTests: none\n"


def diff(before: dict[str, bytes], after: dict[str, bytes], work: Path) -> bytes:
    """A git diff between two small trees."""
    for name, files in (("a", before), ("b", after)):
        for path, data in files.items():
            place = work / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    done = subprocess.run(["git", "diff", "--no-index", "--full-index", "--no-renames", "--src-prefix=",
                           "--dst-prefix=", "a", "b"], cwd=work, capture_output=True,
                          env=git.environment(), check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def patch_bytes(slug: str, text: bytes, trailers: str = TRAILERS) -> bytes:
    head = (f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: toy <toy@toy.invalid>\n"
            f"Date: Mon, 30 Nov 2026 00:00:00 +0000\nSubject: {slug}\n\nbecause\n\n{trailers}---\n")
    return head.encode() + text


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return root


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and mode, the state folder and compiled caches left out."""
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mode) for p in sorted(root.rglob("*"))
            if p.is_file() and ".zero-mismatch" not in p.parts and "zero_mismatch" not in p.parts
            and p.suffix != ".pyc"}


class Toy:
    """root: the checkout. tree(): a pristine target. site(): the same as an installed wheel."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.root = folder / "checkout"
        write_tree(self.root, {
            "patchset.toml": b'schema = 1\n[upstream.toy]\ndistribution = "toy"\npackage = "toy"\n'
                             b'target = "build/toy"\nversion = "1.0"\n'
                             b'[upstream.toy.release."1.0"]\nsdist = "' + b"0" * 64 + b'"\n'
                             b'[profile.all]\nupstreams = ["toy"]\narch = ["sm90"]\n',
            "patches/toy/series": b"first\nsecond\n",
            **{f"overlays/toy/{path}": data for path, data in OVERLAY.items()},
        })
        now = dict(SOURCES)
        for slug, edits in CHANGED.items():
            before = dict(now)
            for path, (old, new) in edits.items():
                now[path] = now[path].replace(old, new, 1)
            text = diff(before, now, folder / f"diff-{slug}")
            (self.root / f"patches/toy/{slug}.patch").write_bytes(patch_bytes(slug, text))
        self.sources = SOURCES
        self.write_lock()

    @property
    def pins(self) -> pins.Pins:
        return pins.load(self.root)

    @property
    def upstream(self) -> pins.Upstream:
        return self.pins.upstreams["toy"]

    def base(self, _upstream, _release, paths):
        return {path: File(data) for path, data in self.sources.items() if path in paths}

    def write_lock(self) -> lock.Lock:
        made = lock.build(self.root, self.pins, self.base)
        (self.root / lock.NAME).write_text(made.dumps())
        return made

    def request(self, **options) -> Request:
        return Request(self.root, self.pins, self.pins.profiles["all"], **options)

    def tree(self, name: str = "tree") -> Path:
        info = b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"
        return write_tree(self.folder / name, {**SOURCES, "PKG-INFO": info})

    def site(self, name: str = "site") -> Path:
        root = write_tree(self.folder / name, SOURCES)
        info = root / "toy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        lines = []
        for path, data in SOURCES.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(data)}\n")
        (info / "RECORD").write_text("".join(lines) + "toy-1.0.dist-info/METADATA,,\ntoy-1.0.dist-info/RECORD,,\n")
        return root
