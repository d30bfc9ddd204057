"""Run single functions of an upstream on a CPU machine, as released and as patched by our series.

vLLM itself does not import without its compiled parts, nor verl without Ray, but the functions our patches hook are
plain Python. `stock` and `patched` give the text of a file, whose first folder says of which upstream; `define`
compiles chosen functions of it, with every name they need passed in.
"""
import ast
import functools
import pathlib
import subprocess
import tarfile
import tempfile

import pytest

from patchset import fetch, pins, series
from patchset.errors import NeedsWork

ROOT = pathlib.Path(__file__).resolve().parents[2]
version: str | None = None  # vLLM's release that is read, set by conftest.py; None: the pinned default


def _release(path: str) -> tuple[str, pins.Release]:
    name = path.partition("/")[0]
    return name, pins.load(ROOT).upstream(name).release(version if name == "vllm" else None)


@functools.cache
def _archive(name: str, release: pins.Release) -> pathlib.Path:
    try:
        return fetch.sdist(pins.load(ROOT).upstream(name), release)
    except NeedsWork as error:
        pytest.skip(f"no sdist of the pinned {name}: {error}")


@functools.cache
def _trees(name: str, release: pins.Release) -> tuple[dict[str, str], dict[str, str]]:
    """Every file that the series touches, (as released, as patched)."""
    patches = series.load(ROOT, name, release.version)
    paths = {path for patch in patches for path in patch.paths}
    with tempfile.TemporaryDirectory() as folder, tarfile.open(_archive(name, release)) as archive:
        root = pathlib.Path(folder)
        for member in archive:
            _, _, path = member.name.partition("/")
            if path in paths:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(archive.extractfile(member).read())
        before = {path: (root / path).read_text() for path in paths if (root / path).exists()}
        for patch in patches:
            subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=root, input=patch.text, check=True)
        after = {path: (root / path).read_text() for path in paths if (root / path).exists()}
    return before, after


@functools.cache
def _sources(name: str, release: pins.Release) -> dict[str, str]:
    """Every Python file of the package, read in one pass: seeking in a compressed archive costs a pass each time."""
    with tarfile.open(_archive(name, release)) as archive:
        members = ((member, member.name.partition("/")[2]) for member in archive)
        return {path: archive.extractfile(member).read().decode() for member, path in members
                if path.startswith(f"{name}/") and path.endswith(".py")}


def stock(path: str) -> str:
    which = _release(path)
    return _trees(*which)[0].get(path) or _sources(*which)[path]


def patched(path: str) -> str:
    which = _release(path)
    return _trees(*which)[1].get(path) or _sources(*which)[path]


def define(source: str, names: list[str], scope: dict) -> dict:
    """Compile the named functions of `source` ("function" or "Class.method") in `scope` and return it.

    Methods come in a class of the same name whose base is scope["Base"], so that super() reaches a stand-in.
    """
    # Annotations stay text: they name types of modules that are not here.
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    top = {node.name: node for node in ast.parse(source).body if isinstance(node, kinds)}
    classes: dict[str, ast.ClassDef] = {}
    body: list[ast.stmt] = []
    for name in names:
        owner, _, method = name.rpartition(".")
        node = top[owner or name]
        if owner:
            node = next(child for child in node.body if getattr(child, "name", None) == method)
            if owner not in classes:
                base = ast.Name("Base", ast.Load())
                classes[owner] = ast.ClassDef(name=owner, bases=[base], keywords=[], body=[], decorator_list=[])
                body.append(classes[owner])
            classes[owner].body.append(node)
        else:
            body.append(node)
        node.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([future, *body], type_ignores=[]))
    exec(compile(module, "<upstream>", "exec"), scope)
    return scope
