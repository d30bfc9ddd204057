"""What a recipe becomes: vLLM's command line, a run.sh, an environment, Ray's runtime_env. Nothing is decided here."""
from __future__ import annotations

import json
import shlex
from pathlib import Path

from prove import recipe_schema as schema
from prove.recipe import Recipe

GENERATED = "Generated from recipe.toml by `python3 -m launch write`; edit that, not this."


def engine(made: Recipe, invariant: bool) -> dict:
    """Every engine flag by its name in EngineArgs: the recipe's own and those that the layout of ranks asks for."""
    flags, layout = made.engine_flags(invariant), made.layout("rollout")
    for key, flag in schema.LAID_OUT.items():
        if layout[key] > 1:
            flags[flag] = layout[key]
    if layout["expert"] > 1:
        flags["enable_expert_parallel"] = True
    return flags


def arguments(flags: dict) -> list[list[str]]:
    """EngineArgs by name -> command line, one list an option: booleans as --x or --no-x, tables as JSON."""
    found = []
    for name, value in flags.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append([f"--{option}" if value else f"--no-{option}"])
        elif isinstance(value, dict):
            found.append([f"--{option}", json.dumps(value, separators=(",", ":"))])
        else:
            found.append([f"--{option}", *map(str, value if isinstance(value, list) else [value])])
    return found


def serve(made: Recipe, invariant: bool, more: list[str]) -> list[str]:
    """The engine's command line. What the user adds comes last, where vLLM's parser lets it win."""
    return ["vllm", "serve", made.model, *sum(arguments(engine(made, invariant)), []), *more]


def port(line: list[str]) -> str:
    """The port in a command line of `vllm serve`: --port N or --port=N, the last one, as its parser has it."""
    found = "8000"
    for word, after in zip(line, [*line[1:], ""], strict=True):
        name, is_joined, value = word.partition("=")
        if name == "--port":
            found = value if is_joined else after
    return found


def run_script(made: Recipe) -> str:
    """run.sh: the same as `launch serve`, to be read, copied and changed."""
    lines = ["#!/usr/bin/env bash", f"# {GENERATED}",
             f"# {made.name}: {status_line(made)}", "set -euo pipefail",
             'root=$(cd "$(dirname "$0")/../.." && pwd)', ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in made.environment(True).items()]
    lines += ["", f'PYTHONPATH="$root${{PYTHONPATH:+:$PYTHONPATH}}" python3 -m launch check --here {made.name}',
              f"exec vllm serve {shlex.quote(made.model)} \\"]
    lines += ["  " + shlex.join(one) + " \\" for one in arguments(engine(made, True))]
    return "\n".join([*lines, '  "$@"', ""])


def status_line(made: Recipe) -> str:
    return f"status {made.status['state']}: {schema.STATES[made.status['state']]}"


def runtime_env(made: Recipe, invariant: bool) -> dict:
    """Ray starts workers without the driver's environment: every variable of the recipe has to be in here."""
    return {"env_vars": made.environment(invariant)}


def script_path(root: Path, name: str) -> Path:
    return root / "recipes" / name / "run.sh"
