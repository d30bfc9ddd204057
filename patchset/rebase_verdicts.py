"""The verdict on one file of one patch, with the evidence for it: pure decisions over what git answered.

Three versions of a file are at hand: `base` (the old release with the patches before this one), `patched` (base with
this patch) and `upstream` (the new release with the patches that could be carried over so far).
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from . import rebase_place as place
from .diff import Hunk
from .rebase_merge import Group, Merge, Merger, apply_groups, groups_of
from .shadow import File, Offset

CLEAN, OFFSET, MERGED, RESOLVED = "clean", "offset", "merged", "resolved"
ABSORBED, PARTLY, MOVED = "absorbed", "partly absorbed", "moved"
CONFLICT, DELETED, BLOCKED = "conflict", "deleted", "blocked"
READY = (CLEAN, OFFSET, MERGED, RESOLVED)  # no person needed
FAILED = (CONFLICT, DELETED, BLOCKED)  # nothing carried over; what depends on it is blocked
BLAME_LINES = 40


@dataclass
class HunkResult:
    """One hunk. `old` is its range in base (first, last); `line` where it lands in the new release, if it does."""

    number: int
    old: tuple[int, int]
    status: str
    line: int | None = None
    evidence: list[str] = field(default_factory=list)
    upstream: str = ""  # what the release changed within the hunk's range, as a diff

    def as_json(self) -> dict:
        return {**vars(self), "old": list(self.old)}


@dataclass
class FileResult:
    """One file of a patch on the new release. `carried`: there is a result, `after` (None: the file is removed)."""

    path: str
    target: str
    verdict: str
    evidence: list[str] = field(default_factory=list)
    hunks: list[HunkResult] = field(default_factory=list)
    offsets: list[Offset] = field(default_factory=list)
    after: File | None = None
    merged: bytes | None = None  # a conflict's text, with markers

    @property
    def carried(self) -> bool:
        return self.verdict not in FAILED

    def as_json(self) -> dict:
        return {"path": self.path, "target": self.target, "verdict": self.verdict, "evidence": self.evidence,
                "hunks": [hunk.as_json() for hunk in self.hunks]}


@dataclass(frozen=True)
class Versions:
    """The three versions of a file, None where it does not exist, and the labels of base, upstream and patched."""

    path: str
    base: File | None
    patched: File | None
    upstream: File | None
    section: bytes  # the patch's diff of this file
    names: tuple[str, str, str]


def judge(git: Merger, v: Versions) -> FileResult:
    if v.upstream is None or v.base is None or v.patched is None:
        return _whole_file(v)
    result = _judge_text(git, v)
    if result.after and v.patched.mode != v.base.mode:
        result.after = replace(result.after, mode=v.patched.mode)
    return result


def _whole_file(v: Versions) -> FileResult:
    """Creations, deletions, and files that the release no longer has."""
    result = FileResult(v.path, v.path, CLEAN, after=v.patched)
    if v.base is None and v.upstream is not None:
        same = v.upstream == v.patched
        result.verdict = ABSORBED if same else CONFLICT
        result.evidence = ["the release has the very file that the patch creates" if same
                           else "the patch creates this file, and the release now has another one by that name"]
        result.merged = None if same else v.upstream.data
    elif v.patched is None and v.upstream is None:
        result.verdict, result.evidence = ABSORBED, ["the patch removes this file; the release no longer has it"]
    elif v.patched is None and v.upstream != v.base:
        result.verdict, result.merged = CONFLICT, v.upstream.data
        result.evidence = ["the patch removes this file, and the release has changed it"]
    elif v.base is not None and v.upstream is None:
        result.verdict = DELETED
        result.evidence = ["the release has neither this file nor a new one like it"]
    return result


def _judge_text(git: Merger, v: Versions) -> FileResult:
    tried = git.apply(v.path, v.upstream, v.section)
    merge = git.merge(v.base, v.upstream, v.patched, v.names)
    result = FileResult(v.path, v.path, CLEAN)
    result.hunks = _hunks(git, v)
    if v.base.data == v.patched.data:  # only the mode changes
        result.verdict = ABSORBED if v.upstream.mode == v.patched.mode else CLEAN
        result.after = v.upstream
    elif not merge.conflict and merge.data == v.upstream.data:
        _absorbed(git, v, result, "the 3-way merge changes nothing")
    elif tried and not merge.conflict and tried[0].data == merge.data:
        _applied(result, tried)
    elif tried:
        _disputed(git, v, result, tried, merge)
    elif not merge.conflict:
        _merged(git, v, result, merge)
    else:
        _conflict(git, v, result, merge)
    return result


def _applied(result: FileResult, tried: tuple[File, list[Offset]]) -> None:
    result.after, result.offsets = tried
    result.verdict = OFFSET if result.offsets else CLEAN
    result.evidence.append("git apply without fuzz and the 3-way merge agree")


def _disputed(git: Merger, v: Versions, result: FileResult, tried, merge: Merge) -> None:
    """git apply found the lines, yet the merge differs: trust it only if each hunk has one possible place."""
    doubts = place.doubts(v.path, v.base.data, v.upstream.data, git.hunks(v.base, v.patched), tried[1])
    if not doubts:
        _applied(result, tried)
        result.evidence[-1] = ("git apply without fuzz; the 3-way merge differs as the block stands elsewhere now, but "
                               "each hunk's lines stand once in the file and in the same function")
        return
    result.verdict, result.merged = CONFLICT, merge.data
    result.evidence += ["git apply would land somewhere, the 3-way merge disagrees", *doubts]


def _merged(git: Merger, v: Versions, result: FileResult, merge: Merge) -> None:
    result.after = File(merge.data, v.upstream.mode)
    wanted, got = _lines(git.groups(v.base, v.patched)), _lines(git.groups(v.upstream, result.after))
    if wanted == got:
        result.verdict = MERGED
        result.evidence.append("the context changed; the 3-way merge has no conflict and makes the same change")
    elif got - wanted:
        result.verdict, result.merged, result.after = CONFLICT, merge.data, None
        result.evidence.append(f"the 3-way merge has no conflict, yet changes {sum((got - wanted).values())} lines"
                               " that the patch does not")
    else:
        result.verdict = PARTLY
        had, of = sum((wanted - got).values()), sum(wanted.values())
        result.evidence.append(f"the 3-way merge leaves out {had} of {of} changed lines: already there")


def _lines(groups: list[Group]) -> Counter:
    return Counter((sign, line) for group in groups for sign, lines in ((b"-", group.removed), (b"+", group.added))
                   for line in lines)


def _absorbed(git: Merger, v: Versions, result: FileResult, why: str) -> None:
    result.verdict, result.after = ABSORBED, v.upstream
    own = git.patch_id(v.section)
    if own and own == git.patch_id(git.text({v.path: v.base}, {v.path: v.upstream})):
        result.evidence.append(f"patch-id {own[:12]}: the release's whole change of this file is this patch")
    result.evidence.append(why)
    standing = sum(hunk.status == "already upstream" for hunk in result.hunks)
    result.evidence.append(f"{standing} of {len(result.hunks)} hunks stand in the release, found hunk by hunk")


def _conflict(git: Merger, v: Versions, result: FileResult, merge: Merge) -> None:
    """A conflict, unless taking out the hunks that the release already has leaves none."""
    result.verdict, result.merged = CONFLICT, merge.data
    there = [hunk.number for hunk in result.hunks if hunk.status == "already upstream"]
    hunks = git.hunks(v.base, v.patched)
    groups = [group for hunk in hunks for group in groups_of(hunk)]
    if not there or apply_groups(v.base.data, groups) != v.patched.data:
        return
    if len(there) == len(hunks):
        _absorbed(git, v, result, "every hunk's result stands in the release, none of its former lines do")
        return
    left = [group for number, hunk in enumerate(hunks, 1) if number not in there for group in groups_of(hunk)]
    rest = File(apply_groups(v.base.data, left), v.patched.mode)
    again = git.merge(v.base, v.upstream, rest, v.names)
    if not again.conflict and again.data != v.upstream.data:
        result.verdict, result.merged, result.after = PARTLY, None, File(again.data, v.upstream.mode)
        numbers = ", ".join(map(str, there))
        result.evidence.append(f"hunks {numbers} are already upstream; the rest merges without conflict")


def _hunks(git: Merger, v: Versions) -> list[HunkResult]:
    changes = git.groups(v.base, v.upstream)
    upstream = v.upstream.data.split(b"\n")
    return [_hunk(number, hunk, changes, upstream) for number, hunk in enumerate(git.hunks(v.base, v.patched), 1)]


def _hunk(number: int, hunk: Hunk, changes: list[Group], upstream: list[bytes]) -> HunkResult:
    first, last = hunk.old_start, hunk.old_start + hunk.old_count - 1
    result = HunkResult(number, (first, last), "")
    touching = [g for g in changes if g.old <= last + 1 and g.old_end >= first and not _beside(g, first, last)]
    if not touching:
        shift = sum(len(g.added) - len(g.removed) for g in changes if g.old_end <= first)
        result.line = first + shift
        result.status = f"offset {shift:+d}" if shift else "in place"
        return result
    result.upstream = _blame(touching)
    theirs = {(group.old, group.removed, group.added) for group in touching}
    same = [group for group in groups_of(hunk) if (group.old, group.removed, group.added) in theirs]
    standing = place.find(upstream, hunk.new_lines())
    if len(same) == len(groups_of(hunk)):
        result.status, result.line = "already upstream", touching[0].new
        result.evidence.append("the release makes the same change at the same place")
    elif len(standing) == 1 and not place.find(upstream, hunk.old_lines()):
        result.status, result.line = "already upstream", standing[0]
        result.evidence.append("the hunk's result stands there, its former lines do not (reverse check)")
    elif same:
        result.status = "partly upstream"
        result.evidence.append(f"the release makes {len(same)} of its {len(groups_of(hunk))} changes")
    else:
        _changed_context(hunk, touching, upstream, result)
    return result


def _beside(group: Group, first: int, last: int) -> bool:
    """An upstream change next to the hunk, outside it."""
    if group.removed:
        return group.old > last or group.old_end <= first
    return group.old > last or group.old <= first


def _changed_context(hunk: Hunk, touching: list[Group], upstream: list[bytes], result: HunkResult) -> None:
    result.status = "context changed"
    removed = [line for group in groups_of(hunk) for line in group.removed if line.strip()]
    indented = place.reindented(upstream, hunk)
    if indented:
        result.line, step = indented
        result.evidence.append(f"the hunk's lines stand at line {result.line}, reindented by {step:+d}")
    elif removed and not any(line in upstream for line in removed):
        result.status = "rewritten upstream"
        result.evidence.append("the release has none of the lines this hunk replaces: it may be superseded")
    elif any(g.old < u.old_end and u.old < g.old_end for g in groups_of(hunk) for u in touching):
        result.evidence.append("the release changed lines at the very place of this hunk's change")
    else:
        result.evidence.append("the release changed lines around it, not those it replaces")


def _blame(groups: list[Group]) -> str:
    lines = []
    for group in groups:
        lines.append(f"@@ -{group.old},{len(group.removed)} +{group.new},{len(group.added)} @@")
        lines += ["-" + line.decode("utf-8", "replace") for line in group.removed]
        lines += ["+" + line.decode("utf-8", "replace") for line in group.added]
    if len(lines) > BLAME_LINES:
        lines[BLAME_LINES:] = [f"... {len(lines) - BLAME_LINES} more lines"]
    return "\n".join(lines)
