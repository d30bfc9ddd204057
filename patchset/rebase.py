"""Verb rebase: what becomes of the series on another release of its upstream, and a proposal for each patch.

rebase.py puts the parts together: rebase_release (the two releases), rebase_replay (one patch after the other),
rebase_merge (questions to git), rebase_verdicts and rebase_place (what the answers mean), sentinel (contracts of
anchored symbols), rebase_names (names that are gone), rebase_write (patches and conflicts on disk), rebase_report (the
same for people).
"""
from __future__ import annotations

from pathlib import Path

from . import progress, rebase_release, rebase_report, rebase_write, sentinel, series
from .errors import UsageError
from .pins import Pins, Upstream
from .rebase_merge import Merger
from .rebase_release import ReleaseTree
from .rebase_replay import PatchResult, Replay
from .rebase_report import Rebase
from .series import Patch
from .shadow import File, Shadow
from .ui import Result


def run(root: Path, pins: Pins, upstream: str, to: str, out: Path | None = None,
        apply_proposals: bool = False) -> Result:
    from . import fetch  # only a rebase of real releases needs pip and the network

    up = pins.upstream(upstream)
    base = up.release()
    if to == base.version:
        raise UsageError(f"{upstream} {to} is what the series is written for", remedy="name another release with --to")
    pinned = to in up.releases
    release = up.releases[to] if pinned else fetch.unpinned(up, to)
    named = _named(_load(root, up, base.version, to))
    old = rebase_release.read(base.version, fetch.sdist(up, base), named)
    new = rebase_release.read(to, fetch.sdist(up, release), named)
    out = out or root / "build" / "rebase" / f"{upstream}-{to}"
    done = replay(root, up, old, new, out, apply_proposals)
    done.sdist, done.pinned = release.sdist, pinned
    return rebase_report.write(done, root, out)


def _load(root: Path, upstream: Upstream, base: str, to: str) -> list[tuple[Patch, Patch | None]]:
    """Each patch of the series, with the one a person has already written for the new release."""
    pairs = zip(series.load(root, upstream.name, base), series.load(root, upstream.name, to), strict=True)
    return [(patch, other if other.path != patch.path else None) for patch, other in pairs]


def _named(patches: list[tuple[Patch, Patch | None]]) -> set[str]:
    both = [patch for pair in patches for patch in pair if patch]
    return {path for patch in both for path in [*patch.paths, *(anchor.path for anchor in _anchors(patch))]}


def _anchors(patch: Patch) -> list[sentinel.Anchor]:
    return sentinel.anchors(patch.values("Anchors"))


def replay(root: Path, upstream: Upstream, old: ReleaseTree, new: ReleaseTree, out: Path,
           apply_proposals: bool = False) -> Rebase:
    """Replay the series from one release on the other; writes proposals and conflicts under `out`."""
    patches = _load(root, upstream, old.version, new.version)
    done = Rebase(upstream.name, old.version, new.version)
    touched = {path for patch, _ in patches for path in patch.paths}
    named = touched | {anchor.path for patch, _ in patches for anchor in _anchors(patch)}
    base = {path: old.files[path] for path in sorted(touched) if path in old.files}
    with Shadow(base) as shadow:
        git = Merger(shadow)
        done.renamed = rebase_release.renamed(git, old, new, named)
        targets = {path: name for path, (name, _) in done.renamed.items()}
        overlay = {path: File(file.read_bytes()) for path, file in series.overlay_files(root, upstream.name).items()}
        play = Replay(shadow, (old.files.get, new.files.get), (old.version, new.version), targets, upstream.package,
                      overlay)
        texts = {}
        with progress.bar(f"replay {upstream.name} on {new.version}", len(patches), unit="patches") as advance:
            for patch, written in patches:
                result = _step(play, patch, written, (old, new), out / "conflicts" / patch.slug)
                done.patches.append(result)
                if text := rebase_write.proposal(git, result, old.version):
                    texts[patch.slug] = text
                if result.sides and not result.resolved:
                    done.conflicts[patch.slug] = out / "conflicts" / patch.slug
                advance(1)
        done.overlay = play.overlay_imports()
    done.proposals = rebase_write.write_proposals(out / "patches" / upstream.name, texts, new.version)
    if apply_proposals:
        ready = {r.patch.slug: texts[r.patch.slug] for r in done.patches
                 if rebase_write.installable(r) and r.patch.slug in texts}
        done.installed = rebase_write.install(root / "patches" / upstream.name, ready, new.version)
    return done


def _step(play: Replay, patch: Patch, written: Patch | None, releases: tuple[ReleaseTree, ReleaseTree],
          folder: Path) -> PatchResult:
    """One patch; what is left to a person goes into `folder`."""
    old, new = releases
    findings = [finding for anchor in _anchors(patch)
                for finding in sentinel.compare(anchor, old.data, new.data, new.python, play.targets)]
    result = play.step(patch, findings, written, lambda judged: rebase_write.settled(folder, judged))
    if result.sides and not result.resolved:
        rebase_write.write_conflict(folder, result.sides)
    return result
