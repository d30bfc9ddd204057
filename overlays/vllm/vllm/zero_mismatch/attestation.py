"""What this process runs: digests of the modules that decide the bits, as they were imported, to compare with the lock.

Invariant: `differences(expected)` is empty only if each imported file that the lock names, and each imported module of
`vllm.zero_mismatch`, has exactly the locked bytes on disk. A module that was not imported says nothing; one that is
imported from elsewhere, or that the lock does not know, is a difference.

`expected` is {path: sha256} with paths such as "vllm/zero_mismatch/mhc.py": the "after" digests of patchset.lock.
"""
import hashlib
import pathlib
import sys
from collections.abc import Mapping

OURS = "vllm.zero_mismatch"


def _path_of(name: str, file: str) -> str:
    """"vllm.a.b" from /any/vllm/a/b.py is "vllm/a/b.py"; a package is its __init__.py."""
    base = name.replace(".", "/")
    return f"{base}/__init__.py" if pathlib.Path(file).name == "__init__.py" else f"{base}.py"


def digests() -> dict[str, str]:
    """{path: sha256} of every Python module of vLLM that this process has imported."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "vllm" and file and file.endswith(".py"):
            found[_path_of(name, file)] = hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
    return found


def differences(expected: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """{path: (found, expected)} where this process runs other bytes than the lock; empty if it runs the lock's."""
    ours = OURS.replace(".", "/") + "/"
    return {
        path: (digest, expected.get(path, "not in the lock"))
        for path, digest in sorted(digests().items())
        if digest != expected.get(path) and (path in expected or path.startswith(ours))
    }
