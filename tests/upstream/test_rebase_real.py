"""Rebase between two real releases of vLLM, where the right answer is known beforehand.

The releases' own changes serve as patches: what a release contains must be called absorbed. A marker put into real
files must land in the same function, between the same lines, or be refused. Then our own series.
"""
from __future__ import annotations

import random
from pathlib import Path

import pytest

from patchset import export, fetch, pins, rebase, rebase_place, rebase_release, series
from patchset.errors import NeedsWork
from patchset.rebase_merge import Merger, apply_groups
from patchset.rebase_release import ReleaseTree
from patchset.rebase_report import Rebase
from patchset.shadow import File, Files, Shadow

ROOT = Path(__file__).resolve().parents[2]
TO = "0.32.0"
SAMPLE = 24
MARKER = b"# marker of the rebase test"
HEAD = f"{export.ZERO}\nFrom: t <t@t.invalid>\nDate: Mon, 30 Nov 2026 00:00:00 +0000\nSubject: %s\n\nArch: any\n---\n"
PINS = """\
schema = 1
[upstream.vllm]
distribution = "vllm"
package = "vllm"
target = "build/vllm"
version = "{0}"
[upstream.vllm.release."{0}"]
sdist = "{2}"
[upstream.vllm.release."{1}"]
sdist = "{2}"
[profile.all]
upstreams = ["vllm"]
arch = ["sm90"]
"""


@pytest.fixture(scope="module")
def trees() -> tuple[ReleaseTree, ReleaseTree]:
    upstream = pins.load(ROOT).upstream("vllm")
    try:
        releases = upstream.release(), upstream.releases.get(TO) or fetch.unpinned(upstream, TO)
        return tuple(rebase_release.read(release.version, fetch.sdist(upstream, release), []) for release in releases)
    except NeedsWork as error:
        pytest.skip(f"no sdists of vLLM: {error}")


@pytest.fixture(scope="module")
def changed(trees) -> list[str]:
    """Some of the package's files that differ between the releases, always the same ones."""
    old, new = trees
    every = sorted(path for path in old.files if path.startswith("vllm/") and path.endswith(".py")
                   and path in new.files and old.files[path] != new.files[path] and new.files[path].data)
    return random.Random(0).sample(every, SAMPLE)


def replay(folder: Path, trees: tuple[ReleaseTree, ReleaseTree], edits: list[tuple[str, File | None]]) -> Rebase:
    """A series with one patch an edit: path and its new content."""
    old, new = trees
    place = folder / "patches" / "vllm"
    place.mkdir(parents=True)
    (folder / "overlays" / "vllm").mkdir(parents=True)
    (folder / "patchset.toml").write_text(PINS.format(old.version, new.version, "0" * 64))
    state: Files = {path: old.files[path] for path, _ in edits}
    with Shadow(state) as shadow:
        for number, (path, file) in enumerate(edits):
            after = {key: value for key, value in (state | {path: file}).items() if value is not None}
            text = export.diff_trees(shadow, shadow.tree_of(state), shadow.tree_of(after))
            (place / f"p-{number}.patch").write_bytes((HEAD % path).encode() + text)
            state = after
    (place / "series").write_text("".join(f"p-{number}\n" for number in range(len(edits))))
    return rebase.replay(folder, pins.load(folder).upstream("vllm"), old, new, folder / "out")


def test_every_change_that_the_release_holds_is_absorbed_with_its_patch_id(tmp_path, trees, changed):
    old, new = trees
    edits = [(path, File(new.files[path].data, old.files[path].mode)) for path in changed]
    done = replay(tmp_path, trees, edits)
    missed = [(r.patch.subject, r.verdict) for r in done.patches if r.verdict != "absorbed"]
    assert not missed
    without = [r.patch.subject for r in done.patches if not any("patch-id" in word for word in r.files[0].evidence)]
    assert not without
    assert not done.proposals


def test_half_of_a_files_change_is_absorbed_too(tmp_path, trees, changed):
    old, new = trees
    edits = []
    with Shadow({}) as shadow:
        for path in changed:
            groups = Merger(shadow).groups(old.files[path], new.files[path])
            if len(groups) > 1:
                edits.append((path, File(apply_groups(old.files[path].data, groups[::2]), old.files[path].mode)))
    assert len(edits) > SAMPLE // 3
    done = replay(tmp_path, trees, edits)
    assert [(r.patch.subject, r.verdict) for r in done.patches if r.verdict != "absorbed"] == []


