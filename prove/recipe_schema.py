"""The one schema of recipes/<name>/recipe.toml: which sections and keys there are, of what kind, and what must agree.

`findings` returns everything that is wrong at once, as texts that say what to do; an empty list is a sound recipe. It
reads the recipe alone: whether a flag is one of vLLM's is checked against vLLM's own source (tests/upstream).
"""
from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

# A status is a claim about the recipe as it stands, and lint (patchset/lint_recipes.py) holds it to its record.
PROVEN, WRITTEN, PLANNED = "proven", "written", "planned"
STATES = {
    PROVEN: "a record of `prove rollout` of this very recipe passed with today's lock",
    WRITTEN: "it can be started, and no such record says that its bits are equal",
    PLANNED: "something it needs is not here: it refuses to start",
}


def _texts(value) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _table_of(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def _text(value) -> bool:
    return isinstance(value, str) and value != ""


def _count(value) -> bool:
    return type(value) is int and value > 0


def _modes(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    """A table of `kind` whose tables on and off, of the same kind, are laid over it."""
    def holds(value) -> bool:
        return isinstance(value, dict) and all(
            _table_of(kind)(one) if name in ("on", "off") else kind(one) for name, one in value.items())
    return holds


KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "text": (_text, "a text"),
    "count": (_count, "a whole number above 0"),
    "number": (lambda value: type(value) in (int, float), "a number"),
    "texts": (_texts, "a list of texts"),
    "table": (lambda value: isinstance(value, dict), "a table"),
    "patterns": (_table_of(_text), "a table of regular expressions"),
    "flags": (_modes(lambda value: not isinstance(value, type(None))), "a table of engine flags"),
    "variables": (_modes(lambda value: isinstance(value, str)), "a table of texts: write numbers as \"1\""),
    "state": (lambda value: isinstance(value, str) and value in STATES, "one of " + ", ".join(STATES)),
    "platform": (lambda value: value in ("cuda", "rocm"), "cuda or rocm"),
}
STATUS = {"state": "state", "evidence": "texts", "missing": "texts"}
LAYOUT = dict.fromkeys(("nodes", "gpus", "tensor", "pipeline", "data", "expert", "context"), "count")
SECTIONS: dict[str, dict[str, str]] = {  # section, or section.subsection -> key -> kind
    "model": {"path": "text", "vocab": "count", "engine": "flags"},
    "status": STATUS,
    "requires": {"platform": "platform", "arch": "texts", "modules": "texts"},
    "layout": {"rollout": "table", "trainer": "table"},
    "layout.rollout": LAYOUT,
    "layout.trainer": LAYOUT,
    "tiny": {"model": "text", "weights": "text", "vocab": "count", "engine": "flags", "status": "table"},
    "tiny.status": STATUS,
    "precompile": {"script": "text"},
    "bisect": {"functions": "texts"},
    "bench": {"engine": "table", "precompile": "texts", "floor": "number", "operators": "patterns"},
}
WHOLE = {"engine": "flags", "env": "variables"}  # sections whose keys are the engine's own names
REQUIRED = {"model": ("path", "vocab"), "status": ("state",), "requires": ("platform", "arch"),
            "layout": ("rollout",), "engine": (), "env": (), "tiny": ("model", "weights", "vocab", "status"),
            "tiny.status": ("state",)}
OPTIONAL = {"tiny", "precompile", "bisect", "bench"}  # sections that a recipe may leave out
NOT_INHERITED = ("tiny", "precompile", "status")  # they name files beside the recipe, or are a claim about it
LAID_OUT = {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size", "data": "data_parallel_size"}


def findings(data: dict) -> list[str]:
    """Everything that keeps `data` (a recipe with its base already under it) from being a recipe."""
    known = {name for name in (*SECTIONS, *WHOLE) if "." not in name}
    if unknown := {name for name in data if kind_of(name) not in known}:
        return [f"unknown section {sorted(unknown)}{_near(sorted(unknown)[0], known)}; "
                f"expected some of {sorted(known)} or tiny-..."]
    found = [f"section [{name}] is missing" for name in sorted(known - OPTIONAL - set(data))]
    for section, table in data.items():
        if section in WHOLE:
            found += [] if KINDS[WHOLE[section]][0](table) else [f"[{section}] is not {KINDS[WHOLE[section]][1]}"]
            continue
        found += _keys(section, table, SECTIONS[kind_of(section)])
        for name in (table if isinstance(table, dict) else ()):
            if f"{kind_of(section)}.{name}" in SECTIONS:
                found += _keys(f"{section}.{name}", table[name], SECTIONS[f"{kind_of(section)}.{name}"])
    return found or [*_statuses(data), *_layout_findings(data)]


def kind_of(section: str) -> str:
    """A recipe may have several small models, in [tiny] and [tiny-...]; they are all of one kind."""
    return "tiny" if section.startswith("tiny-") else section


def small(data: dict) -> list[str]:
    """The sections of the recipe's small models."""
    return sorted(section for section in data if kind_of(section) == "tiny")


def _keys(section: str, table, keys: dict[str, str]) -> Iterator[str]:
    if not isinstance(table, dict):
        yield f"[{section}] is not a table"
        return
    for key, value in table.items():
        if key not in keys:
            yield f"[{section}] {key}: no such key{_near(key, keys)}; expected some of {sorted(keys)}"
        elif not KINDS[keys[key]][0](value):
            yield f"[{section}] {key} = {value!r}: expected {KINDS[keys[key]][1]}"
    for key in REQUIRED.get(".".join(map(kind_of, section.split("."))), ()):
        if key not in table:
            yield f"[{section}] {key} is missing"


def _near(name: str, known) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _statuses(data: dict) -> Iterator[str]:
    yield from _status_findings("status", data["status"])
    for section in small(data):
        yield from _status_findings(f"{section}.status", data[section]["status"])


def _status_findings(section: str, status: dict) -> Iterator[str]:
    if status["state"] == PROVEN and not status.get("evidence"):
        yield f"[{section}] state = proven names no evidence: name the record, or say written"
    if status["state"] == PROVEN and status.get("missing"):
        yield f"[{section}] state = proven, and something is missing: say written, or drop the line"
    if status["state"] != PROVEN and not status.get("missing"):
        yield f"[{section}] state = {status['state']}: say under missing what it lacks"


def _layout_findings(data: dict) -> Iterator[str]:
    """One place decides a number of ranks: the layout. The engine's flags are made from it."""
    for flag in (*LAID_OUT.values(), "enable_expert_parallel"):
        if flag in data["engine"]:
            yield f"[engine] {flag}: the layout sets it; say it in [layout.rollout]"
    for side, layout in data["layout"].items():
        sizes = {key: layout.get(key, 1) for key in LAYOUT}
        ranks = sizes["tensor"] * sizes["pipeline"] * sizes["data"] * sizes["context"]
        if (have := sizes["nodes"] * sizes["gpus"]) != ranks:
            yield (f"[layout.{side}] tensor x pipeline x data x context = {ranks} ranks on nodes x gpus = {have} GPUs: "
                   "make them equal")
        if ranks % sizes["expert"]:
            yield f"[layout.{side}] expert = {sizes['expert']} does not divide the {ranks} ranks"
    rollout = {key: data["layout"]["rollout"].get(key, 1) for key in LAYOUT}
    if rollout["expert"] not in (1, rollout["tensor"] * rollout["data"]):
        yield "[layout.rollout] expert: vLLM spreads experts over tensor x data ranks or not at all"
    if rollout["data"] > 1 and "all2all_backend" not in data["engine"]:
        yield "[engine] all2all_backend is missing: with data > 1 the exchange of expert rows has to be named"
