"""The start-up validation: does this machine, with this environment, suit the recipe? Every finding at once.

It reads the recipe that the proofs read. What it cannot see before the engine is configured (a backend that vLLM
chose, a flag added by hand) the engine's own policy refuses later, in the same form (vllm/zero_mismatch/policy.py).
A recipe that is planned is refused; one that is written, not proven, starts and says so.
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from patchset import evidence
from prove import record
from prove import recipe_schema as schema
from prove.recipe import ROOT, Recipe

STACK = ("torch", "triton")  # what the bits depend on beside vLLM: their kernels and code generators


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str  # sm90, gfx950


@dataclass(frozen=True)
class Machine:
    """What is looked at, gathered in one place so that a test can make any machine."""

    gpus: list[Gpu]
    environment: dict[str, str]
    modules: frozenset[str]  # those of the recipe's that can be imported
    engine: dict = field(default_factory=dict)  # prove.record.bind of the vLLM that would be imported; {} without one
    stack: dict[str, str] = field(default_factory=dict)  # versions of STACK as installed


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: found {self.found}, expected {self.expected}. {self.remedy}"


def findings(made: Recipe, machine: Machine, invariant: bool) -> list[Finding]:
    """Everything that keeps the recipe from starting here."""
    return [*_status(made), *_gpus(made, machine), *_engine(made, machine, invariant),
            *_environment(made, machine, invariant)]


def _status(made: Recipe) -> Iterator[Finding]:
    if made.status["state"] == schema.PLANNED:
        yield Finding("status", "planned", "written or proven",
                      "Missing: " + "; ".join(made.status["missing"]) + ".")


def _gpus(made: Recipe, machine: Machine) -> Iterator[Finding]:
    needs, layout = made.section("requires"), made.layout("rollout")
    wanted = f"{layout['gpus']} of {' or '.join(needs['arch'])}"
    if sum(gpu.arch in needs["arch"] for gpu in machine.gpus) < layout["gpus"]:
        seen = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in machine.gpus) or "none"
        yield Finding("GPUs", seen, wanted, "Run on such a machine; other GPUs run other kernels.")


def _engine(made: Recipe, machine: Machine, invariant: bool) -> Iterator[Finding]:
    if not machine.engine:
        yield Finding("vLLM", "none", "the patched vLLM", "Install it (docs/install.md), or set PYTHONPATH to it.")
    elif invariant and machine.engine["state"] != "locked":
        yield Finding("vLLM", f"{machine.engine['state']} tree", "the tree that patchset.lock names",
                      "python3 apply.py apply --installed PYTHON patches it; apply.py status says where it stands.")
    for module in made.section("requires").get("modules", ()):
        if module not in machine.modules:
            yield Finding(f"Python module {module}", "not installed", "installed",
                          "The image has it (docker/steps/wheels.sh shows how it is built).")


def _environment(made: Recipe, machine: Machine, invariant: bool) -> Iterator[Finding]:
    for name, value in made.environment(invariant).items():
        have = machine.environment.get(name)
        if have != value:
            yield Finding(f"environment variable {name}", "unset" if have is None else repr(have), repr(value),
                          "Start with run.sh or `launch serve`; Ray workers need it in runtime_env (`launch ray`).")


def unproven_stack(machine: Machine, folder: Path = ROOT / "evidence") -> str | None:
    """What to say if no record that passed was made with these versions of STACK. A remark, not a finding: the kernels'
    rules hold on any stack, only nobody has seen it on this one. Not every record lists them: a client sees vLLM's
    version alone. None on a machine that has no stack: that the engine is missing is a finding."""
    listed = [engine.get("versions") for data in evidence.all_in(folder) if data.get("passed") is True
              for engine in _table(data.get("engines")).values() if isinstance(engine, dict)]
    seen = {tuple(str(versions[name]) for name in STACK) for versions in map(_table, listed)
            if versions.keys() >= {*STACK}}
    here = tuple(machine.stack.get(name, "none") for name in STACK)
    if not seen or not machine.stack or any(all(map(_same, here, versions)) for versions in seen):
        return None
    said = [" and ".join(map(" ".join, zip(STACK, versions, strict=True))) for versions in (here, *sorted(seen))]
    return f"{said[0]} here; every record in evidence/ was made with {' or '.join(said[1:])}"


def _same(here: str, seen: str) -> bool:
    """A wheel of the package index is installed without the build that it calls itself by, such as +cu130. One that
    says another, +cu126 or +rocm, brings other kernels."""
    return here == seen or (here.partition("+")[0] == seen.partition("+")[0] and not ("+" in here and "+" in seen))


def _table(value) -> dict:
    """What a record, which may be damaged, has where a table belongs."""
    return value if isinstance(value, dict) else {}


def look(made: Recipe, environment: dict[str, str] | None = None,
         run: Callable[[list[str]], str | None] | None = None) -> Machine:
    """This machine. `environment` is what the engine would get; by default this process's own."""
    rocm = made.section("requires")["platform"] == "rocm"
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    wanted = made.section("requires").get("modules", ())
    return Machine((_rocm_gpus if rocm else _cuda_gpus)(run or _output), dict(environment or os.environ),
                   frozenset(name for name in wanted if importlib.util.find_spec(name)),
                   record.bind(Path(folders[0]).parent) if folders else {},
                   {name: version for name in STACK if (version := _version(name))})


def _version(name: str) -> str | None:
    """With torch's local part, +cu130, as an engine reports it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    """What a tool prints, None if it is not there or fails: a machine without it has no such GPU."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _cuda_gpus(run: Callable[[list[str]], str | None]) -> list[Gpu]:
    said = run(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.count(",") == 1]
    return [Gpu(name, "sm" + capability.replace(".", "")) for name, capability in rows]


def _rocm_gpus(run: Callable[[list[str]], str | None]) -> list[Gpu]:
    """By rocminfo, whose agents that are GPUs have a gfx name."""
    names = [line.split(":", 1)[1].strip() for line in (run(["rocminfo"]) or "").splitlines()
             if line.strip().startswith("Name:") and "gfx" in line]
    return [Gpu(name, name) for name in names if name.startswith("gfx")]
