"""Watches a model run: hashes the rows of every watched call's inputs and outputs, and can keep one call's arguments.

A watched call ("site") is a module's forward or a function named by the recipe. Its name is the path of the module it
runs in, the function, and a counter within that module's call, so that both arms of a comparison name it alike:
`layers.1.attn/mm#0`. A row is one token; what is hashed is every tensor argument or result that has a row for each
token of the step. The hash is a sum of products in wrapping 64-bit integers, so it is exact and depends on no order.
"""
from __future__ import annotations

import collections
import contextlib
import functools
import importlib

import torch

CHUNK = 1024  # rows hashed at once: the int64 copy of 8192 rows of a wide tensor would take gigabytes


@functools.lru_cache(maxsize=256)
def _weights(count: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(-2**62, 2**62, (count,), generator=generator) * 2 + 1).to(device)


def row_hash(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] int64 over the bits of each row. tensor: [rows, ...] of any dtype."""
    out = torch.zeros(rows, dtype=torch.int64, device=tensor.device)
    for start in range(0, rows, CHUNK):
        part = tensor[start:start + CHUNK].reshape(min(CHUNK, rows - start), -1).contiguous().view(torch.uint8)
        if part.shape[1] % 4 == 0 and part.shape[1]:
            part = part.view(torch.int32)
        out[start:start + CHUNK] = (part.to(torch.int64) * _weights(part.shape[1], str(part.device))).sum(1)
    return out


def _tensors(value, found: list) -> list:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _tensors(item, found)
    return found


def by_rows(tensor: torch.Tensor, rows: int, longer: bool = False) -> torch.Tensor | None:
    """The tensor with its token dimension first, or None if it has none. [splits, T, N] counts as well as [T, ...];
    with `longer` also a buffer of more rows, of which the first T are meant."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.dim() == 0:
        return None
    if tensor.shape[0] == rows or (longer and tensor.shape[0] > rows):
        return tensor[:rows]
    return tensor.movedim(1, 0) if tensor.dim() > 1 and tensor.shape[1] == rows else None


def combined(values, rows: int, longer: bool = False) -> torch.Tensor | None:
    """One hash a row over all row tensors in a nest of arguments or results."""
    total = None
    for tensor in _tensors(values, []):
        if (aligned := by_rows(tensor, rows, longer)) is not None:
            hashed = row_hash(aligned, rows)
            total = hashed if total is None else total * 1000003 + hashed
    return total


