"""`prove train`: rollout and training on one GPU, the logprobs compared word by word before every update.

A step: the engine samples; the actor recomputes the answers' logprobs in packed micro-batches, once to score and once
more, cut otherwise, in the forward that is trained on; every word must be equal both times. Then REINFORCE Zero, AdamW,
and the new weights to the engine in place. `--sleep` has the engine release its memory meanwhile; `--whole-vocab`
compares the logprob of every token of the vocabulary, and not the sampled one's alone, for some answers. After
`--restore-after` updates the actor is saved; a second process, with its own engine, restores it and must give the words
of the first for the same step, and learn the same weights from it.
`--restore-after 0` leaves that out, and fewer than LEARNS updates are not asked to show that the reward rises: gates
that ask for the bits alone. The record says what was asked.

The task: prefer a quarter of the vocabulary. The reward of an answer is the number of its tokens in that quarter.
"""
from __future__ import annotations

import pathlib
import shutil
import time

import numpy as np

from prove import record, workload
from prove.compare import Figures, Sequence
from prove.engine import Engine, unpack
from prove.recipe import Recipe
from prove.rollout import engine_start
from prove.together import Part, started
from prove.ui import UI, cell

LENGTHS = (1, 3, 64, 127, 128, 129, 200, 255, 257, 300, 5, 40, 384, 511, 513, 600)  # around chunks of 128 and pages
MICRO = 4096        # tokens of a scoring micro-batch; the trained forward uses SHARE of it, in the other order
SHARE = 0.75        # a small model is bound by launches, so few micro-batches, but not those of the scoring
LEARNS = 20         # updates from which on the reward has to rise


def requests(step: int, groups: int, answers: int, tokens: int, vocab: int) -> list[workload.Request]:
    """The prompts stay the same from step to step, so that the reward's course is learning; the seeds do not."""
    return [workload.Request(f"s{step}g{group}a{answer}",
                             workload.prompt(LENGTHS[group % len(LENGTHS)], vocab, seed=group), tokens,
                             seed=100_000 * (step + 1) + 100 * group + answer)
            for group in range(groups) for answer in range(answers)]


