"""The sentinel: did the code a patch leans on change, although its hunks still apply?

A patch names in `Anchors: path::Class.method` the symbols whose behaviour it takes for granted. The contract of an
anchor is the syntax tree of that symbol and of every function of the same file that it calls, without comments,
docstrings, positions or layout. Two releases keep the contract if and only if these trees are equal. Nothing is
executed or imported.

Who has read a difference and found it harmless says so in the patch: `Contract-Read: <version> <digest> — <why>`.
The digest is of the difference, so another one is flagged again.
"""
from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

CHANGED, GONE, NOT_IN_BASE, UNREADABLE = "contract changed", "anchor gone", "anchor not in base", "anchor unreadable"
SEVERITY = (GONE, UNREADABLE, NOT_IN_BASE, CHANGED)  # the worst first
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
EVIDENCE_LINES = 40
READ = "Contract-Read"  # trailer

Source = Callable[[str], bytes | None]  # path -> bytes of that file in a release, or None


@dataclass(frozen=True)
class Anchor:
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"


@dataclass(frozen=True)
class Finding:
    """One difference. `symbol` is the anchor itself or a function it calls; `where` says where it went, if known.

    `diff` shows it, cut if long; `digest` is of the whole of it.
    """

    kind: str
    anchor: str
    symbol: str
    where: tuple[str, ...] = ()
    diff: str = ""
    digest: str = ""

    def as_json(self) -> dict:
        return {**vars(self), "where": list(self.where)}


