"""`prove cp`: one batch on one GPU and shared by two, the logprobs compared word by word, and what both learn from it.

Three processes: the engine with an actor of one rank, as in `prove train`, and two ranks of an actor under context
parallelism, on two GPUs. All start from the same weights.

    rollout         the engine samples; the lone actor, and each of the two ranks, must have its every word
    gradients       of the same loss: the two ranks' sum is as near to the lone actor's as that is to itself when its
                    micro-batches are cut otherwise; a rank's own share, without the sum, must not be
    after update 1  AdamW on both; the two ranks must hold the same weights, and with them the words that each computes
                    from them alone, without the other. What they learned is as far from the lone actor's as rounding
                    makes it: the distance of the updates is bounded, the logprobs of both actors are reported
"""
from __future__ import annotations

import concurrent.futures
import math
import pathlib
import shutil
import time

import numpy as np

from prove import record
from prove.compare import Figures, Sequence
from prove.engine import EngineError, unpack
from prove.grad import FLOOR, TIMES
from prove.recipe import Recipe
from prove.rollout import engine_start
from prove.together import Part, started
from prove.train import MICRO, SHARE, Trainer, advantaged, compared, requests
from prove.ui import UI, cell

RANKS = 2
GROUPS, ANSWERS, TOKENS, LR = 16, 4, 64, 5e-5  # `prove train`'s step
# Of one AdamW step by |theirs - ours| / |ours|. The first step moves each weight by lr in its gradient's sign; only
# where the gradient is no larger than its rounding may the two go apart. Of unrelated gradients it is 1.4.
UPDATE = 0.5


def cp(recipe: Recipe, ui: UI, *, out: pathlib.Path, logs: pathlib.Path, budget: float, env: dict[str, str],
       groups: int = GROUPS, answers: int = ANSWERS, tokens: int = TOKENS, lr: float = LR, backend: str = "trainer",
       ranks_backend: str = "cp") -> dict:
    kept = record.Record("cp", recipe.subject, {
        "ranks": RANKS, "groups": groups, "answers": answers, "tokens": tokens, "lr": lr,
        "response_tokens": groups * answers * tokens, "micro": MICRO, "share": SHARE, "times": TIMES, "floor": FLOOR,
        "update": UPDATE}, out)
    deadline = time.monotonic() + budget
    folder = logs / f"cp-{recipe.subject}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start, environment = engine_start(recipe, True)
    parts = {"lone": Part(start, environment, backend)} | {
        f"rank {rank}": Part({"rank": rank, "ranks": RANKS, "store": str(folder / "store")}, environment, ranks_backend)
        for rank in range(RANKS)}
    # The engines end first: a rank that waits for one that died would hold the pool for the whole budget.
    with (concurrent.futures.ThreadPoolExecutor(RANKS) as pool,
          started(parts, kept, ui, env=env, logs=logs, deadline=deadline) as engines):
        lone, *ranks = (Trainer(engine, deadline) for engine in engines.values())
        kept.actor(lone.engine.info)
        proof = _Proof(lone, ranks, pool, folder, kept, ui)
        proof.run(requests(0, groups, answers, tokens, recipe.vocab), recipe.vocab, lr)
    rows = kept.data["rows"]
    kept.finish(kept.locked and len(rows) == 3, all(row["holds"] for row in rows))
    return kept.data


