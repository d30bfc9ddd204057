"""Where the record of a run goes: no run takes the place of a record that shows more.

A record that passed under today's lock gives way only to a run that is asked for all that it shows. Any other is
written beside it, under a name that says in what it asks for less: rollout-m.cases-twice.json, train-m.updates-3.json.
That name is held to the same rule.
"""
from __future__ import annotations

import hashlib
import json
import pathlib

from patchset import evidence

# The arguments by which one run shows more than another, in the order in which a name says them. The others (a learning
# rate, the constants of a verb, what follows from these) make another run and not a smaller one.
AMOUNTS = ("cases", "arms", "tokens", "sampled_tokens", "updates", "restore_after", "synchronous", "groups", "answers",
           "whole_vocab", "runs", "concurrent", "prompt_tokens", "out_tokens", "most_out_tokens", "seconds")
LONGEST = 100  # characters of a list in a name


def file_name(data: dict) -> str:
    """Of a record's data."""
    less = data.get("asks_less", {})
    return ".".join([f"{data['verb']}-{data['subject']}", *(f"{key}-{less[key]}" for key in AMOUNTS if key in less),
                     "json"])


def proof(path: pathlib.Path) -> pathlib.Path:
    """Where a record that passed stays while a later run, which did not, stands in its place."""
    return path.with_suffix(".json.passed")


def less(folder: pathlib.Path, data: dict, today: set[str]) -> dict[str, str]:
    """What the run of `data` asks for less of than the records which hold there: the amounts, as they stand in its
    name. today: the digests of the lock's entries."""
    found: dict[str, str] = {}
    while True:
        more = _lacking(data["arguments"], folder / file_name({**data, "asks_less": found}), today)
        if more.keys() <= found.keys():
            return found
        found |= more


def _lacking(asked: dict, path: pathlib.Path, today: set[str]) -> dict[str, str]:
    holds = next((each for each in (path, proof(path)) if not evidence.why_not(each, today)), None)
    shown = json.loads(holds.read_text()).get("arguments", {}) if holds else {}
    return {key: _text(asked[key]) for key in AMOUNTS
            if key in asked and key in shown and not _covers(key, asked[key], shown[key])}


def _covers(key: str, asked, shown) -> bool:
    if key == "restore_after":  # after which update is no amount; 0 leaves it out
        return bool(asked) >= bool(shown)
    if key == "cases" and None in (asked, shown):  # None: all there are
        return asked is None
    return set(shown) <= set(asked) if isinstance(asked, list) else asked >= shown


def _text(value) -> str:
    if not isinstance(value, list):
        return str(value)
    text = "+".join(sorted(set(value)))
    return text if len(text) <= LONGEST else f"{len(set(value))}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
