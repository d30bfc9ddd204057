"""Watches a model run: hashes the rows of every watched call's inputs and outputs, and can keep some calls' arguments.

A watched call ("site") is a module's forward or a function named by the recipe. Its name is the path of the module it
runs in, the function, and a counter within that module's call, so that both arms of a comparison name it alike:
`layers.1.attn/mm#0`. A row is one token; what is hashed is every tensor argument or result that has a row for each
token of the step, each by itself: two arms are compared in the tensors that have rows of one shape in both, so that a
scale of shape [1], which looks like a row in a step of one token, is no difference. The hash is a sum of products in
wrapping 64-bit integers, so it is exact and depends on no order.
"""
from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import zlib

import torch

CHUNK = 1024  # rows hashed at once: the int64 copy of 8192 rows of a wide tensor would take gigabytes
WIDEST = 1 << 20  # bytes of a row; what is wider is no activation (a cache whose block is as long as the step)
MOST = 6          # sites from which a repro is tried
GIVEN = "arguments that are not None"  # among a call's inputs: a tensor that only one arm gives is a difference
SHARED = 1 << 30  # bytes of an argument that is kept as it is and not copied: a KV cache


@functools.lru_cache(maxsize=256)
def _weights(count: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(-2**62, 2**62, (count,), generator=generator) * 2 + 1).to(device)


def row_hash(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] int64 over the bits of each row. tensor: [rows, ...] of any dtype."""
    out = torch.zeros(rows, dtype=torch.int64, device=tensor.device)
    for start in range(0, rows, CHUNK):
        part = tensor[start:start + CHUNK].reshape(min(CHUNK, rows - start), -1).contiguous()
        part = (part if part.data_ptr() % 4 == 0 else part.clone()).view(torch.uint8)  # a slice may begin anywhere
        if part.shape[1] % 4 == 0:
            part = part.view(torch.int32)
        out[start:start + CHUNK] = (part.to(torch.int64) * _weights(part.shape[1], str(part.device))).sum(1)
    return out


def tensors(value, place: str = ""):
    """(place, tensor) of a nest. The place is the way there, not a count: an optional tensor moves no other's."""
    if isinstance(value, torch.Tensor):
        yield place or "0", value
    items = enumerate(value) if isinstance(value, (tuple, list)) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        yield from tensors(item, f"{place}.{key}" if place else str(key))


def _call(args, kwargs) -> dict:
    """A call's arguments by their place or name."""
    return dict(enumerate(args)) | kwargs


def _given(args, kwargs, rows: int) -> torch.Tensor:
    """[rows], each the same number, which says what arguments there are beside those that are None, and what tensors
    in them. Numbers in a nest are not counted: a list of lengths is as long as the batch, which the arms cut otherwise.
    """
    call = _call(args, kwargs)
    there = {str(place) for place, value in call.items() if value is not None} | {place for place, _ in tensors(call)}
    return torch.full((rows,), zlib.crc32(" ".join(sorted(there)).encode()))


