"""The Counter-Tests of the patches, for `prove counter`: each shows the stock code at fault, most of them on a CPU.

They run in one pytest process, read upstream's sources from the pinned archive, and are parametrized over the pinned
releases: only the default one counts here. What they said is kept in the record under the lock it was said of and the
text that said it, so that they can run where the tests run and be taken over by the run on the GPU, which asks again
only what was skipped.
"""
from __future__ import annotations

import ast
import hashlib
import os
import pathlib
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET

from patchset import pins
from prove.recipe import ROOT


def read_patches(root: pathlib.Path = ROOT) -> dict[str, list[str]]:
    """Slug -> its counter-tests, in the order of the series."""
    folder = root / "patches" / "vllm"
    slugs = [line.split("#")[0].strip() for line in (folder / "series").read_text().splitlines()]
    return {slug: _trailers((folder / f"{slug}.patch").read_text(), "Counter-Test") for slug in slugs if slug}


def _trailers(text: str, name: str) -> list[str]:
    head = text.partition("\n---\n")[0]
    return [line.partition(":")[2].strip() for line in head.splitlines() if line.startswith(f"{name}:")]


def texts(tests: list[str], root: pathlib.Path = ROOT) -> dict[str, str]:
    """Test -> digest of what it is written in: its file, its conftests, and what they import or name of tests/. A test
    whose file is not there has none."""
    helpers = {path.name: path for path in (root / "tests").rglob("*") if path.suffix in (".py", ".h")
               and path.name not in ("conftest.py", "__init__.py")}
    found = {}
    for file in {test.partition("::")[0] for test in tests}:
        if not (root / file).is_file():
            continue
        seen, new = set(), {root / file, *filter(pathlib.Path.is_file, (root / "tests" / "conftest.py",
                                                                        (root / file).with_name("conftest.py")))}
        while new:
            seen |= new
            new = {helpers[name] for path in new for name in _names(path) & helpers.keys()} - seen
        parts = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in seen)
        found[file] = hashlib.sha256("".join(parts).encode()).hexdigest()
    return {test: found[file] for test in tests if (file := test.partition("::")[0]) in found}


def _names(path: pathlib.Path) -> set[str]:
    """The files that a module imports, and those that it names in a text, as one that it compiles or runs."""
    if path.suffix != ".py":
        return set()
    try:
        nodes = list(ast.walk(ast.parse(path.read_text())))
    except SyntaxError:  # what pytest says of it counts
        return set()
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    named = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {f"{name.partition('.')[0]}.py" for name in imported} | {name.rpartition("/")[2] for name in named}


def run(tests: list[str], env: dict[str, str], logs: pathlib.Path) -> dict[str, str]:
    """Test -> passed, failed, skipped or missing; several variants of one must all have passed."""
    if not tests:
        return {}
    logs.mkdir(parents=True, exist_ok=True)
    report = logs / "counter-tests.xml"
    report.unlink(missing_ok=True)
    upstream = pins.load(ROOT).upstream("vllm")
    others = [f"not {release}" for release in upstream.releases if release != upstream.version]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", " and ".join(others),
               f"--junitxml={report}", *tests]
    with (logs / "counter-tests.log").open("w") as output:
        subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, stdout=output, stderr=subprocess.STDOUT,
                       check=False)
    return read(report, tests)


def read(report: pathlib.Path, tests: list[str]) -> dict[str, str]:
    found: dict[str, set[str]] = {test: set() for test in tests}
    cases = ET.parse(report).iter("testcase") if report.is_file() else ()  # pytest's own report, written a moment ago
    for case in cases:
        file, name = case.get("classname", "").replace(".", "/") + ".py", case.get("name", "").partition("[")[0]
        said = {child.tag for child in case}
        outcome = "failed" if said & {"failure", "error"} else "skipped" if "skipped" in said else "passed"
        for test in tests:
            path, _, wanted = test.partition("::")
            if wanted == name and (path == file or path.endswith(f"/{file}")):
                found[test].add(outcome)
    worst = ("failed", "skipped", "passed")
    return {test: next((w for w in worst if w in outcomes), "missing") for test, outcomes in found.items()}


def versions() -> dict[str, str]:
    """Of what the tests run with."""
    import numpy
    import torch
    import triton

    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "numpy": numpy.__version__, "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"}


def verdict(tests: list[str], said: dict[str, str]) -> tuple[bool, str]:
    """Whether a patch's Counter-Tests show it to be needed: there are some, and all of them passed."""
    if not tests:
        return False, "it names no Counter-Test"
    wrong = [f"{test.rpartition('::')[2]} {said[test]}" for test in tests if said[test] != "passed"]
    return not wrong, "; ".join(wrong) or f"{len(tests)} passed"
