"""The pin of a release that a test publishes itself, also for the Pythons that it starts."""
from patchset.pins import Release, Upstream


def toy(digest: str, version: str = "1.0", **more) -> tuple[Upstream, Release]:
    release = Release(version=version, sdist=digest, **more)
    return Upstream("toy", "toy-core", "toy_core", "build/toy", version, {version: release}), release
