"""The verbs that act on targets: find the targets the options name, act on each, and say what became of them.

Every target is looked at before the first is written to, so a refusal of one leaves all as they were.
"""
from __future__ import annotations

import os
from pathlib import Path

from . import deliver, git, preview, state, target
from .deliver import Outcome, Request
from .errors import UsageError
from .pins import Pins, Upstream
from .target import Target
from .ui import Result, refusal, table

EXIT = {"applied": 0, "pristine": 1}


def run(root: Path, pins: Pins, verb: str, args) -> Result:
    """args: the parsed options of apply.py. Returns one entry a target under `targets`."""
    profile = pins.profile(getattr(args, "profile", "all"))
    # A tree says itself which upstream it is; anything else that is optional must be named.
    names = args.upstream or (list(profile.upstreams) if args.tree
                              else [one.name for one in pins.standard(profile.upstreams)])
    for name in names:
        pins.upstream(name)
    request = Request(root, pins, profile, args.version, tuple(getattr(args, "without", ())),
                      getattr(args, "edits_to", None))
    if request.without and len(names) > 1:
        raise UsageError("--without names a patch of one upstream", remedy="add --upstream vllm (or megatron)")
    targets = _find(request, names, verb, args)
    if verb == "apply":
        for one in targets[1:]:  # the first one's own apply looks at it before it writes
            _check(request, one)
    outcomes = [_act(request, verb, one) for one in targets]
    code = max((_code(outcome, verb) for outcome in outcomes), default=0)
    lines = [line for outcome in outcomes for line in _lines(outcome, verb, root)]
    data = {"profile": profile.name, "targets": [_json(outcome) for outcome in outcomes]}
    if verb in ("status", "recover") and (waiting := _waiting(outcomes)):
        data["waiting"] = waiting
        lines.append(f"{' and '.join(waiting)} still waits: not patched, though what it works with is. apply.py apply"
                     f"{_where(args)} finishes the job, apply.py revert{_where(args)} takes all of it back")
    return Result(data, lines, code)


def _waiting(outcomes: list[Outcome]) -> list[str]:
    """The upstreams that an apply or revert killed between two targets left pristine: each target is atomic alone."""
    patched = [(one.target.root / one.target.state / state.NAME).exists() for one in outcomes]
    return [one.target.upstream.name for one, done in zip(outcomes, patched, strict=True)
            if any(patched) and not (done or one.error or one.done == "applied")]


def _where(args) -> str:
    """The options that name the same targets again."""
    return f" --site {args.site}" if args.site else f" --installed {args.installed}" if args.installed else ""


def _find(request: Request, names: list[str], verb: str, args) -> list[Target]:
    pins = request.pins
    if args.tree:
        return [target.identify(pins, args.tree, names)]
    if args.installed or args.site:
        folders = [args.site] if args.site else target.site_folders(args.installed)
        return _sites(pins, folders, names)
    url = getattr(args, "git", None)
    if url and len(names) != 1:
        raise UsageError("--git clones one upstream", remedy="add --upstream vllm (or megatron)")
    return [_default(request, pins.upstream(name), verb, url) for name in names]


def _sites(pins: Pins, folders: list[Path], names: list[str]) -> list[Target]:
    """Every one of the upstreams. A machine that has one on purpose says so by --upstream: a missing one may as well
    be a wrong folder, and half a delivery that looks whole would be found out on the GPU."""
    found: dict[str, Target] = {}
    for name in names:
        upstream = pins.upstream(name)
        hits = (target.site(upstream, folder) for folder in folders if folder.is_dir())
        if hit := next(filter(None, hits), None):
            found[name] = hit
    lacking = [pins.upstream(name) for name in names if name not in found]
    if lacking:
        where = ", ".join(str(folder) for folder in folders)
        there = [f"{one.upstream.distribution} {one.declared}" for one in found.values()]
        alone = f", or take what is there alone: {' '.join(f'--upstream {name}' for name in found)}" if found else ""
        raise UsageError(f"{' and '.join(upstream.distribution for upstream in lacking)} not installed in {where}"
                         + (f" ({' and '.join(there)} is)" if found else ""),
                         remedy=f"pip install the pinned release there{alone}")
    return list(found.values())


