"""Loads a recipe's Python files by path: they belong to no package."""
import importlib.util
import pathlib
import types


def load(path: str | pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("prove_" + pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
