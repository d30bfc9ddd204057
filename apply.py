#!/usr/bin/env python3
"""zero-mismatch: carry the patches. `apply.py apply` does the main job; `apply.py VERB --help` explains the rest.

Exit codes: 0 done, 1 needs work, 2 usage, 3 conflict, 4 dirty target, 5 lock mismatch, 130 interrupted.
"""
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports below ends us without a traceback

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("zero-mismatch needs Python 3.11 or newer; this is " + sys.version.split()[0])

import argparse
import json
import os
from pathlib import Path

from patchset import pins as pin_file
from patchset.errors import NeedsWork, PatchsetError
from patchset.git import GitError
from patchset.ui import Result, refusal

ROOT = Path(__file__).resolve().parent
JSON_SCHEMA = 1
INTERRUPTED = 128 + signal.SIGINT


def verb_fetch(args, pins) -> Result:
    """Get the pinned sources into the archive cache, or clone them."""
    from patchset import fetch

    return fetch.run(pins, args.upstream or [one.name for one in pins.standard()], args.version, args.git)


def _delivery(args, pins, verb) -> Result:
    from patchset import verbs

    return verbs.run(ROOT, pins, verb, args)


def verb_plan(args, pins) -> Result:
    """Say what apply would do, path by path; writes nothing."""
    return _delivery(args, pins, "plan")


def verb_apply(args, pins) -> Result:
    """Apply the series and overlays; without a target: fetch both upstreams into build/ and patch them."""
    return _delivery(args, pins, "apply")


def verb_verify(args, pins) -> Result:
    """Check that the target is exactly the locked tree, and an installed wheel's other files untouched."""
    return _delivery(args, pins, "verify")


def verb_status(args, pins) -> Result:
    """Say what the target is: pristine, applied, edited, another lock's, interrupted."""
    return _delivery(args, pins, "status")


def verb_revert(args, pins) -> Result:
    """Put every original file back."""
    return _delivery(args, pins, "revert")


def verb_recover(args, pins) -> Result:
    """Settle an apply or revert that was killed: finish it or undo it."""
    return _delivery(args, pins, "recover")


def verb_new(args, pins) -> Result:
    """Start a patch: a draft with the trailers to fill in."""
    from patchset import edit

    return edit.new(ROOT, pins, args.upstream, args.slug)


def verb_refresh(args, pins) -> Result:
    """Take edits made in a patched tree back into a patch, and rebase the patches after it."""
    from patchset import edit

    return edit.refresh(ROOT, pins, args.upstream, args.slug, args.tree, args.add)


def verb_export(args, pins) -> Result:
    """Write every patch in canonical form, and the lock."""
    from patchset import export

    return export.run(ROOT, pins, args.check)


def verb_rebase(args, pins) -> Result:
    """Replay the series on another release and give a verdict a patch (for vLLM, in about half a minute)."""
    from patchset import rebase

    return rebase.run(ROOT, pins, args.upstream, args.to, args.out, args.install)


def verb_report(args, pins) -> Result:
    """The series as a table (cause, size, tests, counter-proof), and the records of evidence/."""
    from patchset import report

    return report.run(ROOT, pins, args.version)


def verb_lint(args, pins) -> Result:
    """Check patches, trailers, overlays and evidence; every finding at once."""
    from patchset import lint

    return lint.run(ROOT, pins)


def verb_why(args, pins) -> Result:
    """Which patches touch a path, and why."""
    from patchset import why

    return why.run(ROOT, pins, args.path, args.version)


def verb_sbom(args, pins) -> Result:
    """A CycloneDX bill of materials with the patches as pedigree."""
    from patchset import sbom

    return sbom.run(ROOT, pins)


def verb_completions(args, pins) -> Result:
    """Shell completions, to be sourced."""
    from patchset import completions

    return completions.run(parser(), args.shell)


VERBS = {
    "fetch": verb_fetch, "plan": verb_plan, "apply": verb_apply, "verify": verb_verify, "status": verb_status,
    "revert": verb_revert, "recover": verb_recover, "new": verb_new, "refresh": verb_refresh, "export": verb_export,
    "rebase": verb_rebase, "report": verb_report, "lint": verb_lint, "why": verb_why, "sbom": verb_sbom,
    "completions": verb_completions,
}


def _target_options(sub: argparse.ArgumentParser, verb: str) -> None:
    sub.add_argument("--upstream", action="append", metavar="NAME",
                     help="vllm, megatron or verl; repeat for several (default: vllm and megatron)")
    sub.add_argument("--version", metavar="V", help="the pinned release (default: what the target declares)")
    where = sub.add_mutually_exclusive_group()
    where.add_argument("--from", dest="tree", type=Path, metavar="DIR", help="an existing checkout or unpacked tree")
    where.add_argument("--installed", metavar="PYTHON", help="the packages installed for that interpreter")
    where.add_argument("--site", type=Path, metavar="DIR", help="a folder made by pip install --target")
    if verb == "apply":
        where.add_argument("--git", metavar="URL", help="clone the pinned tag into build/ (one --upstream)")
    if verb in ("plan", "apply"):
        sub.add_argument("--profile", default="all", metavar="P", help="which patches, by patchset.toml (default: all)")
        sub.add_argument("--without", action="append", default=[], metavar="SLUG",
                         help="leave out a patch and what depends on it (for counter-proofs; not the locked tree)")


