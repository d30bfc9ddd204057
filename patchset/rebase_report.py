"""The report of a rebase: for a terminal, as JSON, and as a markdown file."""
from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .export import replace_file
from .rebase_replay import NAME_GONE, PatchResult
from .rebase_verdicts import ABSORBED, BLOCKED, CLEAN, CONFLICT, DELETED, MERGED, MOVED, OFFSET, PARTLY
from .sentinel import CHANGED, GONE, READ, digest
from .ui import Result, table


@dataclass
class Rebase:
    """The outcome. `renamed`: old path -> (new path, similarity). `proposals` and `installed`: slug -> file. `overlay`:
    imports of our own modules that the new release does not satisfy."""

    upstream: str
    old: str
    new: str
    patches: list[PatchResult] = field(default_factory=list)
    renamed: dict[str, tuple[str, int]] = field(default_factory=dict)
    proposals: dict[str, Path] = field(default_factory=dict)
    installed: dict[str, Path] = field(default_factory=dict)
    conflicts: dict[str, Path] = field(default_factory=dict)
    overlay: list[str] = field(default_factory=list)
    sdist: str = ""  # digest of the new release's sdist
    pinned: bool = True

    @property
    def exit_code(self) -> int:
        return 3 if self.overlay or any(result.needs_person for result in self.patches) else 0


TODO = {
    ABSORBED: "check that the release's change is the same, then drop the patch",
    PARTLY: "check what is left in the proposal, then copy it to patches/, or edit it as a conflict",
    MOVED: "check that the file is the same one, then copy the proposal to patches/, or edit it as a conflict",
    CONFLICT: "settle conflicts/<patch>/merged, create the file settled beside it, run rebase again",
    DELETED: "find where the code went; write the files it needs into conflicts/<patch>/merged, then as for a conflict",
    BLOCKED: "settle the patch that blocks it first",
    CHANGED: "read what changed (report.md shows it); if the patch still holds, add to its trailers:",
    NAME_GONE: "see what the release calls it now, and edit conflicts/<patch>/merged as for a conflict",
    GONE: "see what took the symbol's place, and edit conflicts/<patch>/merged as for a conflict",
}


def write(done: Rebase, root: Path, out: Path) -> Result:
    """report.md and report.json under `out`; the verb's Result."""
    data = as_json(done, root)
    page, record = "\n".join(markdown(done, root)), json.dumps(data, indent=1, ensure_ascii=False)
    replace_file(out / "report.md", (page + "\n").encode("utf-8", "replace"))
    replace_file(out / "report.json", (record + "\n").encode("utf-8", "replace"))
    lines = text(done, root)
    lines.append(f"report, proposals and conflicts: {_relative(out, root)}")
    return Result(data, lines, done.exit_code)


def as_json(done: Rebase, root: Path) -> dict:
    return {
        "upstream": done.upstream, "from": done.old, "to": done.new,
        "sdist": done.sdist, "pinned": done.pinned,
        "overlay": done.overlay,
        "counts": dict(Counter(result.verdict for result in done.patches)),
        "renamed": {path: {"to": name, "similarity": same} for path, (name, same) in done.renamed.items()},
        "patches": [_patch_json(done, result, root) for result in done.patches],
    }


def _patch_json(done: Rebase, result: PatchResult, root: Path) -> dict:
    slug = result.patch.slug
    places = {"proposal": done.proposals, "installed": done.installed, "conflict": done.conflicts}
    return {
        "slug": slug, "verdict": result.verdict, "lines": result.text, "needs_person": result.needs_person,
        "blocked_by": result.blocked_by, "resolved": result.resolved, "notes": result.notes, "names": result.names,
        "contract": digest(result.findings) if result.findings else None, "contract_read": result.contract_read,
        "files": [file.as_json() for file in result.files],
        "sentinel": [finding.as_json() for finding in result.findings],
        **{key: _relative(found[slug], root) if slug in found else None for key, found in places.items()},
    }


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def summary(done: Rebase) -> str:
    counts = Counter(result.verdict for result in done.patches)
    said = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()) or "an empty series"
    return f"{done.upstream} {done.old} -> {done.new}: {len(done.patches)} patches: {said}"


def text(done: Rebase, root: Path) -> list[str]:
    lines = [summary(done)]
    if not done.pinned:
        lines.append(f"{done.upstream} {done.new} is not pinned; to support it add to patchset.toml: "
                     f'[upstream.{done.upstream}.release."{done.new}"] sdist = "{done.sdist}"')
    lines += table(["verdict", "patch", "evidence"], [[r.verdict, r.patch.slug, brief(r)] for r in done.patches])
    for result in done.patches:
        if result.needs_person:
            lines += ["", f"{result.patch.slug}: {result.verdict}", *("  " + line for line in _details(result))]
            lines.append(f"  what to do: {_todo(done, result)}")
    if done.overlay:
        lines += ["", "the overlay leans on what this release lacks:", *("  " + line for line in done.overlay)]
    if done.installed:
        lines += ["", "installed: " + ", ".join(_relative(path, root) for path in done.installed.values())]
    return lines


