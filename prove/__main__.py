"""Command line of the proofs. Exit 0: proven (a contrast: something differs); 1: not; 2: wrong usage."""
from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
import tempfile

try:
    from prove import (
        asked, async_rl, bench, bisect, cases, cost, counter, cp, grad, machine, recipe, record, rollout, served, train,
        ui, unchanged, warm,
    )
    from prove.engine import EngineError
    from prove.recipe import ROOT
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "torch"):
        raise
    sys.exit(f"prove runs in the engine's Python environment, and {sys.executable} has no {error.name}: "
             "start it with the interpreter that the patched vLLM is installed for (docs/install.md)")


TURN = "start at once, but time only while holding this file's lock: commands that share a machine time in turns"


def count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number above 0")
    return int(text)


def count_or_none(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number; 0 leaves it out")
    return int(text)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number above 0")
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m prove", description="Proofs on a GPU; records go to evidence/.")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=text, description=text)
        one.add_argument("--recipe", required=True, help="a folder under recipes/")
        one.add_argument("--tiny", nargs="?", const="tiny", metavar="SECTION",
                         help="a small model of the recipe instead of the checkpoint: [tiny], or the section named")
        one.add_argument("--json", action="store_true", help="print the record and nothing else")
        one.add_argument("--out", type=pathlib.Path, default=ROOT / "evidence", help="where the record goes")
        one.add_argument("--logs", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "prove",
                         help="where the engines' logs and the repros go")
        one.add_argument("--commit", help="the commit to record where the tree travels without its history")
        one.add_argument("--cache", type=pathlib.Path, help="keep the JIT caches here: becomes the engines' HOME")
        one.add_argument("--budget", type=positive, default=3600.0, metavar="SECONDS",
                         help="start no case that would not fit; cases left out are named and fail the run")
        return one

    one = verb("rollout", "compare the engine's answers with themselves, word by word")
    one.add_argument("--cases", help="only these, comma separated: " + ", ".join(cases.BY_NAME))
    one.add_argument("--tokens", type=count, default=20000, help="sampled tokens in the workload (default 20000)")
    one.add_argument("--contrast", action="store_true", help="the same with batch invariance off")

    one = verb("served", "a running server, on any number of GPUs, compared with itself over HTTP")
    one.add_argument("--url", default="http://localhost:8000", help="where it listens (default http://localhost:8000)")
    one.add_argument("--tokens", type=count, default=20000, help="sampled tokens in the workload (default 20000)")

    one = verb("bisect", "name the first layer and operator where two ways of running a request part")
    one.add_argument("--left", default="decode", help="one way: " + ", ".join(bisect.ARMS))
    one.add_argument("--right", default="prefill-alone", help="the other way")
    one.add_argument("--contrast", action="store_true",
                     help="with batch invariance off: it has to find something; its file has to be quick (10 s)")
    one.add_argument("--tokens", type=count, default=400, help="sampled tokens in the workload (default 400)")

    one = verb("counter", "show that each patch is needed: without it something differs")
    one.add_argument("--site", type=pathlib.Path, required=True, help="the patched folder; every arm works on a copy")
    one.add_argument("--patches", help="engines only without these, comma separated; other rows of the record stay")
    one.add_argument("--tests-only", action="store_true",
                     help="the Counter-Tests and no engine: needs no GPU, and a later run on the same lock keeps them")
    one.add_argument("--tokens", type=count, default=2000, help="sampled tokens in the workload (default 2000)")
    one.add_argument("--at-once", type=count, default=4, help="engines that run side by side (default 4)")

    one = verb("bench", "decode throughput, batch invariance on against off, and the loss by operator")
    one.add_argument("--concurrent", type=count, default=256, help="requests at once (default 256)")
    one.add_argument("--prompt-tokens", type=count, default=150, help="tokens in each prompt (default 150)")
    one.add_argument("--out-tokens", type=count, default=3000, help="most tokens sampled by each (default 3000)")
    one.add_argument("--seconds", type=positive, default=240.0,
                     help="sample fewer, down to what a verdict needs, to end in this time (default 240)")
    one.add_argument("--turn", type=pathlib.Path, metavar="FILE", help=TURN)

    one = verb("unchanged", "batch invariance off: the patched engine against the wheel as it came")
    one.add_argument("--pristine", type=pathlib.Path, required=True, help="a folder that holds the untouched vllm")
    one.add_argument("--tokens", type=count, default=2000, help="sampled tokens compared (default 2000)")
    one.add_argument("--concurrent", type=count, default=256, help="requests at once when timing (default 256)")
    one.add_argument("--out-tokens", type=count, default=1200, help="tokens sampled by each when timing (default 1200)")
    one.add_argument("--turn", type=pathlib.Path, metavar="FILE", help=TURN)

    one = verb("train", "rollout against trainer, word by word, before every update; restore; learn")
    one.add_argument("--updates", type=count, default=50, help="optimizer steps (default 50)")
    one.add_argument("--groups", type=count, default=16, help="prompts a step (default 16)")
    one.add_argument("--answers", type=count, default=4, help="answers sampled for each prompt (default 4)")
    one.add_argument("--out-tokens", type=count, default=64, help="tokens of an answer (default 64)")
    one.add_argument("--lr", type=positive, default=5e-5, help="AdamW's learning rate (default 5e-5)")
    one.add_argument("--restore-after", type=count_or_none, default=5, metavar="UPDATE",
                     help="save after this one, restore in a fresh process (default 5)")
    one.add_argument("--sleep", type=int, choices=(1, 2), default=0, metavar="LEVEL",
                     help="the engine sleeps during every update: 1 keeps its weights on the host, 2 drops them")
    one.add_argument("--whole-vocab", type=count_or_none, default=0, metavar="ANSWERS",
                     help="of so many answers a step, compare the logprob of every token of the vocabulary")

    one = verb("async", "rollout and training at the same time, a bounded lag apart; stop and resume; a killed worker")
    one.add_argument("--lag", type=int, default=2, help="most versions between rollout and update (default 2)")
    one.add_argument("--updates", type=count, default=100, help="optimizer steps (default 100)")
    one.add_argument("--stop-after", type=int, default=60, metavar="UPDATE",
                     help="stop after this one and resume from the files (default 60)")
    one.add_argument("--synchronous", type=int, default=15, metavar="UPDATES",
                     help="synchronous steps to time against (default 15)")
    one.add_argument("--groups", type=count, default=12, help="prompts an update (default 12)")
    one.add_argument("--answers", type=count, default=4, help="answers sampled for each prompt (default 4)")
    one.add_argument("--out-tokens", type=count, default=64, help="tokens of an answer (default 64)")
    one.add_argument("--lr", type=positive, default=2e-5, help="AdamW's learning rate (default 2e-5)")

    verb("cp", "one batch on one GPU and shared by two: the same words, and the same gradients within rounding")

    verb("grad", "every parameter's gradient against an independent fp64 model, and planted faults")

    one = verb("cost", "the aligned trainer's time and memory beside the same model in ordinary BF16")
    one.add_argument("--runs", type=count, default=7, help="most runs of every arm and batch that count (default 7)")

    one = verb("warm", "fill the JIT caches and say where the time goes")
    one.add_argument("--off", action="store_true", help="also the kernels used with batch invariance off")
    return top


def holding_vllm(option: str, folder: pathlib.Path) -> pathlib.Path:
    if not (folder / "vllm").is_dir():
        raise ValueError(f"{option} {folder}: found no vllm there; name the folder that holds it (site-packages, or "
                         "one made by pip install --target)")
    return folder


def environment(args) -> dict[str, str]:
    """What every engine gets beside the recipe's environment."""
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
             "TRANSFORMERS_OFFLINE": "1"}
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
        home = args.cache.resolve()
        # Where torch.compile is used, vLLM would move Triton's cache under a hash of the engine's flags.
        fixed |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"),
                  "TRITON_CACHE_DIR": str(home / ".triton" / "cache")}
    return fixed