def reward(tokens: np.ndarray, vocab: int) -> float:
    return float((tokens < vocab // 4).sum())


class Trainer:
    """One process: an engine and an actor. `call` has the run's deadline. `whole`: answers of a step whose whole
    vocabulary is compared."""

    def __init__(self, engine: Engine, deadline: float, whole: int = 0):
        self.engine, self.deadline, self.whole = engine, deadline, whole

    def call(self, op: str, **arguments):
        return self.engine.call_by(self.deadline, op, **arguments)

    def step(self, wanted: list[workload.Request], vocab: int) -> tuple[dict, dict]:
        """(the step's row, the rollout's answers by request)."""
        whole = {r.id for r in wanted[::max(1, len(wanted) // max(1, self.whole))][:self.whole]}
        rollout = self.call("rollout", requests=[r.message() | {"vocabulary": r.id in whole} for r in wanted])
        answers = rollout.pop("answers")
        sequences, rewards = advantaged(wanted, answers, vocab)
        scored = self.call("score", sequences=sequences, micro=MICRO)
        every = self.call("whole", sequences=[s for s in sequences if s["id"] in whole], micro=MICRO) if whole else None
        update = self.call("update", sequences=sequences[::-1], micro=int(MICRO * SHARE))
        row = {"reward": sum(rewards) / sum(len(unpack(s["tokens"])) for s in sequences),
               "version": rollout["version"], "rollout_seconds": rollout["seconds"], "modes": rollout.get("modes"),
               "score_seconds": round(scored["seconds"], 3), "update_seconds": round(update["seconds"], 3),
               "accumulate_seconds": round(update["accumulate_seconds"], 3),
               "sync_seconds": round(update["sync_seconds"], 3), "loss": update["loss"], "norm": update["norm"],
               "peak_memory": update["peak_memory"], "weights": update["weights"], "sleep": update["sleep"],
               "trained_tokens": sum(len(s["prompt"]) + len(unpack(s["tokens"])) for s in sequences),
               "whole_vocab": every,
               "scored": compared(wanted, answers, scored["words"]).summary(),
               "trained": compared(wanted, answers, update["words"]).summary()}
        return row, answers


def advantaged(wanted: list[workload.Request], answers: dict, vocab: int) -> tuple[list[dict], list[float]]:
    """(the answered requests as the trainer takes them, their rewards)."""
    from megatron.zero_mismatch.reinforce_zero import group_advantages

    sequences = [{"id": r.id, "prompt": list(r.prompt), **answers[r.id]} for r in wanted if r.id in answers]
    rewards = [reward(unpack(s["tokens"]), vocab) for s in sequences]
    groups = [s["id"].partition("a")[0] for s in sequences]
    for sequence, advantage in zip(sequences, group_advantages(rewards, groups).tolist(), strict=True):
        sequence["advantage"] = advantage
    return sequences, rewards


def compared(wanted: list[workload.Request], answers: dict, words: dict) -> Figures:
    """The rollout's words beside the trainer's; a missing answer or word is a difference."""
    figures = Figures()
    nothing = Sequence(np.zeros(0, np.int64), np.zeros(0, np.uint32))
    for request in wanted:
        answer = answers.get(request.id)
        left = Sequence(unpack(answer["tokens"]), unpack(answer["words"])) if answer else nothing
        if len(left.tokens) != request.max_tokens:
            figures.missing += abs(request.max_tokens - len(left.tokens))  # one too long makes up for none
        own = unpack(words[request.id]) if request.id in words else nothing.words
        figures.add(request.id, left, Sequence(left.tokens[:len(own)], own))
    return figures


def held(row: dict, sleep: int, positions: int) -> bool:
    """Whether every word is equal, in every way that was asked for, and what was restored is the same. positions: whose
    whole vocabulary was to be compared. Graphs captured before the first sync must have been replayed: an engine whose
    steps are eager would show nothing of what they read after it."""
    equal = row["scored"]["equal"] and row["trained"]["equal"]
    equal = equal and row.get("same", True) and row.get("learned_same", True)
    equal = equal and (row["modes"] or {}).get("FULL", 0) > 0
    if sleep:  # memory was freed, and no rollout could start before the sync
        equal = equal and row["sleep"].get("refused") is True and row["sleep"]["freed_bytes"] > 0
    if positions:
        every = row["whole_vocab"]
        equal = equal and every["positions"] == positions and not every["differing_words"] and not every["nan"]
    return equal


def _flags(sleep: int, whole_vocab: int, vocab: int) -> dict:
    return {**({"enable_sleep_mode": True} if sleep else {}), **({"max_logprobs": vocab} if whole_vocab else {})}


def train(recipe: Recipe, ui: UI, *, updates: int, groups: int, answers: int, tokens: int, lr: float,
          restore_after: int, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
          sleep: int = 0, whole_vocab: int = 0, backend: str = "trainer") -> dict:
    if restore_after >= updates:
        raise ValueError(f"--restore-after {restore_after} needs more than {updates} updates: what is restored is "
                         "compared at the next one; 0 leaves it out")
    if not 0 <= whole_vocab <= groups * answers:
        raise ValueError(f"--whole-vocab {whole_vocab}: a step has {groups * answers} answers (--groups x "
                         "--answers); ask for as many or fewer")
    kept = record.Record("train", recipe.subject + (f"-asleep-{sleep}" if sleep else ""), {
        "updates": updates, "groups": groups, "answers": answers, "tokens": tokens, "lr": lr,
        "restore_after": restore_after, "learns": updates >= LEARNS, "sleep": sleep, "whole_vocab": whole_vocab,
        "response_tokens": groups * answers * tokens, "micro": MICRO, "share": SHARE}, out)
    deadline = time.monotonic() + budget
    folder = logs / f"train-{recipe.subject}-checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    start, environment = engine_start(recipe, True, _flags(sleep, whole_vocab, recipe.vocab))
    names = ("first", "restored") if restore_after else ("first",)
    parts = dict.fromkeys(names, Part(start, environment, backend))
    with started(parts, kept, ui, env=env, logs=logs, deadline=deadline) as engines:
        trainers = {name: Trainer(engine, deadline, whole_vocab) for name, engine in engines.items()}
        first = trainers["first"]
        kept.actor(first.engine.info)
        kept.data["actor"] = first.call("actor", lr=lr, sleep=sleep)
        rows, again = [], None
        for step in range(updates):
            wanted = requests(step, groups, answers, tokens, recipe.vocab)
            row, seen = first.step(wanted, recipe.vocab)
            rows.append({"case": f"update {step + 1}", **row})
            kept.row(rows[-1])
            _say(ui, rows[-1])
            if not held(rows[-1], sleep, whole_vocab * tokens):
                _part(first, ui, kept, wanted)
                break
            if again is not None:
                rows.append(_restored(trainers["restored"], wanted, recipe.vocab, (row, seen), again, folder, lr,
                                      sleep))
                kept.row(rows[-1])
                _say(ui, rows[-1])
                again = None
            if step + 1 == restore_after:
                again = first.call("save", folder=str(folder))
    found = verdict(rows, updates, len(trainers) > 1, sleep, whole_vocab * tokens)
    curve = found["curve"]
    ui.say(f"reward by token: {curve[0]:.3f} -> {curve[-1]:.3f}; tenths of the run, first to last: {found['gain']}")
    kept.finish(kept.locked and found["complete"], found["passed"], curve=curve, gain=found["gain"])
    return kept.data


def verdict(rows: list[dict], updates: int, restores: bool, sleep: int = 0, positions: int = 0) -> dict:
    """complete: all that was asked was done. passed: every row holds, and the reward has risen where there were updates
    enough to tell."""
    curve = [row["reward"] for row in rows if row["case"].startswith("update")]
    gain = _gain(curve)
    equal = all(held(row, sleep, positions) for row in rows)
    return {"complete": len(curve) == updates and restores == any(row["case"] == "restored" for row in rows),
            "passed": equal and (updates < LEARNS or gain["last"] > gain["first"]), "curve": curve, "gain": gain}


def _restored(second: Trainer, wanted, vocab: int, first: tuple[dict, dict], saved: dict, folder: pathlib.Path,
              lr: float, sleep: int) -> dict:
    """The step after the save, in a fresh process: its own comparison, the first process's words again, and the weights
    that it then learns, by their digest."""
    made = second.call("actor", lr=lr, restore=str(folder), sleep=sleep)
    row, again = second.step(wanted, vocab)
    first_row, seen = first
    same = Figures()
    for request in wanted:
        sides = [Sequence(unpack(a[request.id]["tokens"]), unpack(a[request.id]["words"])) for a in (seen, again)]
        same.add(request.id, *sides)
    return {"case": "restored", **row, "against_first": same.summary(),
            "learned_same": row["weights"] == first_row["weights"],
            "same": same.equal and made["weights"] == saved["weights"] and made["version"] == saved["version"]}


def _part(trainer: Trainer, ui: UI, kept: record.Record, wanted) -> None:
    """After a difference: in which layer a prefill of the longest prompt differs first."""
    found = trainer.call("layers", prompt=list(max((r.prompt for r in wanted), key=len)))["rows"]
    kept.data["layers"] = found
    for row in found:
        ui.say(f"layer {row['layer']} ({row['kind']}): {row['output']} words of its output, {row['residual']} of the "
               "residual differ")


def _gain(curve: list[float]) -> dict:
    """Means of the first and of the last tenth of the updates."""
    tenth = max(1, len(curve) // 10)
    return {"first": float(np.mean(curve[:tenth])), "last": float(np.mean(curve[-tenth:]))}


def _say(ui: UI, row: dict) -> None:
    scored, trained = row["scored"], row["trained"]
    ui.note(f"{row['case']}: {scored['tokens']:,} tokens, words that differ {scored['differing_words']} / "
            f"{trained['differing_words']}, max |dp| {cell(scored['max_dp'])}, reward {row['reward']:.3f}, "
            f"norm {row['norm']:.3g}, rollout {row['rollout_seconds']:.1f} s, score {row['score_seconds']:.1f} s, "
            f"update {row['update_seconds']:.1f} s, sync {row['sync_seconds']:.2f} s"
            + ("; asleep: {freed_bytes:,} bytes freed, {sleep_seconds} s and {wake_seconds} s".format(**row["sleep"])
               if row["sleep"] else "")
            + ("; whole vocabulary: {words:,} words, {differing_words} differ".format(**row["whole_vocab"])
               if row["whole_vocab"] else "")
            + ("" if row.get("same", True) else "; NOT what the first process had")
            + ("" if row.get("learned_same", True) else "; learned other weights than the first process"))
