"""A synthetic upstream of two releases, and a series on the first, for the tests of rebase."""
from __future__ import annotations

from pathlib import Path

from checkout import NEW as BASE_VERSION
from checkout import OLD as VERSION  # the release to move to; which number is larger does not matter
from checkout import TRAILERS, Checkout, edit, files

from patchset import rebase, rebase_report
from patchset.rebase_release import ReleaseTree
from patchset.rebase_report import Rebase
from patchset.shadow import Files

__all__ = ["BASE_VERSION", "ENGINE", "VERSION", "Upstream", "edit", "files"]

ENGINE = "toy/engine.py"
SOURCE = '''\
"""The engine."""
import os

LIMIT = 8


def scale(x):
    return x * 2


def route(x):
    first = x
    second = first
    third = second
    fourth = third
    fifth = fourth
    return fifth


class Gate:
    def __init__(self, width):
        self.width = width
        self.depth = 1
        self.height = 2

    def forward(self, x):
        before = x
        y = scale(x)
        after = y
        return after

    def reduce(self, y):
        total = y
        for step in range(self.width):
            total += step
        return total


def last(x):
    a = x
    b = a
    c = b
    d = c
    return d
'''
FORWARD = ("        y = scale(x)\n", "        y = scale(x) if not os.environ else hooked(x)\n")
LAST = ("    c = b\n", "    c = hooked(b)\n")
ROUTE = ("    third = second\n", "    third = hooked(second)\n")


class Upstream(Checkout):
    """`release` is the other release; `edit_release` changes it. `hook` adds a patch to the series."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.base[BASE_VERSION] = files({ENGINE: SOURCE, "toy/__init__.py": "", "toy/other.py": "OTHER = 1\n" * 30})
        self.state = dict(self.base[BASE_VERSION])
        self.release: Files = dict(self.state)

    def edit_release(self, *pairs: tuple[str, str], path: str = ENGINE) -> None:
        for old, new in pairs:
            self.release = edit(self.release, path, old, new)

    def hook(self, slug: str, *pairs: tuple[str, str], path: str = ENGINE, depends_on: str = "",
             anchor: str = f"{ENGINE}::Gate.forward") -> None:
        trailers = TRAILERS.replace("toy/router.py::Gate.forward", anchor)
        if depends_on:
            trailers = f"Depends-On: {depends_on}\n{trailers}"
        after = self.state
        for old, new in pairs:
            after = edit(after, path, old, new)
        self.add(slug, after, trailers=trailers)

    @property
    def out(self) -> Path:
        return self.root / "build" / "rebase" / f"toy-{VERSION}"

    def rebase(self, install: bool = False) -> Rebase:
        trees = [ReleaseTree(version, tree, frozenset(tree)) for version, tree in
                 ((BASE_VERSION, self.base[BASE_VERSION]), (VERSION, self.release))]
        done = rebase.replay(self.root, self.pins.upstream("toy"), *trees, self.out, install)
        self.result = rebase_report.write(done, self.root, self.out)
        return done

    def proposal(self, slug: str) -> str | None:
        path = self.out / "patches" / "toy" / f"{slug}@{VERSION}.patch"
        return path.read_text() if path.exists() else None


def only(done):
    """The one patch of a replay."""
    [result] = done.patches
    return result


def apply_alone(release: Files, text: str) -> Files:
    """A patch's result on a release; raises if it does not apply with no offset at all."""
    from patchset.series import parse_patch
    from patchset.shadow import Shadow

    patch = parse_patch("toy", "proposal", Path("proposal.patch"), text.encode())
    with Shadow(release) as shadow:
        assert shadow.apply(patch) == [], "the proposal has offsets"
        return shadow.files()