def parser() -> argparse.ArgumentParser:
    """The whole command line; completions are made from it."""
    top = argparse.ArgumentParser(prog="apply.py", description=__doc__.splitlines()[0],
                                  epilog=__doc__.splitlines()[-1])
    subs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    made = {}
    for verb, function in VERBS.items():
        made[verb] = subs.add_parser(verb, help=function.__doc__, description=function.__doc__)
        made[verb].add_argument("--json", action="store_true", help="one JSON object on stdout (docs/json.md)")
    for verb in ("plan", "apply", "verify", "status", "revert", "recover"):
        _target_options(made[verb], verb)
    made["revert"].add_argument("--edits-to", type=Path, metavar="DIR",
                                help="move files edited since into DIR, then revert (otherwise edits are refused)")
    made["fetch"].add_argument("--upstream", action="append", metavar="NAME",
                               help="vllm, megatron or verl (default: vllm and megatron)")
    made["fetch"].add_argument("--version", metavar="V", help="the pinned release (default: the upstream's own)")
    made["fetch"].add_argument("--git", metavar="URL", help="clone the pinned tag into build/ (one --upstream)")
    made["new"].add_argument("slug", help="lower-case words joined by '-'")
    made["refresh"].add_argument("slug", nargs="?",
                                 help="the patch that takes the edits (default: the last that touches the files)")
    for verb in ("new", "refresh", "rebase"):
        made[verb].add_argument("--upstream", default="vllm", metavar="NAME", help="default: vllm")
    made["refresh"].add_argument("--from", dest="tree", type=Path, metavar="DIR",
                                 help="the edited tree (default: build/…)")
    made["refresh"].add_argument("--add", action="append", metavar="PATH",
                                 help="an edited file that the patch does not touch yet; without it such edits stay "
                                      "in the tree")
    made["export"].add_argument("--check", action="store_true", help="write nothing; exit 1 if anything would change")
    made["rebase"].add_argument("--to", required=True, metavar="VERSION", help="the release to move to")
    made["rebase"].add_argument("--out", type=Path, metavar="DIR", help="where proposals and conflicts go")
    made["rebase"].add_argument("--install", action="store_true", help="put the proposals into patches/")
    for verb in ("report", "why"):
        made[verb].add_argument("--version", metavar="V", help="the pinned release (default: the upstream's own)")
    made["why"].add_argument("path", help="a path as upstream names it, e.g. vllm/models/deepseek_v4/attention.py")
    made["completions"].add_argument("shell", choices=["bash", "zsh", "fish"], help="whose completions")
    return top


def main(argv: list[str] | None = None) -> int:
    """The exit code. Ctrl-C is one line and a code of its own, whenever it comes."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _main(argv)
    except KeyboardInterrupt:
        return _write(sys.stderr, "interrupted; apply.py status says where each target stands", INTERRUPTED)


def _main(argv: list[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a caller's StringIO needs none
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end in a traceback
    try:
        args = parser().parse_args(argv)
    except SystemExit as left:  # after --help or a usage error, which argparse has written
        sys.exit(_write(sys.stdout, "", left.code))
    try:
        result = _run(args)
    except PatchsetError as error:
        return _print(args, {"error": error.as_json()}, error.exit_code, refusal(error), sys.stderr)
    return _print(args, result.data, result.code, result.lines, sys.stdout)


def _run(args) -> Result:
    """The verb's result. What the disk or git refuses outside a delivery (a full /tmp, say) is a refusal too."""
    try:
        return VERBS[args.verb](args, pin_file.load(ROOT))
    except (OSError, GitError) as error:
        raise NeedsWork(f"{args.verb} stopped: {error}",
                        remedy="mend the cause (free space, permissions), then run it again; "
                               "apply.py status says where each target stands") from error


def _print(args, data: dict, code: int, lines: list[str], stream) -> int:
    if not args.json:
        return _write(stream, "\n".join(lines), code)
    return _write(sys.stdout, json.dumps({"schema": JSON_SCHEMA, "verb": args.verb, "exit": code, **data}, indent=1),
                  code)


def _write(stream, text: str, code: int) -> int:
    """Write all of it now. The code, or that of an answer that did not reach its reader."""
    if stream is None:  # closed by the caller (>&-), who wants to hear nothing
        return code
    try:
        print(text, end="\n" if text else "", file=stream, flush=True)
        return code
    except BrokenPipeError:  # the reader has seen enough: apply.py report | head
        failed = code
    except OSError as error:
        failed = code or NeedsWork.exit_code
        if stream is sys.stdout:
            _write(sys.stderr, f"the answer could not be written: {error.strerror}", failed)
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is left in its buffer goes nowhere
    return failed


if __name__ == "__main__":
    sys.exit(main())
