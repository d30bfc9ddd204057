"""The innermost pair of calls within a site that makes one row differ: the operators behind a module's two answers.

A module often only chooses: GateLinear takes one kernel up to 16 rows and cuBLAS above. `pair` runs both arms' calls of
a site once more and watches what happens inside: operators as the dispatcher sees them, and functions at the top level
of a module. It looks for two calls, one in each arm, that were given the same bits of the row and made other bits: the
first such call that both arms make, with the same weights, or else the two that made a tensor that the site returned.
They are replayed on their own arguments before they count, and where these differ in what the calls overwrite, with
zeros there: what adds to another row is no cause. What is found names the operators, and needs far less imported than
the module does.
"""
from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from prove.repro import changed, row_bits
from prove.trace import SHARED, clone, hashes, resolve, result_hashes, tensors

PASSED_OVER = ("torch", "prove", "triton")  # whose functions are no operators of an engine; torch's own are dispatched
UNFILLED = {f"aten::{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                                         "new_empty_strided")}  # whose result is whatever lay there
POISON = 0x55


class Call(NamedTuple):
    path: str
    fixed: frozenset  # what is no row's: where its weights lie, and numbers and dtypes that no batch size decides
    count: int        # of the calls of this path with the same of these before it
    given: frozenset  # the hashes of the row in the arguments that it did not write to
    had: frozenset    # in those that it wrote to, before that
    made: frozenset   # and in what it returned, or wrote to

    @property
    def name(self) -> tuple:
        return self.path, self.fixed, self.count


class _Watch(TorchDispatchMode):
    """`with watch.profiled(): function(...)`: every call inside that has the row among its arguments, in order of
    ending. With `keep`, the arguments of the call of that name as they were when it began, and the places of those
    whose row it wrote to. weights: the storages that hold no rows, whatever the shape."""

    def __init__(self, rows: int, row: int, weights: set[int], keep: tuple | None = None):
        super().__init__()
        self.rows, self.row, self.weights, self.keep, self.kept, self.written = rows, row, weights, keep, None, set()
        self.calls: list[Call] = []
        self._counts, self._frames = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        begun = self._begin(f"torch:ops.{func}", args, kwargs, _numbers(func, args, kwargs))
        result = func(*args, **kwargs)
        if func.name().partition(".")[0] in UNFILLED:
            result.untyped_storage().fill_(POISON)  # else there lies what the run before left, the very result even
        else:
            self._end(begun, args, kwargs, result)
        return result

    @contextlib.contextmanager
    def profiled(self):
        before = sys.getprofile()
        with self:
            sys.setprofile(self._profile)
            try:
                yield self
            finally:
                sys.setprofile(before)

    def _profile(self, frame, event, value):
        if event == "call" and (path := _path(frame)):
            with _disable_current_modes():
                args, kwargs = _arguments(frame)
                self._frames[frame] = self._begin(path, args, kwargs), args, kwargs
        elif event == "return" and frame in self._frames:
            with _disable_current_modes():
                begun, args, kwargs = self._frames.pop(frame)
                self._end(begun, args, kwargs, value)

    def _begin(self, path: str, args, kwargs, numbers: frozenset = frozenset()) -> tuple:
        fixed = self._fixed(args, kwargs) | numbers
        name = path, fixed, self._counts[path, fixed]
        self._counts[path, fixed] += 1
        if name == self.keep:
            self.kept = {"args": clone(args), "kwargs": clone(kwargs), "rows": self.rows, "row": self.row}
        return name, self._given(args, kwargs)

    def _end(self, begun: tuple, args, kwargs, result) -> None:
        name, before = begun
        after = self._given(args, kwargs)
        written = {tensor for tensor in before if before[tensor] != after.get(tensor)}
        if name == self.keep:
            self.written = {tensor.split(" ")[1] for tensor in written}
        if before:
            given = frozenset(before[tensor] for tensor in before.keys() - written)
            made = {after[tensor] for tensor in written & after.keys()}
            made |= set(self._row(result_hashes(result, (args, kwargs), self.rows)).values())
            self.calls.append(Call(*name, given, frozenset(before[tensor] for tensor in written), made - given))

    def _fixed(self, args, kwargs) -> frozenset:
        leaves = tree_leaves((args, kwargs))
        return frozenset(leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
                         if isinstance(leaf, (float, torch.dtype)) or self._weight(leaf))

    def _weight(self, value) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.weights

    def _given(self, args, kwargs) -> dict[str, int]:
        weights = {place for place, tensor in tensors((args, kwargs)) if self._weight(tensor)}
        return {tensor: row for tensor, row in self._row(hashes((args, kwargs), self.rows)).items()
                if tensor.split(" ")[1] not in weights}

    def _row(self, found: dict[str, torch.Tensor]) -> dict[str, int]:
        return {tensor: int(hashed[self.row]) for tensor, hashed in found.items()}


def _numbers(func, args, kwargs) -> frozenset:
    """What an operator computes with, an exponent or a factor. A size is of another type."""
    said = func._schema.arguments
    named = {each.name for each in said if each.type.kind() == "NumberType"}
    given = dict(zip((each.name for each in said), args, strict=False)) | kwargs
    return frozenset((name, given[name]) for name in named & given.keys())


def _path(frame) -> str | None:
    """"module:function" of a frame that runs a function found there, or None."""
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return None
    if module.partition(".")[0] in PASSED_OVER or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], code.co_name, None)
    if not inspect.isfunction(found) or inspect.unwrap(found).__code__ is not code:
        return None
    return f"{module}:{code.co_name}"