def by_rows(tensor: torch.Tensor, rows: int, longer: bool = False) -> torch.Tensor | None:
    """The tensor with its token dimension first, or None if it has none. [splits, T, N] counts as well as [T, ...];
    with `longer` also a buffer of more rows, of which the first T are meant."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.dim() == 0 or tensor.numel() == 0:
        return None
    if tensor.shape[0] == rows or (longer and tensor.shape[0] > rows):
        aligned = tensor[:rows]
    elif tensor.dim() > 1 and tensor.shape[1] == rows:
        aligned = tensor.movedim(1, 0)
    else:
        return None
    return aligned if aligned[0].numel() * aligned.element_size() <= WIDEST else None


def hashes(values, rows: int, longer: bool = False, what: str = "argument") -> dict[str, torch.Tensor]:
    """The row hashes of every row tensor in a nest of arguments or results, by its place and the shape of a row."""
    return {f"{what} {place} {list(aligned.shape[1:])}": row_hash(aligned, rows)
            for place, tensor in tensors(values)
            if (aligned := by_rows(tensor, rows, longer)) is not None}


def result_hashes(result, arguments, rows: int) -> dict[str, torch.Tensor]:
    """What a call made. Some return a buffer sized for the largest step; one that returns nothing has written to its
    arguments, which then stand here as they were left."""
    return (hashes(result, rows, what="result") or hashes(result, rows, longer=True, what="result")
            or hashes(arguments, rows))


class Tracer:
    """`with tracer.installed(): tracer.begin(T); model(...); tracer.end(keys, wanted)` for each step."""

    def __init__(self, model: torch.nn.Module, functions: list[str] = (), keep: dict[str, tuple] | None = None):
        self.model, self.functions, self.keep = model, functions, keep or {}  # keep: site -> row whose call is wanted
        # name -> {"in": {tensor: {key: hash}}, "out": the same, "written": the tensors of "out" that the call made}
        self.sites: dict[str, dict] = {}   # in call order
        self.missing: list[str] = []       # functions that could not be found
        self.kept: dict[str, dict] = {}    # site -> arguments of that call
        self._rows = 0
        self._stack: list[tuple[str, collections.Counter]] = []
        self._step: list[tuple[str, dict, dict]] = []
        self._held: list[dict] = []

    # ---- one step

    def begin(self, rows: int) -> None:
        self._rows, self._step, self._held = rows, [], []
        self._stack = [("", collections.Counter())]

    def end(self, keys: list, wanted) -> None:
        """keys: what each row is, e.g. (request, position); rows whose key is not `wanted` are dropped."""
        rows, self._rows = self._rows, 0
        if rows != len(keys):
            raise RuntimeError(f"a step of {rows} tokens was read as {len(keys)} rows: it is not the batch that ran")
        chosen = [row for row, key in enumerate(keys) if wanted(key)]
        named = [keys[row] for row in chosen]
        for name, before, after in self._step if chosen else []:
            site = self.sites.setdefault(name, {"in": {}, "out": {}, "written": set()})
            before, after = ({tensor: hashed.cpu() for tensor, hashed in side.items()} for side in (before, after))
            for side, found in (("in", before), ("out", after)):
                for tensor, hashed in found.items():
                    site[side].setdefault(tensor, {}).update(zip(named, hashed[chosen].tolist(), strict=True))
            site["written"] |= {tensor for tensor, hashed in after.items()
                                if tensor not in before or not torch.equal(before[tensor], hashed)}
        for held in self._held:
            if (key := self.keep[held["site"]]) in keys:
                self.kept.setdefault(held["site"], held | {"row": keys.index(key)})
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
                open_calls.append(self._inputs(args, kwargs))
                self._hold(name, args, kwargs)

        def after(_, args, kwargs, result):
            if self._rows:
                self._stack.pop()
                self._step.append((name, open_calls.pop(), result_hashes(result, _call(args, kwargs), self._rows)))

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
            before = self._inputs(args, kwargs)
            self._hold(name, args, kwargs, path)
            result = function(*args, **kwargs)
            self._step.append((name, before, result_hashes(result, _call(args, kwargs), self._rows)))
            return result

        setattr(owner, attribute, watched)
        undo.callback(setattr, owner, attribute, function)

    def _inputs(self, args, kwargs) -> dict[str, torch.Tensor]:
        return hashes(_call(args, kwargs), self._rows) | {GIVEN: _given(args, kwargs, self._rows)}

    def _hold(self, name: str, args, kwargs, path: str | None = None) -> None:
        if name in self.keep:
            self._held.append({"site": name, "path": path, "rows": self._rows, "args": clone(args),
                               "kwargs": clone(kwargs)})


def resolve(path: str):
    """"package.module:Class.method" -> (owner, attribute, callable), looked up where its caller looks it up."""
    module, _, names = path.partition(":")
    owner = importlib.import_module(module)
    *parents, attribute = names.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute, getattr(owner, attribute)


def mapped(value, change):
    """A nest of arguments with `change(tensor)` for every tensor of its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change) for item in value)
    return {key: mapped(item, change) for key, item in value.items()} if type(value) is dict else value


def clone(value):
    """A nest of arguments as they are now: a call may write to them."""
    def copied(tensor):
        as_it_is = isinstance(tensor, torch.nn.Parameter) or tensor.numel() * tensor.element_size() > SHARED
        return tensor if as_it_is else tensor.detach().clone()
    return mapped(value, copied)


def _differing(one: dict[str, dict], other: dict[str, dict], tensors: set[str]) -> tuple[set, set]:
    """(keys of rows that were compared, keys of rows that differ) over the tensors that both have."""
    compared, differ = set(), set()
    for tensor in tensors & set(one) & set(other):
        shared = set(one[tensor]) & set(other[tensor])
        compared |= shared
        differ |= {key for key in shared if one[tensor][key] != other[tensor][key]}
    return compared, differ


def differences(left: dict[str, dict], right: dict[str, dict]) -> list[dict]:
    """Every site, in call order, with a row whose output differs; the row named is one whose inputs agree, if there is
    one (`inputs_agree`): for it the difference was made in the call, or in state that it reads."""
    found = []
    for name, one in left.items():
        other = right.get(name)
        if other is None:
            continue
        written = one["written"] | other["written"]
        compared, differ = _differing(one["out"], other["out"], written)
        given, unequal = _differing(one["in"], other["in"], set(one["in"]) - written - {GIVEN})
        made_here = (differ & given) - unequal - _differing(one["in"], other["in"], {GIVEN})[1]
        if compared:
            found.append({"site": name, "key": list(min(made_here or differ)) if differ else None,
                          "rows_differing": len(differ), "rows_compared": len(compared),
                          "inputs_agree": bool(made_here)})
    return found


def first_difference(left: dict[str, dict], right: dict[str, dict]) -> dict | None:
    """The earliest site, in call order, with a row whose output differs.

    All sites before it agree on all rows, so what it was given through watched calls is equal, and the difference was
    made in it, in an unwatched operator just before it (`inputs_agree` is false then), or in state it reads.
    `made_here`: the sites, without those around them, that have such a row with equal inputs: where a repro may start.
    """
    sites = differences(left, right)
    first = next((index for index, site in enumerate(sites) if site["rows_differing"]), None)
    if first is None:
        return None
    made_here: list[dict] = []
    for site in sites[first:]:
        inner = any(each["site"].startswith((site["site"] + ".", site["site"] + "/")) for each in made_here)
        if site["inputs_agree"] and not inner:
            made_here.append({"site": site["site"], "key": site["key"]})
    return sites[first] | {"last_agreeing": sites[first - 1]["site"] if first else None, "made_here": made_here[:MOST],
                           "only_left": sorted(set(left) - set(right))[:20],
                           "only_right": sorted(set(right) - set(left))[:20]}