def _todo(done: Rebase, result: PatchResult) -> str:
    if result.verdict == CHANGED:
        return f"{TODO[CHANGED]} {READ}: {done.new} {digest(result.findings)} — <why>"
    return TODO.get(result.verdict, TODO[GONE])


def brief(result: PatchResult) -> str:
    """One line of evidence."""
    if result.names:
        return f"{_some([said.partition(': ')[2] for said in result.names])}; its lines: {result.text}"
    if result.resolved:
        return "; ".join([f"by {result.resolved}", f"without it: {result.text}", *result.notes])
    if result.blocked_by:
        return f"by {', '.join(result.blocked_by)}; its own lines: {result.text}"
    if result.verdict in (CHANGED, GONE):
        return f"{_some([f.symbol.rpartition('::')[2] for f in result.findings])}; its lines: {result.text}"
    said = []
    if result.text == OFFSET:
        said += [f"{o.path} hunk {o.hunk} at {o.line} ({o.lines:+d})" for f in result.files for o in f.offsets]
    elif result.text != CLEAN:
        said += map(_file_brief, [f for f in result.files if f.verdict == result.text] or result.files)
    if result.contract_read:
        said.append(f"contract changed: {result.contract_read}")
    return "; ".join(said)


def _some(words: list[str], most: int = 3) -> str:
    words = list(dict.fromkeys(words))
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _file_brief(file) -> str:
    if file.target != file.path:
        return f"{file.path} -> {file.target}"
    hunks = [str(hunk.number) for hunk in file.hunks if hunk.upstream]
    return file.path + (f" hunk {', '.join(hunks)}" if hunks and file.verdict in (CONFLICT, MERGED, PARTLY) else "")


def _details(result: PatchResult, upstream_changes: bool = False) -> list[str]:
    lines = [*result.notes, *result.names]
    for file in result.files:
        lines.append(f"{file.target}: {file.verdict}" + "".join(f"; {said}" for said in file.evidence))
        for hunk in file.hunks:
            if hunk.upstream or upstream_changes:
                place = f" -> {hunk.line}" if hunk.line else ""
                lines.append(f"  hunk {hunk.number} (lines {hunk.old[0]}-{hunk.old[1]}{place}): {hunk.status}"
                             + "".join(f"; {said}" for said in hunk.evidence))
    for finding in result.findings:
        where = f"; now {', '.join(finding.where)}" if finding.where else ""
        through = f" (called by {finding.anchor.partition('::')[2]})" if finding.symbol != finding.anchor else ""
        lines.append(f"{finding.symbol}{through}: {finding.kind}{where}")
    return lines


def markdown(done: Rebase, root: Path) -> list[str]:
    lines = [f"# {done.upstream} {done.old} to {done.new}", "", f"{summary(done)}.", "",
             f"sdist of {done.new}: sha256 `{done.sdist}`" + ("" if done.pinned else " (not pinned)"), ""]
    if done.renamed:
        lines += ["Renamed between the releases:", ""]
        lines += [f"- `{path}` -> `{name}` ({same}% alike)" for path, (name, same) in done.renamed.items()] + [""]
    if done.overlay:
        lines += ["The overlay leans on what this release lacks:", "", *(f"- {line}" for line in done.overlay), ""]
    lines += ["| patch | verdict | evidence |", "| --- | --- | --- |"]
    lines += [f"| {r.patch.slug} | {r.verdict} | {brief(r).replace('|', chr(92) + '|')} |" for r in done.patches]
    for result in done.patches:
        if result.verdict != "clean":
            lines += ["", *_section(done, result, root)]
    return lines


def _section(done: Rebase, result: PatchResult, root: Path) -> list[str]:
    slug = result.patch.slug
    lines = [f"## {slug}: {result.verdict}", "", result.patch.subject, ""]
    lines += [f"- {line}" if not line.startswith("  ") else f"  - {line.strip()}"
              for line in _details(result, upstream_changes=True)]
    if result.needs_person:
        lines.append(f"- what to do: {_todo(done, result)}")
    for name, found in (("proposal", done.proposals), ("installed", done.installed), ("conflict", done.conflicts)):
        if slug in found:
            lines.append(f"- {name}: `{_relative(found[slug], root)}`")
    for file in result.files:
        for hunk in file.hunks:
            if hunk.upstream:
                lines += _fenced(f"What the release changed under hunk {hunk.number} of `{file.path}`:", hunk.upstream)
    for finding in result.findings:
        if finding.diff:
            lines += _fenced(f"`{finding.symbol}`, normalised:", finding.diff)
    return lines


def _fenced(title: str, diff: str) -> list[str]:
    return ["", title, "", "````diff", *diff.splitlines(), "````"]
