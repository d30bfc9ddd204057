"""Names that carried lines use and the new release no longer has. Hunks can apply and yet lean on what is gone.

Three checks on Python files, none of which imports anything: a name that is defined nowhere (as a compiler sees
scopes), a word of the added lines that the file had in the base and no longer has, and an import of the upstream's
package that finds no such module or name. Only what was in order in the base release is reported.
"""
from __future__ import annotations

import ast
import builtins
import io
import symtable
import tokenize
from collections.abc import Callable, Iterable
from functools import lru_cache

from .rebase_merge import Group

Source = Callable[[str], bytes | None]
MODULE_NAMES = {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__path__", "__loader__", "__builtins__"}


@lru_cache(maxsize=64)
def undefined(source: bytes, path: str) -> set[str]:
    """Names that some scope reads and neither it, an enclosing one, the module nor Python defines."""
    try:
        top = symtable.symtable(source.decode("utf-8"), path, "exec")
        starred = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.parse(source).body)
    except (SyntaxError, ValueError):
        return set()
    if starred:
        return set()
    return _read_globally(top) - _defined(top) - _declared_global(top) - set(dir(builtins)) - MODULE_NAMES


def _defined(scope: symtable.SymbolTable) -> set[str]:
    return {symbol.get_name() for symbol in scope.get_symbols()
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()}


def _read_globally(scope: symtable.SymbolTable) -> set[str]:
    own = {symbol.get_name() for symbol in scope.get_symbols()
           if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module")}
    return own.union(*map(_read_globally, scope.get_children()))


def _declared_global(scope: symtable.SymbolTable) -> set[str]:
    own = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_declared_global() and symbol.is_assigned()}
    return own.union(*map(_declared_global, scope.get_children()))


@lru_cache(maxsize=64)
def words(source: bytes) -> dict[int, set[str]]:
    """The identifiers of each line, comments and strings left out."""
    found: dict[int, set[str]] = {}
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type == tokenize.NAME:
                found.setdefault(token.start[0], set()).add(token.string)
    except (tokenize.TokenError, SyntaxError):
        return {}
    return found


def gone_words(patched: bytes, added: Iterable[Group], base: bytes, upstream: bytes) -> set[str]:
    """Words of the added lines that stand in the base file itself and nowhere in the release's."""
    lines = words(patched)
    wanted = {word for group in added for number in range(group.new, group.new + len(group.added))
              for word in lines.get(number, ())}
    had = set().union(*words(base).values())
    has = set().union(*words(upstream).values())
    return (wanted & had) - has


def imports(source: bytes, package: str) -> set[tuple[str, str]]:
    """(module, name) of every absolute import from the package, wherever it stands; name is '' for a plain import."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == package and name != "*"}


def resolves(module: str, name: str, source: Source) -> bool:
    """Whether the release has that module, and the module that name: defined, imported or a module below it."""
    folder = module.replace(".", "/")
    data = source(f"{folder}.py")
    if data is None:
        data = source(f"{folder}/__init__.py")
    if not name:
        return data is not None
    if source(f"{folder}/{name}.py") is not None or source(f"{folder}/{name}/__init__.py") is not None:
        return True
    return data is not None and _offers(data, name)


@lru_cache(maxsize=1024)
def _offers(data: bytes, name: str) -> bool:
    try:
        top = symtable.symtable(data.decode("utf-8"), "module", "exec")
    except (SyntaxError, ValueError):
        return True
    return not {name, "__getattr__"}.isdisjoint(_defined(top)) or b"import *" in data


def broken(after: bytes, before: bytes, twin: bytes, path: str, package: str, old: Source, new: Source) -> list[str]:
    """What a patched file leans on in vain. What the release's own file (`before`) imports is there; what it or the
    file as patched in the old release (`twin`) leaves undefined passes for defined."""
    fresh = undefined(after, path) - undefined(before, path) - undefined(twin, path)
    lost = lost_imports(imports(after, package) - imports(before, package), old, new)
    return [f"{path}: {name} is not defined" for name in sorted(fresh)] + [
        f"{path}: {name} is not there to import" for name in lost]


def lost_imports(wanted: Iterable[tuple[str, str]], old: Source, new: Source) -> list[str]:
    """Those of some imports that the old release satisfies and the new one does not."""
    lost = [one for one in wanted if resolves(*one, old) and not resolves(*one, new)]
    return sorted(f"{module}.{name}" if name else module for module, name in lost)