def _default(request: Request, upstream: Upstream, verb: str, url: str | None) -> Target:
    """build/<name>. If there is none, apply fetches and unpacks it first, and plan only says so."""
    place = request.root / upstream.target
    if not os.path.lexists(place):
        if verb == "plan":
            return Target(upstream, place, upstream.release(request.version).version)
        if verb != "apply":
            raise UsageError(f"{upstream.target} does not exist",
                             remedy="run apply.py apply first, or name a target: --from, --installed or --site")
        from . import archive, fetch  # only this path needs pip and the network

        git.demand()  # before anything is unpacked
        release = upstream.release(request.version)
        if url:
            fetch.clone(url, upstream, release, place)
        else:
            archive.unpack(fetch.sdist(upstream, release), place)
    return target.tree(upstream, place)


def _check(request: Request, one: Target) -> None:
    """Refuse before anything is written anywhere."""
    with one.locked(write=False):
        deliver.prepare(request, one)[0].demand()


def _act(request: Request, verb: str, one: Target) -> Outcome:
    if verb == "plan":
        if not os.path.lexists(one.root):
            return preview.look(request, one)
        with one.locked(write=False):
            plan, built = deliver.prepare(request, one)
            return Outcome(one, plan.verdict, plan, built.offsets if built else None, plan.error)
    if verb == "recover":
        return deliver.recover(one)
    return getattr(deliver, verb)(request, one)


def _code(outcome: Outcome, verb: str) -> int:
    if outcome.error:
        return outcome.error.exit_code
    return EXIT.get(outcome.done, 0) if verb == "status" else 0


def _json(outcome: Outcome) -> dict:
    one, plan = outcome.target, outcome.plan
    entry = {"upstream": one.upstream.name, "root": str(one.root), "kind": one.kind, "version": one.declared,
             "done": outcome.done}
    if plan:
        entry["version"] = plan.release.version
        entry["lock"] = plan.locked.digest
        entry["tree"] = plan.locked.tree
        entry["patches"] = [slug for slug, _ in plan.locked.patches]
        entry["paths"] = plan.paths
    if outcome.offsets:
        entry["offsets"] = {slug: [vars(offset) for offset in found] for slug, found in outcome.offsets.items()}
    if outcome.error:
        entry["error"] = outcome.error.as_json()
    return entry


def _lines(outcome: Outcome, verb: str, root: Path) -> list[str]:
    one, plan = outcome.target, outcome.plan
    place = one.root.relative_to(root) if one.root.is_relative_to(root) else one.root
    version = plan.release.version if plan else one.declared
    lines = [f"{place}: {one.upstream.distribution} {version}: {_said(outcome, verb)}"]
    if plan and not outcome.error:
        hooks = sum(entry.by != ("overlay",) for entry in plan.locked.paths.values())
        lines.append(f"  {len(plan.locked.patches)} patches on {hooks} files, {len(plan.locked.paths) - hooks} overlay "
                     f"files, lock {plan.locked.digest[:12]}, tree {plan.locked.tree[:12]}")
    for slug, found in (outcome.offsets or {}).items():
        lines += [f"  {slug}: {o.path} hunk {o.hunk} moved by {o.lines:+d} lines to {o.line}" for o in found]
    if verb == "plan" and plan:
        lines += ["  " + line for line in table(["path", "is", "by"], [
            [path, kind, ", ".join(plan.locked.paths[path].by)] for path, kind in plan.paths.items()])]
    if outcome.error:
        lines += ["  " + line for line in refusal(outcome.error)]
    return lines


def _said(outcome: Outcome, verb: str) -> str:
    if outcome.error:
        return f"refused ({outcome.error.kind})"
    words = {"applied": "applied", "pristine": "pristine, not patched", "reverted": "reverted, every original is back",
             "unchanged": {"apply": "already applied, nothing changed", "revert": "pristine already, nothing changed",
                           "recover": "nothing to recover"}.get(verb, "unchanged")}
    if verb == "verify":
        return "verified, exactly the locked tree"
    if verb == "plan":
        return {"pristine": "pristine, apply would patch it",
                "applied": "applied, apply would change nothing",
                "absent": "not there, apply would unpack the archive in the cache and patch it",
                "unfetched": "not there, apply would fetch the pinned archive, unpack and patch it"}[outcome.done]
    return words.get(outcome.done, outcome.done)
