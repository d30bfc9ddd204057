#!/usr/bin/env python3
"""Write docs/json.md: the fields of every verb's --json, with examples made by running the verbs on a toy upstream.

    python3 docs/make_json.py

A test (tests/unit/test_json_docs.py) runs the same scenes and fails if a verb says a field that FIELDS does not have,
or if FIELDS has one that no scene says.
"""
from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

import apply  # noqa: E402
from checkout import NEW, OLD, TRAILERS, Checkout, edit, hooked, pack  # noqa: E402

LONG, MANY = 100, 3  # characters of a string and items of a list that an example shows

INTRO = f"""\
# JSON output

Every verb takes `--json` and then prints one object on standard output, nothing else. Progress and warnings go to
standard error. A usage error of the command line itself (an unknown option) prints no object and exits 2.

`schema` is {apply.JSON_SCHEMA}. Under one number fields may be added, never removed, renamed or given another meaning.
In the tables `[]` is an item of a list and `<name>` any key. Paths are relative to the checkout or, for files of an
upstream, to the top of its tree, with `/`; those marked absolute are not.

Made by `docs/make_json.py`, which ran every example on a toy upstream (long strings and lists are cut there, with …).
"""
ENVELOPE = {
    "schema": "version of this format",
    "verb": "the verb that ran",
    "exit": "its exit code: 0 done, 1 needs work, 2 usage, 3 conflict, 4 dirty target, 5 lock mismatch. "
            "One that was interrupted prints no object and exits 130",
}
ERROR = {
    "error.kind": "`needs-work`, `usage`, `conflict`, `dirty` or `lock-mismatch`",
    "error.message": "what is wrong",
    "error.remedy": "what to do about it",
    "error.paths[].path": "a path concerned (or a patch, a package: what the message is about)",
    "error.paths[].found": "what is there",
    "error.paths[].expected": "what should be",
}
TARGETS = {
    "profile": "the profile asked for (status and verify: each target's own counts)",
    "waiting[]": "status, recover: upstreams still pristine although another target is patched, as after a kill",
    "targets[].upstream": "name in patchset.toml",
    "targets[].root": "the target's folder, absolute",
    "targets[].kind": "`tree` (source) or `site` (installed)",
    "targets[].version": "the release",
    "targets[].done": "plan, status, verify: `pristine`, `applied` or `refused`; plan of a target still to be made: "
                      "`absent` (tried on the archive in the cache) or `unfetched` (no archive: from the lock alone); "
                      "apply: `applied` or `unchanged`; "
                      "revert: `reverted` or `unchanged`; recover: `recovered to applied`, `recovered to pristine` or "
                      "`unchanged`",
    "targets[].lock": "digest of the lock's entry",
    "targets[].tree": "git tree id of the paths after the patches",
    "targets[].patches[]": "slugs of the entry",
    "targets[].paths.<path>": "as it was found, so before apply wrote: `pristine`, `applied`, `older`, `partial`, "
                              "`edited`, `missing` or `unfetched`",
    "targets[].offsets.<slug>[].path": "a hunk that applied away from where the patch says",
    "targets[].offsets.<slug>[].hunk": "its number in that file",
    "targets[].offsets.<slug>[].line": "the line it applied at",
    "targets[].offsets.<slug>[].lines": "how far it moved",
    **{f"targets[].{name}": f"{meaning} (of this target alone)" for name, meaning in ERROR.items()},
}
PATCH_HEAD = {
    "upstream": "name in patchset.toml", "slug": "the patch", "patch": "its file", "subject": "its subject",
    "body": "why it exists", "trailers.<name>[]": "each trailer's values, in order",
}
FIELDS: dict[str, dict[str, str]] = {
    "every answer": ENVELOPE,
    "a refusal": ERROR,
    "fetch": {
        "archives[].upstream": "name in patchset.toml", "archives[].version": "the release",
        "archives[].path": "the verified archive, absolute", "archives[].sha256": "its digest, that of the pin",
        "archives[].bytes": "its size", "archives[].downloaded": "false if the cache had it",
        "clone.upstream": "with --git, instead of archives", "clone.version": "the release",
        "clone.path": "the clone, absolute", "clone.commit": "its full commit",
        "clone.commit_pinned": "whether patchset.toml names a commit to compare with",
    },
    "plan, apply, verify, status, revert, recover": TARGETS,
    "new": {"draft": "the file to fill in"},
    "refresh": {
        "patch": "the patch that took the edits; null if only the overlay did",
        "edited[]": "edited paths that were taken, as the upstream names them",
        "written[]": "files written in the checkout",
        "left.<path>": "an edited or new file that was not taken and stays in the tree as it is, and why",
    },
    "export": {
        "changed[]": "files that were, or with --check are, not canonical",
        "written": "whether they were written",
    },
    "rebase": {
        "upstream": "name in patchset.toml", "from": "the release the series is written for", "to": "the other one",
        "sdist": "sha256 of the other release's sdist", "pinned": "whether patchset.toml pins it",
        "overlay[]": "imports of the overlay that the release does not satisfy",
        "counts.<verdict>": "patches with that verdict",
        "renamed.<path>.to": "a file the release renamed", "renamed.<path>.similarity": "in per cent",
        "patches[].slug": "the patch",
        "patches[].verdict": "clean, offset, merged, resolved, moved, absorbed, partly absorbed, conflict, deleted, "
                             "blocked, contract changed, anchor gone, name gone",
        "patches[].lines": "the verdict on its lines alone", "patches[].needs_person": "whether someone must look",
        "patches[].blocked_by[]": "patches that must be settled first",
        "patches[].resolved": "what a person already wrote for it (a variant, settled files); or empty",
        "patches[].notes[]": "anything else to know", "patches[].names[]": "names its added lines use that are gone",
        "patches[].contract": "digest of the differences of its anchors, for a Contract-Read trailer; or null",
        "patches[].contract_read": "the reason that trailer gives; empty if there is none",
        "patches[].proposal": "the proposed patch; or null", "patches[].installed": "where --install put it; or null",
        "patches[].conflict": "folder with base, upstream, patched and merged; or null",
        "patches[].files[].path": "a file of the patch", "patches[].files[].target": "what the release calls it",
        "patches[].files[].verdict": "the verdict on it", "patches[].files[].evidence[]": "the reasons",
        "patches[].files[].hunks[].number": "a hunk, from 1",
        "patches[].files[].hunks[].old[]": "its first and last line in the old release",
        "patches[].files[].hunks[].status": "what became of it",
        "patches[].files[].hunks[].line": "where it lands; or null",
        "patches[].files[].hunks[].evidence[]": "the reasons",
        "patches[].files[].hunks[].upstream": "what the release changed under it, as a diff",
        "patches[].sentinel[].kind": "`contract changed`, `anchor gone`, …",
        "patches[].sentinel[].anchor": "the anchor", "patches[].sentinel[].symbol": "it, or a function it calls",
        "patches[].sentinel[].where[]": "where a lost symbol is now", "patches[].sentinel[].diff": "the difference",
        "patches[].sentinel[].digest": "of the whole difference",
    },
    "report": {
        "upstreams.<name>.version": "the release",
        **{f"upstreams.<name>.patches[].{name}": meaning for name, meaning in {
            "order": "place in the series, from 1", "slug": "the patch", "patch": "its file", "cause": "its subject",
            "files[]": "paths it touches", "added": "lines", "removed": "lines", "arch[]": "its Arch trailer",
            "depends_on[]": "slugs", "status": "Upstream-Status", "upstream_pr": "address or none",
            "tests[]": "node ids", "counter_tests[]": "node ids", "drop_when": "condition",
            "load_bearing": "yes or no, and why", "evidence[].record": "a record that speaks of the patch",
            "evidence[].state": "what `prove counter` found without it: shown, unseen, failed, not run",
            "evidence[].current": "whether today's lock made it"}.items()},
        "records[].record": "a file of evidence/", "records[].verb": "the proof that wrote it",
        "records[].subject": "of which recipe or part",
        "records[].why_not": "why it bears out no claim; empty if it does",
    },
    "lint": {
        "findings[].path": "file", "findings[].line": "line, from 1", "findings[].rule": "rule (docs/patches.md)",
        "findings[].level": "`error` or `warning`", "findings[].message": "what was found",
        "findings[].remedy": "what to do", "errors": "how many; any makes it exit 1", "warnings": "how many",
    },
    "why": {
        "path": "the path asked about, as the upstream names it", "overlay": "whether it is a module of ours",
        "imported_by[]": "patches whose hooks import it",
        "near[]": "other paths that may be meant, if nothing touches it",
        **{f"patches[].{name}": meaning for name, meaning in PATCH_HEAD.items()},
        "patches[].imports[]": "overlay modules that its hooks import",
        "patches[].files[].path": "a touched path", "patches[].files[].imports[]": "overlay modules imported there",
        **{f"patches[].files[].hunks[].{name}": meaning for name, meaning in {
            "first": "first changed line once the patch is in", "last": "last changed line", "added": "lines",
            "removed": "lines", "section": "git's heading of the hunk"}.items()},
    },
    "sbom": {"bom.<key>": "a CycloneDX 1.6 document; without --json it is printed alone"},
    "completions": {"shell": "bash, zsh or fish", "script": "the text to source"},
}