def _arguments(frame) -> tuple[list, dict]:
    """What a function was called with. Read as its frame begins; those without a name for the caller come first."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    first = code.co_posonlyargcount
    return [values[name] for name in names[:first]], {name: values[name] for name in names[first:]}


def _weights(function, call: dict) -> set[int]:
    """The storages of the parameters of a module, or among the arguments."""
    owned = function.parameters() if isinstance(function, torch.nn.Module) else ()
    given = (tensor for _, tensor in tensors((call["args"], call["kwargs"])) if isinstance(tensor, torch.nn.Parameter))
    return {weight.untyped_storage().data_ptr() for weight in (*owned, *given)}


def _inside(function, call: dict, keep: tuple | None = None) -> _Watch:
    watch = _Watch(call["rows"], call["row"], _weights(function, call), keep)
    args, kwargs = clone((call["args"], call["kwargs"]))
    with torch.no_grad(), watch.profiled():
        function(*args, **kwargs)
    return watch


def _pairs(left: list[Call], right: list[Call], ends: list[tuple[frozenset, frozenset]]):
    """Candidates, the likeliest first: calls that both arms make, then those that made one of the tensors that the site
    returned (`ends`), or what a call that both arms make last was given otherwise."""
    both = [(one, two) for one in left for two in right if one.name == two.name]
    yield from ((one, two) for one, two in both if one.given == two.given and one.made != two.made)
    waiting, known = list(ends), set()
    while waiting:
        end = waiting.pop(0)
        known.add(end)
        yield from ((one, two) for one in left for two in right
                    if one.given == two.given and one.made & end[0] and two.made & end[1])
        waiting += [apart for one, two in both if one.made & end[0] and two.made & end[1]
                    for apart in _apart(one, two) if apart not in known]


def _apart(one: Call, two: Call):
    """What two calls were given otherwise, if that is one row each; with what they overwrote or without."""
    for left, right in ((one.given, two.given), (one.given | one.had, two.given | two.had)):
        if len(left - right) == len(right - left) == 1:
            yield left - right, right - left


def _blanked(call: dict, places: set[str]) -> dict:
    """Zeros where the call overwrites its arguments, which are copies."""
    for place, tensor in tensors((call["args"], call["kwargs"])):
        if place in places and tensor.numel() * tensor.element_size() <= SHARED:
            tensor.zero_()
    return call


def _kept(function, arms: tuple[dict, dict], found: tuple[Call, Call]) -> list[dict]:
    watched = [_inside(function, call, keep=one.name) for call, one in zip(arms, found, strict=True)]
    inner = [watch.kept | {"path": one.path} for watch, one in zip(watched, found, strict=True)]
    if found[0].had == found[1].had:
        return inner
    return [_blanked(call, watch.written) for call, watch in zip(inner, watched, strict=True)]


def pair(function, left: dict, right: dict) -> dict | None:
    """The two calls, each with the "path" of its function, or None if there are none within the site. left, right: two
    calls of `function` whose row has equal inputs and other outputs, as prove.repro.reduce returns them."""
    try:
        watched = [_inside(function, call) for call in (left, right)]
        outer = [row_bits(function, call) for call in (left, right)]
        ends = [tuple(frozenset([bits[tensor]]) for bits in outer) for tensor in sorted(changed(*outer))]
        for calls in _pairs(*(watch.calls for watch in watched), ends):
            inner = _kept(function, (left, right), calls)
            if {call["path"] for call in inner} == {left["path"]}:
                return None  # the site itself
            if changed(*(row_bits(resolve(call["path"])[2], call) for call in inner)):
                return dict(zip(("left", "right"), inner, strict=True))
    except Exception as error:  # noqa: BLE001 - what is inside an operator can object to being watched in any way
        print(f"not looked into: {type(error).__name__}: {error}", flush=True)
    return None