def writable(option: str, folder: pathlib.Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{option} {folder}: nothing can be written there ({error.strerror}); name another folder"
                         ) from None


def run(args, screen: ui.UI) -> dict:
    for option in ("out", "logs", "cache"):
        writable(f"--{option}", getattr(args, option))
    machine.require_turn(getattr(args, "turn", None))
    made = recipe.load(args.recipe, args.tiny)
    if args.verb == "served":
        return served.served(made, screen, url=args.url, tokens=args.tokens, out=args.out, budget=args.budget)
    recipe.require_one_gpu(made)
    common = {"out": args.out, "logs": args.logs, "budget": args.budget, "env": environment(args)}
    match args.verb:
        case "rollout":
            return rollout.rollout(made, screen, names=None if args.cases is None else args.cases.split(","),
                                   tokens=args.tokens, invariant=not args.contrast,
                                   verb="contrast" if args.contrast else "rollout", **common)
        case "bisect":
            return bisect.bisect(made, screen, arms=(args.left, args.right), tokens=args.tokens,
                                 invariant=not args.contrast, **common)
        case "counter":
            return counter.counter(made, screen, site=holding_vllm("--site", args.site), tokens=args.tokens,
                                   at_once=args.at_once, patches=args.patches.split(",") if args.patches else None,
                                   tests_only=args.tests_only, **common)
        case "bench":
            return bench.bench(made, screen, concurrent=args.concurrent, prompt_tokens=args.prompt_tokens,
                               out_tokens=args.out_tokens, seconds=args.seconds, turn=args.turn, **common)
        case "unchanged":
            return unchanged.unchanged(made, screen, pristine=holding_vllm("--pristine", args.pristine),
                                       tokens=args.tokens, concurrent=args.concurrent,
                                       out_tokens=args.out_tokens, turn=args.turn, **common)
        case "train":
            return train.train(made, screen, updates=args.updates, groups=args.groups, answers=args.answers,
                               tokens=args.out_tokens, lr=args.lr, restore_after=args.restore_after,
                               sleep=args.sleep, whole_vocab=args.whole_vocab, **common)
        case "async":
            wanted = async_rl.Settings(args.lag, args.updates, args.stop_after, args.synchronous, args.groups,
                                       args.answers, args.out_tokens, args.lr)
            return async_rl.async_rl(made, screen, wanted, **common)
        case "cp":
            return cp.cp(made, screen, **common)
        case "grad":
            return grad.grad(made, screen, **common)
        case "cost":
            return cost.cost(made, screen, runs=args.runs, **common)
        case "warm":
            return warm.warm(made, screen, modes=[True, False] if args.off else [True], **common)


