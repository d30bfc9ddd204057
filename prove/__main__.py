"""Command line of the proofs: parse, call, print, exit. Exit 0: proven; 1: not; 2: wrong usage."""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile

from prove import cases, recipe, rollout, ui
from prove.recipe import ROOT


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m prove", description="Proofs on a GPU; records go to evidence/.")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=text, description=text)
        one.add_argument("--recipe", required=True, help="a folder under recipes/")
        one.add_argument("--tiny", action="store_true", help="the recipe's small model instead of the checkpoint")
        one.add_argument("--json", action="store_true", help="print the record and nothing else")
        one.add_argument("--out", type=pathlib.Path, default=ROOT / "evidence", help="where the record goes")
        one.add_argument("--logs", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "prove",
                         help="where the engines' logs go")
        one.add_argument("--cache", type=pathlib.Path, help="keep the JIT caches here: becomes the engines' HOME")
        one.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS",
                         help="start no case that would not fit; cases left out are named and fail the run")
        return one

    one = verb("rollout", "compare the engine's answers with themselves, word by word")
    one.add_argument("--cases", help="only these, comma separated: " + ", ".join(cases.BY_NAME))
    one.add_argument("--tokens", type=int, default=20000, help="sampled tokens in the workload (default 20000)")
    one.add_argument("--contrast", action="store_true", help="the same with batch invariance off")

    one = verb("warm", "fill the JIT caches and say where the time goes")
    one.add_argument("--off", action="store_true", help="also the kernels used with batch invariance off")
    return top


def environment(args) -> dict[str, str]:
    """What every engine gets beside the recipe's environment."""
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
             "TRANSFORMERS_OFFLINE": "1"}
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
        fixed |= {"HOME": str(args.cache.resolve()), "XDG_CACHE_HOME": str(args.cache.resolve() / ".cache")}
    return fixed


def do_rollout(args, screen: ui.UI) -> dict:
    names = args.cases.split(",") if args.cases else None
    return rollout.rollout(
        recipe.load(args.recipe, args.tiny), screen, names=names, tokens=args.tokens, invariant=not args.contrast,
        out=args.out, logs=args.logs, budget=args.budget, env=environment(args),
        verb="contrast" if args.contrast else "rollout")


def do_warm(args, screen: ui.UI) -> dict:
    from prove import warm

    return warm.warm(recipe.load(args.recipe, args.tiny), screen, out=args.out, logs=args.logs, budget=args.budget,
                     env=environment(args), modes=[True, False] if args.off else [True])


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    screen = ui.UI(json_only=args.json)
    try:
        data = {"rollout": do_rollout, "warm": do_warm}[args.verb](args, screen)
    except ValueError as error:
        print(f"prove {args.verb}: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(data, indent=1))
    else:
        screen.say(f"{'passed' if data['passed'] else 'NOT passed'}"
                   f"{'' if data['complete'] else ' (incomplete)'}; record: {os.path.relpath(args.out)}/"
                   f"{data['verb']}-{data['subject']}.json")
    return 0 if data["passed"] or data["verb"] == "contrast" else 1


if __name__ == "__main__":
    sys.exit(main())