@dataclass(frozen=True)
class Symbol:
    """A function, class or constant: every definition of that name (a name may have one in each branch of an `if`)."""

    name: str
    nodes: tuple[ast.AST, ...]

    @cached_property
    def text(self) -> str:
        """Normalised source, to be shown; its layout may differ from one Python to the next."""
        return "\n".join(ast.unparse(node) for node in self.nodes) + "\n"

    @cached_property
    def digest(self) -> str:
        return _digest(*map(_shape, self.nodes))

    @cached_property
    def body(self) -> str:
        """The digest without the symbol's own name, so that it is known again when renamed or moved."""
        return _digest(*map(_anonymous, self.nodes))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _shape(node) -> str:
    """A tree as text that is the same under every Python: what is empty or only a hint is left out."""
    if isinstance(node, list):
        return "[" + ",".join(map(_shape, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 puts empty strings between the parts
        parts = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        return f"JoinedStr({_shape(parts)})"
    fields = [f"{name}={_shape(value)}" for name, value in ast.iter_fields(node)
              if value is not None and value != [] and name not in ("kind", "type_comment")]
    return f"{type(node).__name__}({','.join(fields)})"


class Module:
    """The symbols of one Python file by qualified name (`Class.method`, `function`, `CONSTANT`)."""

    def __init__(self, source: bytes):
        self._nodes: dict[str, list[ast.AST]] = {}
        self._bases: dict[str, list[str]] = {}
        self._collect(_WithoutDocstrings().visit(ast.parse(source)).body, "")

    def _collect(self, body: list[ast.stmt], prefix: str):
        for node in body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                self._nodes.setdefault(prefix + node.name, []).append(node)
                self._collect(node.body, f"{prefix}{node.name}.")
                if isinstance(node, ast.ClassDef):
                    self._bases[prefix + node.name] = [b.id for b in node.bases if isinstance(b, ast.Name)]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._nodes.setdefault(prefix + target.id, []).append(node)
            else:
                for block in ("body", "orelse", "finalbody"):
                    self._collect(getattr(node, block, []), prefix)
                for handler in getattr(node, "handlers", []):
                    self._collect(handler.body, prefix)

    def get(self, name: str) -> Symbol | None:
        nodes = self._nodes.get(name)
        return Symbol(name, tuple(nodes)) if nodes else None

    def functions(self) -> Iterable[Symbol]:
        return (Symbol(name, tuple(nodes)) for name, nodes in self._nodes.items()
                if isinstance(nodes[0], (*FUNCTIONS, ast.ClassDef)))

    def calls(self, symbol: Symbol) -> dict[str, Symbol]:
        """The functions of this file that the symbol calls directly, by qualified name; not those within itself."""
        owner = symbol.name if symbol.name in self._bases else symbol.name.rpartition(".")[0]
        found = {}
        for root in symbol.nodes:
            for node in ast.walk(root):
                name = self._resolve(node.func, owner, symbol.name) if isinstance(node, ast.Call) else None
                if name and name != symbol.name and not name.startswith(f"{symbol.name}."):
                    found[name] = self.get(name)
        return found

    def _resolve(self, func: ast.expr, owner: str, caller: str) -> str | None:
        if isinstance(func, ast.Subscript):  # a Triton launch: kernel[grid](...)
            func = func.value
        if isinstance(func, ast.Name):
            names = [f"{caller}.{func.id}", func.id]
            return next((self._callable(name) for name in names if name in self._nodes), None)
        if not isinstance(func, ast.Attribute):
            return None
        value = func.value
        if isinstance(value, ast.Name) and value.id in ("self", "cls"):
            return self._method(owner, func.attr)
        if isinstance(value, ast.Name) and value.id in self._bases:
            return self._method(value.id, func.attr)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
            found = (self._method(base, func.attr) for base in self._bases.get(owner, []))
            return next(filter(None, found), None)
        return None

    def _callable(self, name: str) -> str | None:
        """A function by its own name, a class by its __init__; a constant is no call."""
        if name in self._bases:
            return self._method(name, "__init__")
        return name if isinstance(self._nodes[name][0], FUNCTIONS) else None

    def _method(self, owner: str, name: str, seen: frozenset[str] = frozenset()) -> str | None:
        if owner in seen or owner not in self._bases:
            return None
        full = f"{owner}.{name}"
        if full in self._nodes and isinstance(self._nodes[full][0], FUNCTIONS):
            return full
        found = (self._method(base, name, seen | {owner}) for base in self._bases[owner])
        return next(filter(None, found), None)


class _WithoutDocstrings(ast.NodeTransformer):
    """Every bare string statement of a body goes: docstrings, and the notes that some put under attributes."""

    def _strip(self, node):
        self.generic_visit(node)
        body = [statement for statement in node.body if not _is_text(statement)]
        node.body = body or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _strip


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _anonymous(node: ast.AST) -> str:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return _shape(node.value)
    name, node.name = node.name, "_"
    try:
        return _shape(node)
    finally:
        node.name = name


@lru_cache(maxsize=256)
def _module(source: bytes) -> Module:
    return Module(source)


def anchors(values: Iterable[str]) -> list[Anchor]:
    """The anchors of the `Anchors:` trailers; a value without `::` names a whole file, with an empty symbol."""
    found = []
    for value in values:
        for word in value.replace(",", " ").split():
            path, _, name = word.partition("::")
            if word != "none":
                found.append(Anchor(path, name))
    return found


def compare(anchor: Anchor, old: Source, new: Source, files: Mapping[str, bytes],
            moved: Mapping[str, str] | None = None) -> list[Finding]:
    """What changed in the contract of `anchor` from `old` to `new`.

    `files` is the new release by path, to say where a symbol went; `moved` maps renamed files, old path to new.
    """
    path = (moved or {}).get(anchor.path, anchor.path)
    before, after = old(anchor.path), new(path)
    if before is None:
        return [Finding(NOT_IN_BASE, str(anchor), str(anchor))]
    if not anchor.name or not anchor.path.endswith((".py", ".pyi")):
        return _whole_file(anchor, path, before, after)
    try:
        here = _module(before)
        there = _module(after) if after is not None else None
    except SyntaxError as error:
        return [Finding(UNREADABLE, str(anchor), str(anchor), where=(f"line {error.lineno}: {error.msg}",))]
    symbol = here.get(anchor.name)
    if symbol is None:
        return [Finding(NOT_IN_BASE, str(anchor), str(anchor))]
    twin = there.get(anchor.name) if there else None
    if twin is None:
        return [Finding(GONE, str(anchor), str(anchor), where=tuple(locate(symbol, path, here, there, files)))]
    return _contract(anchor, path, here, symbol, there, twin, files)


def _whole_file(anchor: Anchor, path: str, before: bytes, after: bytes | None) -> list[Finding]:
    """No syntax tree for CUDA, CMake and the like: there the contract is the file's bytes."""
    if after is None:
        return [Finding(GONE, str(anchor), str(anchor))]
    if before == after:
        return []
    diff = _diff(before.decode("utf-8", "replace"), after.decode("utf-8", "replace"), anchor.path, path)
    digests = [hashlib.sha256(data).hexdigest() for data in (before, after)]
    return [Finding(CHANGED, str(anchor), str(anchor), diff=diff, digest=_digest(*digests))]


def _contract(anchor, path, here: Module, symbol: Symbol, there: Module, twin: Symbol, files) -> list[Finding]:
    found = []
    if symbol.digest != twin.digest:
        diff = _diff(symbol.text, twin.text, str(anchor), f"{path}::{twin.name}")
        found.append(Finding(CHANGED, str(anchor), str(anchor), diff=diff, digest=_digest(symbol.digest, twin.digest)))
    called, now_called = here.calls(symbol), there.calls(twin)
    for name in sorted(called | now_called):
        before, after = called.get(name), now_called.get(name)
        if before and after and before.digest == after.digest:
            continue
        if symbol.digest != twin.digest and not (before and after):
            continue  # the call itself came or went: the anchor's own difference shows it
        where = tuple(locate(before, path, here, there, files)) if before and not there.get(name) else ()
        diff = _diff(before.text if before else "", after.text if after else "",
                     f"{anchor.path}::{name}", f"{path}::{name}")
        digest = _digest(*(one.digest if one else "" for one in (before, after)))
        found.append(Finding(CHANGED, str(anchor), f"{anchor.path}::{name}", where, diff, digest))
    return found


def digest(findings: Iterable[Finding]) -> str:
    """What a Contract-Read trailer names: these differences and no others."""
    return _digest(*sorted(f"{f.kind} {f.anchor} {f.symbol} {f.digest}" for f in findings))[:12]


def read(values: Iterable[str], version: str, findings: list[Finding]) -> str | None:
    """The reason given in a Contract-Read trailer for exactly these differences on that release, if there is one."""
    if not findings or any(finding.kind != CHANGED for finding in findings):
        return None
    start = f"{version} {digest(findings)}"
    reasons = (value[len(start):].lstrip(" —-:") for value in values if value.startswith(start))
    return next((reason for reason in reasons if reason), None)


def locate(symbol: Symbol, path: str, here: Module, there: Module | None, files: Mapping[str, bytes]) -> list[str]:
    """Where a lost symbol is now: renamed in its own file, else the same name in another, the same body first."""
    fresh = [other for other in there.functions() if not here.get(other.name)] if there else []
    renamed = [f"{path}::{other.name} (renamed, same body)" for other in fresh if other.body == symbol.body]
    if renamed:
        return renamed
    leaf = symbol.name.rpartition(".")[2]
    same, other_body = [], []
    for name, module in _defining(leaf, path, files):
        for candidate in module.functions():
            if candidate.name.rpartition(".")[2] == leaf:
                place = f"{name}::{candidate.name}"
                (same if candidate.body == symbol.body else other_body).append(place)
        if (constant := module.get(leaf)) and isinstance(constant.nodes[0], (ast.Assign, ast.AnnAssign)):
            (same if constant.body == symbol.body else other_body).append(f"{name}::{leaf}")
    if same:
        return [f"{place} (same body)" for place in same]
    return [f"{place} (same name, other body)" for place in other_body[:3]] if len(other_body) <= 3 else []


def _defining(leaf: str, path: str, files: Mapping[str, bytes]) -> Iterable[tuple[str, Module]]:
    """Files of the release whose bytes may define `leaf`, the one it left included (another class may have it now)."""
    word = leaf.encode()
    wanted = (b"def " + word, b"class " + word, word + b" =", word + b": ")
    for name, data in files.items():
        if name.endswith(".py") and word in data and any(text in data for text in wanted):
            try:
                yield name, _module(data)
            except (SyntaxError, ValueError):
                continue  # a template or a broken test input of the release: it defines nothing importable


def _diff(before: str, after: str, from_name: str, to_name: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), from_name, to_name, lineterm="", n=2))
    if len(lines) > EVIDENCE_LINES:
        lines[EVIDENCE_LINES:] = [f"... {len(lines) - EVIDENCE_LINES} more lines"]
    return "\n".join(lines)