class _Proof:
    def __init__(self, lone: Trainer, ranks: list[Trainer], pool, folder: pathlib.Path, kept: record.Record, ui: UI):
        self.lone, self.ranks, self.pool, self.folder, self.kept, self.ui = lone, ranks, pool, folder, kept, ui

    def together(self, op: str, **arguments) -> list[dict]:
        """Every rank at once: they wait for each other, and nobody waits for one that another has left alone."""
        asked = [self.pool.submit(rank.call, op, **arguments) for rank in self.ranks]
        done, _ = concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_EXCEPTION)
        if failed := next((future.exception() for future in done if future.exception()), None):
            raise failed
        return [future.result() for future in asked]

    def run(self, wanted: list, vocab: int, lr: float) -> None:
        self._actors(lr)
        answers = self.lone.call("rollout", requests=[r.message() for r in wanted])["answers"]
        self.sequences, _ = advantaged(wanted, answers, vocab)
        self._row("rollout", self._rollout(wanted, answers))
        self._row("gradients", self._gradients())
        self._row("after update 1", self._update())

    def _row(self, case: str, row: dict) -> None:
        self.kept.row({"case": case, **row})
        self.ui.note(f"{case}: {'holds' if row['holds'] else 'does NOT hold'}; {row.pop('said')}")

    def _actors(self, lr: float) -> None:
        weights = str(self.folder / "first.pt")
        self.kept.data["actor"] = self.lone.call("actor", lr=lr)
        self.lone.call("save_weights", path=weights)
        made = self.together("actor", lr=lr, weights=weights, page=self.lone.engine.info["cache_block"])
        if any(rank["weights"] != self.kept.data["actor"]["weights"] for rank in made):
            raise ValueError("the ranks did not get the lone actor's weights: their digests differ")

    def _rollout(self, wanted: list, answers: dict) -> dict:
        """The engine's words beside the lone actor's and each rank's, which cut their micro-batches otherwise."""
        scored = {"lone": self.lone.call("score", sequences=self.sequences, micro=MICRO)}
        for rank, found in enumerate(self.together("score", sequences=self.sequences[::-1], micro=int(MICRO * SHARE))):
            scored[f"rank {rank}"] = found
        figures = {name: compared(wanted, answers, found["words"]).summary() for name, found in scored.items()}
        return {"words": figures, "seconds": {name: found["seconds"] for name, found in scored.items()},
                "holds": all(found["equal"] for found in figures.values()),
                "said": _said(figures)}

    def _gradients(self) -> dict:
        how, path = {"sequences": self.sequences, "micro": MICRO}, str(self.folder / "gradients.pt")
        self.lone.call("save_gradients", **how, path=path)
        cut = self.lone.call("gradient_errors", sequences=self.sequences[::-1], micro=int(MICRO * SHARE), path=path)
        found = compared_gradients(cut, self.together("gradient_errors", **how, path=path))
        over = [row["parameter"] for row in found if not row["error"] <= row["bound"]]
        seen = [row["parameter"] for row in found if row["own_share_error"] > row["bound"]]
        worst = max(found, key=lambda row: row["error"] / row["bound"])
        return {"parameters": found, "over": over, "own_share_over": len(seen),
                "holds": not over and len(seen) > len(found) / 2,
                "said": f"{len(found)} parameters, {len(over)} over their bound, worst {worst['parameter']} "
                        f"{worst['error']:.2g} of {worst['bound']:.2g}; without the sum {len(seen)} would be"}

    def _update(self) -> dict:
        how = {"sequences": self.sequences, "micro": MICRO}
        lone, ranks = self.lone.call("update", **how), self.together("update", **how)
        before, theirs = (str(self.folder / f"{name}.pt") for name in ("first", "lone"))
        self.lone.call("save_weights", path=theirs)
        distance = self.ranks[0].call("distance", before=before, theirs=theirs)
        if distance is None:
            raise EngineError("failed", "the update moved no weight: no other update is near to it")
        shared, alone = self.together("score", **how), self.together("score_alone", **how)
        figures = {f"rank {rank}": between(self.sequences, *(found["words"] for found in pair)).summary()
                   for rank, pair in enumerate(zip(alone, shared, strict=True))}
        figures["rank 1 and rank 0"] = between(self.sequences, *(found["words"] for found in shared)).summary()
        theirs = between(self.sequences, self.lone.call("score", **how)["words"], shared[0]["words"]).summary()
        same = ranks[0]["weights"] == ranks[1]["weights"] != self.kept.data["actor"]["weights"]
        return {"words": figures, "beside_lone": theirs, "same_weights": same, "distance": distance,
                "norms": [found["norm"] for found in (lone, *ranks)],
                "seconds": [found["seconds"] for found in (lone, *ranks)],
                "holds": all(found["equal"] for found in figures.values()) and same and distance <= UPDATE,
                "said": f"{_said(figures)}; weights of the ranks {'equal' if same else 'DIFFER'}; distance of the "
                        f"updates {distance:.2g} of {UPDATE}; beside the lone actor max |dp| {cell(theirs['max_dp'])}"}


def _said(figures: dict) -> str:
    return ", ".join(f"{name} {found['differing_words']} of {found['tokens']:,} words differ"
                     for name, found in figures.items())


def between(sequences: list[dict], left: dict, right: dict) -> Figures:
    """Two actors' words for the same answers."""
    figures = Figures()
    for sequence in sequences:
        tokens = unpack(sequence["tokens"])
        sides = [unpack(words[sequence["id"]]) if sequence["id"] in words else np.zeros(0, np.uint32)
                 for words in (left, right)]
        figures.add(sequence["id"], *(Sequence(tokens[:len(own)], own) for own in sides))
        figures.missing += len(tokens) - max(map(len, sides))  # where both lack a word, nothing was compared
    return figures


def compared_gradients(cut: dict, ranks: list[dict]) -> list[dict]:
    """A row a parameter, of what gradient_errors found. `cut`: of the lone actor itself with other micro-batches, which
    is what rounding alone does; the bound is a multiple of it, as in prove/grad.py. A parameter has the largest error
    among the ranks, and the least of their own shares: one that computed everything has the others idle."""
    if lacking := sorted({name for rank in ranks for name in cut.keys() ^ rank.keys()}):
        raise EngineError("failed", f"the gradients of {', '.join(lacking)} are not there on every side")
    rows = []
    for name in cut:
        wholes, shares = ([rank[name][of] for rank in ranks] for of in ("whole", "own"))
        error, own, usual = max(wholes), min(shares), cut[name]["whole"]
        if not math.isfinite(sum(wholes + shares) + usual):
            raise EngineError("failed", f"the gradient of {name} is zero or no number: nothing to be near to")
        rows.append({"parameter": name, "error": error, "usual_error": usual, "own_share_error": own,
                     "bound": max(TIMES * usual, FLOOR)})
    return rows