@dataclass
class Scene:
    """One run: the section it belongs to, the command line, what it printed, whether the page shows it."""

    section: str
    argv: list[str]
    said: dict
    shown: bool = True


def scenes(root: Path) -> Iterator[Scene]:
    """Run every verb once or more on a toy checkout in `root`, in an order that reaches every field."""
    made = hooked(root / "checkout")
    lines = edit(made.base[OLD], "toy/lines.txt", "line 10\n", "line 10\nline 10.5\n")  # moves a hunk
    made.base[OLD] = edit(lines, "toy/router.py", "        y = x * 2\n", "        y = x * 2.0  # widened\n")
    gate = made.read("patches/toy/gate-fp32.patch").replace("-        y = x * 2\n", "-        y = x * 2.0  # widened\n")
    made.write(f"patches/toy/gate-fp32@{OLD}.patch", gate)
    made.change("patches/toy/line-thirty.patch", "Arch: any", "Depends-On: gate-fp32\nArch: any")
    pack(made)

    def run(section: str, *argv: str, shown: bool = True) -> Scene:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            apply.main([*argv, "--json"])
        return Scene(section, list(argv), json.loads(out.getvalue().replace(str(made.root), "/checkout")), shown)

    apply.ROOT, os.environ["XDG_CACHE_HOME"] = made.root, str(made.root / "cache")
    target = "plan, apply, verify, status, revert, recover"
    yield run("export", "export")
    yield run("fetch", "fetch", "--upstream", "toy")
    yield run(target, "plan", shown=False)
    yield run(target, "apply")
    yield run(target, "verify", shown=False)
    yield run(target, "recover", shown=False)
    yield run("why", "why", "toy/router.py")
    yield run("why", "why", "toy/zero_mismatch/gate.py", shown=False)
    yield run("why", "why", "toy/__init__.py", shown=False)
    yield from _records(made, run)
    yield run("sbom", "sbom")
    yield run("completions", "completions", "fish")
    yield run("new", "new", "--upstream", "toy", "first-line")
    draft = made.read("patches/toy/first-line.draft")
    made.write("patches/toy/first-line.draft", draft.partition("\nUpstream-Status")[0] + f"\n{TRAILERS}")
    made.change("build/toy/toy/lines.txt", "line 1\n", "line one\n")
    made.write("build/toy/toy/scratch.py", "x = 1\n")
    yield run(target, "status")
    yield run("a refusal", "verify")
    yield run("refresh", "refresh", "--upstream", "toy", "first-line")
    yield run(target, "revert", shown=False)
    yield from _another_release(made, run, target)


