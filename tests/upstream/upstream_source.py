"""Run single functions of upstream vLLM on a CPU machine, as released and as patched by our series.

vLLM itself does not import without its compiled parts, but the functions our patches hook are plain Python. `stock` and
`patched` give the text of a file; `define` compiles chosen functions of it, with every name they need passed in.
"""
import ast
import functools
import pathlib
import subprocess
import tarfile
import tempfile

import pytest

from patchset import pins, series

ROOT = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
def _release():
    upstream = pins.load(ROOT).upstream("vllm")
    return upstream, upstream.release(None)


@functools.cache
def _archive() -> pathlib.Path:
    from patchset import fetch

    upstream, release = _release()
    path = fetch.cached_sdist(upstream, release)
    if path is None:
        pytest.skip(f"the sdist of {upstream.distribution} {release.version} is not in the cache: apply.py fetch")
    return path


@functools.cache
def _trees() -> tuple[dict[str, str], dict[str, str]]:
    """Every file that the series touches, (as released, as patched)."""
    upstream, release = _release()
    patches = series.load(ROOT, upstream.name, release.version)
    paths = {path for patch in patches for path in patch.paths}
    with tempfile.TemporaryDirectory() as folder, tarfile.open(_archive()) as archive:
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
def _untouched(path: str) -> str:
    with tarfile.open(_archive()) as archive:
        for member in archive:
            if member.name.partition("/")[2] == path:
                return archive.extractfile(member).read().decode()
    raise FileNotFoundError(f"{path} is not in the sdist")


def stock(path: str) -> str:
    return _trees()[0].get(path) or _untouched(path)


def patched(path: str) -> str:
    return _trees()[1].get(path) or _untouched(path)


def define(source: str, names: list[str], scope: dict) -> dict:
    """Compile the named functions of `source` ("function" or "Class.method") in `scope` and return it.

    Methods come in a class of the same name whose base is scope["Base"], so that super() reaches a stand-in.
    """
    # Annotations stay text: they name types of modules that are not here.
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    top = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
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
