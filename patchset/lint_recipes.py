"""The recipes' part of lint: each reads, its run.sh is the one made from it, and its record bears out its status."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from . import evidence
from .lint_rules import Finding


def check(root: Path, today: set[str]) -> Iterator[Finding]:
    """today: the digests of the lock's entries."""
    from launch import __main__ as launch  # the recipes' reader and writer; only lint needs them here
    from prove import recipe, recipe_schema

    sound = True
    for name in recipe.names(root):
        path = f"recipes/{name}/recipe.toml"
        try:
            made = recipe.load(name, None, root)
        except ValueError as error:
            sound = False
            yield from (Finding(path, 1, "recipe", line.rsplit("recipe.toml: ", 1)[-1])
                        for line in str(error).splitlines())
            continue
        for section in [None, *recipe_schema.small(made.data)]:
            yield from _claims(root, path, recipe.load(name, section, root), today)
    for script in launch.write(only_check=True, root=root) if sound else ():
        yield Finding(script, 1, "recipe", "not what recipe.toml says; write it with python3 -m launch write")


def _claims(root: Path, path: str, made, today: set[str]) -> Iterator[Finding]:
    if made.status["state"] != "proven":
        return
    for record in made.status["evidence"]:
        reason = evidence.why_not(root / record, today) or _of_another(root / record, made.subject)
        if reason:
            yield Finding(path, 1, "recipe", f"{made.subject} is said to be proven, and {record} does not bear it out: "
                                             f"{reason}")


def _of_another(path: Path, subject: str) -> str:
    """A record proves the recipe that it was made with, and only the whole comparison proves it."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if (found := (record.get("verb"), record.get("subject"))) != ("rollout", subject):
        return f"it is of {found[0]} {found[1]}, not of rollout {subject}"
    return ""