def _records(made: Checkout, run) -> Iterator[Scene]:
    lock = {"state": "locked", "digest": apply_digest(made)}
    record = {"passed": True, "engines": {"a": {"lock": lock}}, "rows": [{"patch": "gate-fp32", "state": "shown"}]}
    made.write("evidence/counter-toy.json", json.dumps(record))
    yield run("report", "report")
    yield run("lint", "lint", shown=False)
    made.write("patches/toy/stray.patch", "")
    yield run("lint", "lint")
    (made.root / "patches/toy/stray.patch").unlink()


def apply_digest(made: Checkout) -> str:
    from patchset.lock import Lock

    return Lock.load(made.root).target("toy", NEW, "all").digest


def _another_release(made: Checkout, run, target: str) -> Iterator[Scene]:
    """A tree of the other release, where a hunk has moved, and the rebase to it."""
    tree = made.root / "old"
    for path, file in made.base[OLD].items():
        made.write(f"old/{path}", file.data)
    (tree / "PKG-INFO").write_text(f"Name: toy\nVersion: {OLD}\n\n")
    yield run(target, "apply", "--from", str(tree), shown=False)
    (made.root / f"patches/toy/gate-fp32@{OLD}.patch").unlink()
    yield run("rebase", "rebase", "--upstream", "toy", "--to", OLD)


def patterns(value, path: str = "") -> Iterator[str]:
    """Every field of an answer as a dotted path, `[]` for an item of a list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from patterns(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from patterns(inner, f"{path}[]")
    else:
        yield path


def page(found: list[Scene]) -> str:
    parts = [INTRO]
    for section, fields in FIELDS.items():
        parts += [f"## {section}\n", "| field | meaning |\n| --- | --- |\n"
                  + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in fields.items())]
        for scene in found:
            if scene.section == section and scene.shown:
                text = json.dumps(shortened(scene.said), indent=1, ensure_ascii=False)
                parts.append(f"`apply.py {' '.join(scene.argv)} --json`:\n\n```json\n{text}\n```\n")
    return "\n".join(parts)


def shortened(value):
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in value[:MANY]] + (["…"] if len(value) > MANY else [])
    return value[:LONG] + "…" if isinstance(value, str) and len(value) > LONG else value


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = list(scenes(Path(folder).resolve()))
    (ROOT / "docs/json.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