def test_own_hunk_beside_an_absorbed_one_is_what_is_proposed(tmp_path, trees, changed):
    old, new = trees
    edits = []
    with Shadow({}) as shadow:
        for path in changed:
            groups = Merger(shadow).groups(old.files[path], new.files[path])
            lines = apply_groups(old.files[path].data, groups[:1]).split(b"\n")
            touched = {line for g in groups for line in range(g.old - 8, g.old_end + 9)}
            after, end = groups[0].old_end + 20, len(old.files[path].data.split(b"\n"))
            free = [line for line in range(after, end) if line not in touched]
            if free:
                at = free[0] + len(groups[0].added) - len(groups[0].removed)
                edits.append((path, File(b"\n".join([*lines[:at], MARKER, *lines[at:]]), old.files[path].mode)))
    assert len(edits) > SAMPLE // 3
    done = replay(tmp_path, trees, edits)
    assert [(r.patch.subject, r.verdict) for r in done.patches if r.verdict != "partly absorbed"] == []
    for result in done.patches:
        text = done.proposals[result.patch.slug].read_bytes()
        proposal = series.parse_patch("vllm", result.patch.slug, result.patch.path, text)
        assert [(f.added, f.removed) for f in proposal.files] == [(1, 0)]


def test_marker_lands_between_the_same_lines_of_the_same_function_or_is_refused(tmp_path, trees, changed):
    old, _ = trees
    dice = random.Random(1)
    edits, state = [], {}
    for path in changed * 2:
        file = state.get(path, old.files[path])
        lines = file.data.split(b"\n")
        at = dice.randrange(1, len(lines) - 1)
        number = f" {len(edits)}".encode()
        state[path] = File(b"\n".join([*lines[:at], MARKER + number, *lines[at:]]), file.mode)
        edits.append((path, state[path]))
    done = replay(tmp_path, trees, edits)
    wrong, carried = [], 0
    for number, result in enumerate(done.patches):
        if result.needs_person:
            continue
        carried += 1
        path, file = edits[number]
        before, after = file.data.split(b"\n"), result.after[path].data.split(b"\n")
        word = MARKER + f" {number}".encode()
        was, now = before.index(word), after.index(word)
        same_lines = before[was - 1 : was + 2] == after[now - 1 : now + 2]
        scopes = rebase_place.enclosing(file.data, was + 1), rebase_place.enclosing(result.after[path].data, now + 1)
        if not same_lines or scopes[0] != scopes[1] or after.count(word) != 1:
            wrong.append((path, number, result.verdict, scopes))
    assert not wrong
    assert carried > len(edits) * 0.8, f"only {carried} of {len(edits)} were carried over"


def test_renamed_and_removed_files_of_the_release_are_told_apart(tmp_path, trees):
    """cli_args.py stands elsewhere in 0.32.0; the mono decode of AMD is new in 0.33.0."""
    old, _ = trees
    edits = [(path, File(MARKER + b"\n" + old.files[path].data, old.files[path].mode))
             for path in ("vllm/entrypoints/common/cli_args.py", "vllm/models/deepseek_v4/amd/mono_decode.py")]
    moved, deleted = replay(tmp_path, trees, edits).patches
    assert (moved.verdict, moved.files[0].target) == ("moved", "vllm/entrypoints/launchers/cli_args.py")
    assert deleted.verdict == "deleted"


@pytest.fixture(scope="module")
def ours(trees, tmp_path_factory) -> Rebase:
    """Our own series on the second supported release."""
    return rebase.replay(ROOT, pins.load(ROOT).upstream("vllm"), *trees, tmp_path_factory.mktemp("ours"))


def test_the_second_supported_release_needs_no_person(ours):
    assert [result.patch.slug for result in ours.patches] == series.slugs(ROOT, "vllm")
    assert [(r.patch.slug, r.verdict, r.notes, r.names) for r in ours.patches if r.needs_person] == []
    assert ours.overlay == []


def test_what_the_replay_holds_is_what_a_plain_application_gives(ours, trees):
    """The replay against git applying the files that `apply --version` takes, one after the other."""
    touched = {path for result in ours.patches for path in (*result.before, *result.after)}
    with Shadow({path: file for path, file in trees[1].files.items() if path in touched}) as shadow:
        for patch in series.load(ROOT, "vllm", TO):
            shadow.apply(patch)
        got = shadow.files()
    want = {}
    for result in ours.patches:
        want |= {path: result.after.get(path) for path in (*result.before, *result.after)}
    assert sorted(want) == sorted(touched)
    assert [path for path, file in want.items() if got.get(path) != file] == []
