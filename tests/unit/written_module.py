"""A module that a test writes: imported here, and found by a process with `folder` on PYTHONPATH."""
import importlib
import sys


def written_module(folder, monkeypatch, name: str, text: str):
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(name, None)  # of an earlier test
    return importlib.import_module(name)