class Tracer:
    """`with tracer.installed(): tracer.begin(T); model(...); tracer.end(keys, wanted)` for each step."""

    def __init__(self, model: torch.nn.Module, functions: list[str] = (), keep: str | None = None, keep_key=None):
        self.model, self.functions, self.keep, self.keep_key = model, functions, keep, keep_key
        self.sites: dict[str, dict] = {}   # name -> {"keys": [...], "in": [...], "out": [...]}, in call order
        self.missing: list[str] = []       # functions that could not be found
        self.kept: list[dict] = []         # arguments of the kept site, one entry a step
        self._rows = 0
        self._stack: list[tuple[str, collections.Counter]] = []
        self._step: list[tuple[str, torch.Tensor | None, torch.Tensor]] = []
        self._held: list[dict] = []

    # ---- one step

    def begin(self, rows: int) -> None:
        self._rows, self._step, self._held = rows, [], []
        self._stack = [("", collections.Counter())]

    def end(self, keys: list, wanted) -> None:
        """keys: what each row is, e.g. (request, position); rows whose key is not `wanted` are dropped."""
        chosen = [i for i, key in enumerate(keys) if wanted(key)]
        rows, self._rows = self._rows, 0
        if chosen and rows == len(keys):
            index = torch.tensor(chosen)
            for name, before, after in self._step:
                site = self.sites.setdefault(name, {"keys": [], "in": [], "out": []})
                site["keys"] += [keys[i] for i in chosen]
                site["in"] += (before.cpu()[index] if before is not None else torch.zeros(len(chosen))).tolist()
                site["out"] += after.cpu()[index].tolist()
            if self.keep_key is None or self.keep_key in keys:
                self.kept += [held | {"keys": keys} for held in self._held]
        self._step, self._held = [], []

    # ---- hooks

    @contextlib.contextmanager
    def installed(self):
        with contextlib.ExitStack() as undo:
            for name, module in self.model.named_modules():
                if name:
                    self._watch_module(name, module, undo)
            for path in self.functions:
                self._watch_function(path, undo)
            yield self

    def _watch_module(self, name: str, module: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        open_calls = []

        def before(_, args, kwargs):
            if self._rows:
                self._stack.append((name, collections.Counter()))
                open_calls.append((combined((args, kwargs), self._rows), self._hold(name, args, kwargs)))

        def after(_, args, kwargs, result):
            if self._rows:
                self._stack.pop()
                self._record(name, *open_calls.pop(), (args, kwargs), result)

        for handle in (module.register_forward_pre_hook(before, with_kwargs=True),
                       module.register_forward_hook(after, with_kwargs=True)):
            undo.callback(handle.remove)

    def _watch_function(self, path: str, undo: contextlib.ExitStack) -> None:
        try:
            owner, attribute, function = resolve(path)
        except (ImportError, AttributeError) as error:
            self.missing.append(f"{path}: {error}")
            return
        short = path.partition(":")[2]

        @functools.wraps(function)
        def watched(*args, **kwargs):
            if not self._rows:
                return function(*args, **kwargs)
            module, counter = self._stack[-1]
            name = f"{module}/{short}#{counter[short]}"
            counter[short] += 1
            before, held = combined((args, kwargs), self._rows), self._hold(name, args, kwargs, path)
            result = function(*args, **kwargs)
            self._record(name, before, held, (args, kwargs), result)
            return result

        setattr(owner, attribute, watched)
        undo.callback(setattr, owner, attribute, function)

    def _hold(self, name: str, args, kwargs, path: str | None = None) -> dict | None:
        if name != self.keep:
            return None
        return {"site": name, "path": path, "rows": self._rows, "args": _clone(args), "kwargs": _clone(kwargs)}

    def _record(self, name: str, before, held: dict | None, arguments, result) -> None:
        # Some calls return a buffer sized for the largest step; one that returns nothing has written to its arguments.
        after = combined(result, self._rows)
        after = combined(result, self._rows, longer=True) if after is None else after
        after = combined(arguments, self._rows) if after is None else after
        if after is not None:
            self._step.append((name, before, after))
        if held is not None:
            self._held.append(held | {"result": _clone(result), "after": _clone(arguments)})


def resolve(path: str):
    """"package.module:Class.method" -> (owner, attribute, callable), looked up where its caller looks it up."""
    module, _, names = path.partition(":")
    owner = importlib.import_module(module)
    *parents, attribute = names.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute, getattr(owner, attribute)


def _clone(value):
    if isinstance(value, torch.nn.Parameter):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_clone(item) for item in value)
    if type(value) is dict:
        return {key: _clone(item) for key, item in value.items()}
    return value


def _by_key(site: dict) -> dict[tuple, tuple[int, int]]:
    """Row key -> (hash of its inputs, hash of its outputs)."""
    return {tuple(key): pair for key, *pair in zip(site["keys"], site["in"], site["out"], strict=True)}


def first_difference(left: dict[str, dict], right: dict[str, dict]) -> dict | None:
    """The earliest site, in call order, with a row whose output differs; of its rows the one with the smallest key.

    All sites before it agree on all rows, so what it was given through watched calls is equal, and the difference was
    made in it, in an unwatched operator just before it (`inputs_agree` is false then), or in state it reads.
    """
    agreed = None
    for name, one in left.items():
        other = right.get(name)
        if other is None:
            continue
        mine, yours = _by_key(one), _by_key(other)
        shared = sorted(set(mine) & set(yours))
        differing = [key for key in shared if mine[key][1] != yours[key][1]]
        if differing:
            key = differing[0]
            return {"site": name, "key": list(key), "rows_differing": len(differing), "rows_compared": len(shared),
                    "inputs_agree": mine[key][0] == yours[key][0], "last_agreeing": agreed,
                    "only_left": sorted(set(left) - set(right))[:20], "only_right": sorted(set(right) - set(left))[:20]}
        if shared:
            agreed = name
    return None
