"""`python3 -m launch`: start what a recipe describes.

    list                            every recipe, its status and what it needs
    check [--here] RECIPE           does this machine suit it? exit 1 with everything that does not. --here: is also
                                    the environment as it is the recipe's (in a Ray worker, say)?
    serve RECIPE [FLAG...]          check, then vllm serve with the recipe's flags; FLAGs are added
    train RECIPE COMMAND...         check, then COMMAND in the recipe's environment
    ray RECIPE                      Ray's runtime_env as JSON
    write [--check]                 run.sh of every recipe; --check writes nothing and exits 1 if one would change

--off, before RECIPE, runs with batch invariance off; --print shows the command of serve and starts nothing. The small
models are not served from here: recipes/NAME/README.md says how vllm serve does.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import signal
import sys

from launch import check, command
from prove import recipe
from prove.recipe import ROOT

SERVING = "ZERO_MISMATCH_SERVING"  # the image's health check reads the port from this file


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m launch", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    verbs.add_parser("write").add_argument("--check", action="store_true")
    for name in ("check", "serve", "train", "ray"):
        one = verbs.add_parser(name)
        one.add_argument("--off", action="store_true")
        if name in ("serve", "check"):
            one.add_argument("--print" if name == "serve" else "--here", action="store_true")
        one.add_argument("recipe")
        if name in ("serve", "train"):
            one.add_argument("more", nargs=argparse.REMAINDER)
    return top


def listed(root: pathlib.Path = ROOT) -> list[str]:
    from patchset.ui import table

    rows = []
    for name in recipe.names(root):
        made = recipe.load(name, None, root)
        layout, needs = made.layout("rollout"), made.section("requires")
        said = made.status.get("evidence") or made.status["missing"]
        rows.append([name, made.status["state"], f"{layout['nodes'] * layout['gpus']} x {' or '.join(needs['arch'])}",
                     said[0] + (f"; and {len(said) - 1} more" if said[1:] else "")])
    return table(["recipe", "status", "GPUs of an engine", "record, or what is missing"], rows)


def write(only_check: bool, root: pathlib.Path = ROOT) -> list[str]:
    """The scripts that were not as the recipes say; mended unless `only_check`."""
    stale = []
    for name in recipe.names(root):
        path, text = command.script_path(root, name), command.run_script(recipe.load(name, None, root))
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(f"recipes/{name}/run.sh")
            if not only_check:
                path.write_text(text, encoding="utf-8")
                path.chmod(0o755)
    return stale


def checked(made: recipe.Recipe, invariant: bool, environment: dict[str, str]) -> int:
    """Say the recipe's status and everything that is in the way; 0 if nothing is."""
    print(f"{made.name}: {command.status_line(made)}", file=sys.stderr)
    if made.status["state"] == "written":
        print(f"  not proven; it lacks: {'; '.join(made.status['missing'])}", file=sys.stderr)
    machine = check.look(made, environment)
    if invariant and (remark := check.unproven_stack(machine)):
        print(f"  {remark}: run `python3 -m prove rollout` here", file=sys.stderr)
    found = check.findings(made, machine, invariant)
    if found:
        print(f"{made.name} cannot start here, for {len(found)} reason(s):", file=sys.stderr)
        print("\n".join(f"  {number}. {one}" for number, one in enumerate(found, 1)), file=sys.stderr)
    return int(bool(found))


def start(made: recipe.Recipe, args, invariant: bool) -> int:
    """Never returns if the check is passed: the command takes this process's place, with its signals."""
    environment = {**os.environ, **made.environment(invariant)}
    line = command.serve(made, invariant, args.more) if args.verb == "serve" else args.more
    if args.verb == "serve" and args.print:
        print(" ".join(f"{name}={shlex.quote(value)}" for name, value in made.environment(invariant).items()),
              shlex.join(line))
        return 0
    if not line:
        print("train: no command; for example: launch train RECIPE torchrun train.py", file=sys.stderr)
        return 2
    if checked(made, invariant, environment):
        return 1
    if args.verb == "serve":
        mark = pathlib.Path(environment.get(SERVING, "/tmp/zero-mismatch-serving"))
        try:
            mark.write_text(command.port(line))
        except OSError as error:
            raise ValueError(f"cannot write {mark}: {error.strerror}; name another file in {SERVING}") from None
    try:
        os.execvpe(line[0], line, environment)
    except OSError as error:
        raise ValueError(f"cannot start {line[0]}: {error.strerror}; it has to be on PATH, or a path") from None


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.verb == "list":
            print("\n".join(listed()))
            return 0
        if args.verb == "write":
            stale = write(args.check)
            print("\n".join(f"{path}: {'would change' if args.check else 'written'}" for path in stale) or "up to date")
            return int(args.check and bool(stale))
        made, invariant = recipe.load(args.recipe, None), not args.off
        if args.verb == "check":
            return checked(made, invariant, {**os.environ, **({} if args.here else made.environment(invariant))})
        if args.verb == "ray":
            print(f"{made.name}: {command.status_line(made)}", file=sys.stderr)  # the JSON is on stdout, alone
            print(json.dumps(command.runtime_env(made, invariant), indent=1))
            return 0
        return start(made, args, invariant)
    except ValueError as error:
        print(f"launch {args.verb}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader has seen enough: launch list | head
    sys.exit(main())