def verdict(data: dict) -> tuple[int, str]:
    """Exit code and the word for it. A contrast claims the opposite of a proof: this workload can show a difference."""
    if data["verb"] == "contrast":
        differ = sum(row["state"] == "differs" for row in data["rows"])
        return int(not differ), f"{differ} of {len(data['rows'])} comparisons differ"
    return int(not data["passed"]), "passed" if data["passed"] else "NOT passed"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    screen = ui.UI(json_only=args.json)
    record.Record.declared_commit = args.commit
    try:
        data = run(args, screen)
    except KeyboardInterrupt:
        print(f"prove {args.verb}: interrupted; the record has the rows that were done", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # a request that is still waited for would keep the process for its whole time
    except ValueError as error:
        print(f"prove {args.verb}: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(f"prove {args.verb}: {error}", file=sys.stderr)
        return 1
    code, word = verdict(data)
    if args.json:
        print(record.text(data))
    else:
        name = f"{os.path.relpath(args.out)}/{asked.file_name(data)}"
        screen.say(f"{word}{'' if data['complete'] else ' (incomplete)'}; record: {name}")
        if "asks_less" in data:
            screen.say(f"an earlier record, which passed and shows more, stays: {data['verb']}-{data['subject']}.json; "
                       f"this run was asked for less: {', '.join(data['asks_less'])}")
        if pathlib.Path(f"{name}.passed").exists():
            screen.say(f"an earlier record, which passed, is kept: {name}.passed")
    return code


if __name__ == "__main__":
    sys.exit(main())
