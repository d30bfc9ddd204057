"""Two engines that decode in turns, a block of steps at a time, and what the turns say of their speed.

Each engine answers its own 256 requests; while one decodes a block the other waits, asleep in a read. Two blocks of
each make a quad, off on on off and then on off off on, of about two seconds. On a shared host a core runs slower for
seconds at a time, by up to a half and whatever it executes, though no core of the guest looks busier: within a quad
both sides meet the same of it. The ratio is the median over the quads, so what strikes one block is left out; a cost
that an engine has every few steps is in all its blocks, and is not. A rarer one would be: so there is no verdict where
the ratio of all time is another.

A block is timed as a whole, and ends the run if a step between its timed ones did not decode all requests: a cache that
is just full on one side would else count as slow kernels. The medians of its steps stand beside it in the record: they
would hide a slow step in thirty-two. The same arithmetic compares the baseline with itself: its later block of each
quad with its earlier one.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from prove import machine
from prove.engine import EngineError
from prove.record import Record
from prove.ui import UI

STEPS = 32          # of a block, by the clock: as many as a cycle of the Mamba replay has
UNTIMED = 4         # before them: the caches and the pipeline are the other engine's
TOKENS = STEPS + UNTIMED + 1  # that a request samples in one block
SPARE = 40          # tokens: requests that join one after another, and those that fill the pipeline
PARTS = 5           # of a run, whose medians say how far it agrees with itself
LEAST = 3           # quads a part
MOST_SPREAD = 0.25  # of the baseline's throughput over the parts: more, and the machine decides instead of the engines
MOST_NOISE = 0.1    # of the baseline against itself
PATIENCE = 60.0     # seconds in all that a run waits for others to leave the machine alone


def tokens_of(quads: int) -> int:
    return 2 * quads * TOKENS + SPARE


def quads_in(tokens: int) -> int:
    return max(0, tokens - SPARE) // (2 * TOKENS)


def alternate(call: Callable, messages: list[dict], quads: int, kept: Record, ui: UI, *, until: float) -> list[dict]:
    """Rows of quads, each kept as it comes. `call`: (side, op, arguments). Ends early at `until`, where the
    machine is not idle for PATIENCE seconds, or where a cache is full; the record then says why."""
    rows, patience, longest = [], PATIENCE, 0.0
    for side in ("off", "on"):
        kept.row({"side": side, "prefill_seconds": call(side, "decode_begin", requests=messages)["seconds"]})
    try:
        for index in range(quads):
            others, waited = machine.quiet(patience)
            patience -= max(0.0, waited - 2 * machine.GLANCE)
            if others > machine.allowed():
                raise _Stopped(f"the machine was not idle: others use {others} of its cores, {machine.allowed():.1f} "
                               "are allowed; end them, or let them hold --turn")
            began = time.monotonic()
            if began + longest > until:
                raise _Stopped("out of time")
            rows.append({"quad": index, "others": others, **_quad(call, index)})
            longest = max(longest, time.monotonic() - began)
            kept.row(rows[-1])
            if (index + 1) % max(1, quads // PARTS) == 0:
                ui.note(f"{index + 1} of {quads} quads, on / off so far {statistics.median(map(ratio, rows)):.3f}; "
                        f"others use {others:.1f} cores")
    except _Stopped as why:
        kept.data["stopped"] = f"after {len(rows)} of {quads} quads: {why}"
        ui.say(kept.data["stopped"])
    for side in ("off", "on"):
        try:
            _asked(call, side, "decode_end")
        except _Stopped as why:  # all that it was asked to time is timed
            kept.data.setdefault("stopped", f"after {len(rows)} of {quads} quads: {why}")
    return rows


class _Stopped(Exception):
    """No further quad; those before it count."""


def _quad(call: Callable, index: int) -> dict:
    one, other = ("off", "on") if index % 2 == 0 else ("on", "off")  # neither side always goes first
    busy, found = machine.Busy(), {"off": [], "on": []}
    for side in (one, other, other, one):
        found[side].append(_asked(call, side, "decode", steps=STEPS, untimed=UNTIMED))
    return {"busy_cores": round(busy.mean(), 2), "stolen_cores": round(busy.stolen(), 2), "first": one, **found}


def _asked(call: Callable, side: str, op: str, **arguments):
    """What a side answers. One that raises ends the run; one that is gone fails it."""
    try:
        return call(side, op, **arguments)
    except EngineError as error:
        if error.kind != "failed":
            raise
        raise _Stopped(f"{side}: {error}") from None


def step(blocks: list[dict], key: str = "seconds") -> float:
    """Seconds a step of the blocks; key "median": of their median steps."""
    return sum(b[key] / (b["steps"] if key == "seconds" else 1) for b in blocks) / len(blocks)


def ratio(row: dict, key: str = "seconds") -> float:
    """The throughput on over the throughput off, in one quad."""
    return step(row["off"], key) / step(row["on"], key)


def itself(row: dict) -> float:
    """The same of the baseline's earlier block over its later one."""
    earlier, later = row["off"]
    return step([later]) / step([earlier])


def summary(rows: list[dict], count: int) -> dict:
    """Decode throughput of `count` requests on both sides and its ratio. pairs, itself: medians over each part of the
    run, of on / off and of the baseline against itself; noise: how far the latter are from 1; spread: how far the
    baseline's throughput lies apart over the parts. plain, steps: the ratio of all time, and of the median steps."""
    if not rows:
        return {"off": 0.0, "on": 0.0, "ratio": 0.0, "quads": 0, "pairs": [], "itself": [], "noise": 1.0, "spread": 1.0,
                "plain": 0.0, "steps": 0.0}
    parts = [part for i in range(PARTS) if (part := rows[i * len(rows) // PARTS:(i + 1) * len(rows) // PARTS])]
    each = [statistics.median(count / step(row["off"]) for row in part) for part in parts]
    selves = [statistics.median(map(itself, part)) for part in parts]
    return {**{side: statistics.median(count / step(row[side]) for row in rows) for side in ("off", "on")},
            "ratio": statistics.median(map(ratio, rows)), "quads": len(rows),
            "pairs": [statistics.median(map(ratio, part)) for part in parts], "itself": selves,
            "noise": max(abs(1 - one) for one in selves), "spread": (max(each) - min(each)) / statistics.median(each),
            "plain": sum(step(row["off"]) for row in rows) / sum(step(row["on"]) for row in rows),
            "steps": statistics.median(ratio(row, "median") for row in rows)}


def enough(found: dict) -> bool:
    """Whether the quads of a summary bear a verdict: as many as that needs, on a machine where the baseline agrees with
    itself, in a quad and over the run, and the median of the quads with all time. Else a ratio above the floor is luck,
    or leaves out an engine that stalls now and then."""
    return (found["quads"] >= PARTS * LEAST and found["spread"] <= MOST_SPREAD and found["noise"] <= MOST_NOISE
            and abs(found["plain"] / found["ratio"] - 1) <= MOST_NOISE)


def said(found: dict) -> str:
    return (f"on / off {found['ratio']:.3f}, the median of {found['quads']} quads; its parts "
            f"{', '.join(f'{p:.3f}' for p in found['pairs'])}, the baseline against itself "
            f"{', '.join(f'{p:.3f}' for p in found['itself'])}; noise {found['noise']:.3f} of at most {MOST_NOISE}, "
            f"spread {found['spread']:.3f} of at most {MOST_SPREAD}; by all time {found['plain']:.3f}, by median steps "
            f"{found['steps']:.3f}")
