"""A small checkout with one upstream of two releases, for the tests of what is kept in the repository."""
from __future__ import annotations

import gzip
import hashlib
import io
import re
import subprocess
import tarfile
from pathlib import Path

from patchset import deliver, export, git, pins, target
from patchset.shadow import File, Files, Shadow

OLD, NEW = "1.0.0", "2.0.0"
BASE = {
    "toy/router.py": "import os\n\n\nclass Gate:\n    def forward(self, x):\n        y = x * 2\n        return y\n\n\n"
                     "def route(x):\n    first = x\n    second = first\n    return second\n",
    "toy/lines.txt": "".join(f"line {n}\n" for n in range(1, 41)),
    "toy/__init__.py": "",
    "setup.py": "print('toy')\n",
}
BODY = """\
The gate multiplies in the dtype of its input (toy/router.py:6), so a row's bits follow its neighbours. The call is
inside upstream's class, so an overlay alone cannot reach it."""
TRAILERS = """\
Upstream-Status: Pending
Upstream-PR: none
Arch: any
Tests: tests/test_toy.py::test_row_keeps_its_bits
Counter-Test: tests/test_toy.py::test_stock_differs
Drop-When: upstream multiplies in fp32 itself
Load-Bearing: yes — without it a row's bits depend on the batch
Anchors: toy/router.py::Gate.forward
"""
GATE = '"""The gate in fp32."""\n\n\ndef gate(x):\n    return x * 2.0\n'
TESTS = "def test_row_keeps_its_bits():\n    assert True\n\n\ndef test_stock_differs():\n    assert True\n"
HEAD = f"""\
{export.ZERO}
From: toy <toy@toy.invalid>
Date: Mon, 30 Nov 2026 00:00:00 +0000
Subject: {{}}

"""
PINS = f"""\
schema = 1
[upstream.toy]
distribution = "toy"
package = "toy"
target = "build/toy"
version = "{NEW}"
[upstream.toy.release."{NEW}"]
sdist = "{'0' * 64}"
[upstream.toy.release."{OLD}"]
sdist = "{'1' * 64}"
[profile.all]
upstreams = ["toy"]
arch = ["sm90", "sm100"]
"""


def files(texts: dict[str, str | bytes]) -> Files:
    return {path: File(text if isinstance(text, bytes) else text.encode()) for path, text in texts.items()}


def diff(before: Files, after: Files) -> bytes:
    """The canonical diff between two sets of files."""
    with Shadow({}) as shadow:
        return export.diff_trees(shadow, shadow.tree_of(before), shadow.tree_of(after))


def edit(texts: Files, path: str, old: str, new: str) -> Files:
    data = texts[path].data
    assert old.encode() in data, f"{old!r} is not in {path}"
    return texts | {path: File(data.replace(old.encode(), new.encode(), 1), texts[path].mode)}


class Checkout:
    """root: the checkout. base: release -> its pristine files; the object itself serves as a lock.BaseFiles."""

    def __init__(self, root: Path):
        self.root = root
        self.base = {NEW: files(BASE), OLD: files(BASE)}
        self.write("patchset.toml", PINS)
        self.write("patches/toy/series", "")
        self.write("README.md", "Nothing is claimed yet.\n")
        self.write("overlays/toy/toy/zero_mismatch/__init__.py", '"""Ours."""\n')
        self.write("overlays/toy/toy/zero_mismatch/gate.py", GATE)
        self.write("tests/test_toy.py", TESTS)
        self.state = dict(self.base[NEW])

    @property
    def pins(self) -> pins.Pins:
        return pins.load(self.root)

    def __call__(self, upstream, release, wanted):
        known = self.base[release.version]
        return {path: known[path] for path in wanted if path in known}

    def write(self, path: str, text: str | bytes) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
        return place

    def read(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def change(self, path: str, old: str, new: str) -> None:
        """Replace one piece of a file of the checkout."""
        text = self.read(path)
        assert old in text, f"{old!r} is not in {path}"
        self.write(path, text.replace(old, new, 1))

    def add(self, slug: str, after: Files, *, subject: str = "", body: str = BODY, trailers: str = TRAILERS) -> Path:
        """Append a patch that turns what the series gives so far into `after`."""
        text = diff(self.state, after)
        self.state = dict(after)
        head = HEAD.format(subject or f"The {slug} hook keeps a row at its bits") + f"{body}\n\n{trailers}---\n"
        with open(self.root / "patches/toy/series", "a", encoding="utf-8") as stream:
            stream.write(f"{slug}\n")
        return self.write(f"patches/toy/{slug}.patch", head.encode() + text)

    def patch(self, slug: str, path: str, old: str, new: str, **options) -> Path:
        return self.add(slug, edit(self.state, path, old, new), **options)

    def export(self, check: bool = False):
        return export.run(self.root, self.pins, check, self)

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        """Inode and bytes of every file: whether anything was written at all."""
        return {str(path.relative_to(self.root)): (path.stat().st_ino, path.read_bytes())
                for path in self.root.rglob("*") if path.is_file()}


def hooked(root: Path) -> Checkout:
    """A checkout with two patches on two files, in canonical form, with their lock."""
    made = Checkout(root)
    made.patch("gate-fp32", "toy/router.py", "        y = x * 2\n",
               "        from toy.zero_mismatch.gate import gate\n\n        y = gate(x)\n")
    made.patch("line-thirty", "toy/lines.txt", "line 30\n", "line thirty\n",
               trailers=TRAILERS.replace("toy/router.py::Gate.forward", "toy/router.py::route"))
    made.export()
    return made


def user_git(*args: str, cwd: Path, config: Path) -> str:
    """git as a user with that configuration runs it."""
    env = {key: value for key, value in git.environment().items() if not key.startswith("GIT_CONFIG_")}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": str(config)}
    return subprocess.run(["git", *args], cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


def tree(made: Checkout, version: str = NEW, folder: str = "build/toy") -> target.Target:
    """A tree of that release with the series applied."""
    root = made.root / folder
    for path, file in made.base[version].items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.data)
        place.chmod(int(file.mode, 8) & 0o777)
    (root / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n\n")
    one = target.tree(made.pins.upstream("toy"), root)
    deliver.apply(deliver.Request(made.root, made.pins, made.pins.profile("all")), one)
    return one


def pack(made: Checkout) -> None:
    """Pin an sdist of every release and put it into the archive cache cache/ (point XDG_CACHE_HOME there)."""
    pins_text = made.read("patchset.toml")
    for version, base in made.base.items():
        about = File(f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n\n".encode())
        raw = io.BytesIO()
        with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
            for path, file in sorted({**base, "PKG-INFO": about}.items()):
                entry = tarfile.TarInfo(f"toy-{version}/{path}")
                entry.size, entry.mode = len(file.data), int(file.mode, 8) & 0o777
                tar.addfile(entry, io.BytesIO(file.data))
        digest = hashlib.sha256(raw.getvalue()).hexdigest()
        made.write(f"cache/zero-mismatch/{digest}/toy-{version}.tar.gz", raw.getvalue())
        pins_text = re.sub(rf'("{re.escape(version)}"\]\nsdist = )"[0-9a-f]+"', rf'\1"{digest}"', pins_text)
    made.write("patchset.toml", pins_text)
