"""The innermost pair of calls within a site that makes one row differ: the operators behind a module's two answers.

A module often only chooses: GateLinear takes one kernel up to 16 rows and cuBLAS above. `pair` runs both arms' calls of
a site once more and watches what happens inside: operators as the dispatcher sees them, and functions at the top level
of a module. It looks for two calls, one in each arm, that were given the same bits of the row and made other bits: the
first such call that both arms make, or else the two that made what the site returned. They are replayed on their own
arguments before they count. What is found names the operators, and needs far less imported than the module does.
"""
from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from prove.repro import changed, row_bits
from prove.trace import clone, hashes, resolve, result_hashes

PASSED_OVER = ("torch", "prove", "triton")  # whose functions are no operators of an engine; torch's own are dispatched
UNFILLED = {f"aten::{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                                         "new_empty_strided")}  # whose result is whatever lay there
POISON = 0x55


class Call(NamedTuple):
    path: str
    count: int        # of the calls of this path before it
    given: frozenset  # the hashes of the row in the arguments that it did not write to
    made: frozenset   # and in what it returned, or wrote to


class _Watch(TorchDispatchMode):
    """`with watch.profiled(): function(...)`: every call inside that has the row among its arguments, in order of
    ending. With `keep`, the arguments of the call of that path and count, as they were when it began."""

    def __init__(self, rows: int, row: int, keep: tuple[str, int] | None = None):
        super().__init__()
        self.rows, self.row, self.keep, self.kept = rows, row, keep, None
        self.calls: list[Call] = []
        self._counts, self._frames = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        begun = self._begin(f"torch:ops.{func}", args, kwargs)
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

    def _begin(self, path: str, args, kwargs) -> tuple:
        count = self._counts[path]
        self._counts[path] += 1
        if (path, count) == self.keep:
            self.kept = {"args": clone(args), "kwargs": clone(kwargs), "rows": self.rows, "row": self.row}
        return path, count, self._row(hashes((args, kwargs), self.rows))

    def _end(self, begun: tuple, args, kwargs, result) -> None:
        path, count, before = begun
        after = self._row(hashes((args, kwargs), self.rows))
        given = frozenset(before[tensor] for tensor in before if before[tensor] == after.get(tensor))
        if given:
            made = self._row(result_hashes(result, (args, kwargs), self.rows))
            self.calls.append(Call(path, count, given, frozenset(made.values()) - given))

    def _row(self, found: dict[str, torch.Tensor]) -> dict[str, int]:
        return {tensor: int(hashed[self.row]) for tensor, hashed in found.items()}


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


def _inside(function, call: dict, keep: tuple[str, int] | None = None) -> _Watch:
    watch = _Watch(call["rows"], call["row"], keep)
    args, kwargs = clone((call["args"], call["kwargs"]))
    with torch.no_grad(), watch.profiled():
        function(*args, **kwargs)
    return watch


def _pairs(left: list[Call], right: list[Call], ends: tuple[frozenset, frozenset]):
    """Candidates, the likeliest first: calls that both arms make, then those that made what the site returned (`ends`),
    or what a call that both arms make last was given otherwise."""
    both = [(one, two) for one in left for two in right if (one.path, one.count) == (two.path, two.count)]
    yield from ((one, two) for one, two in both if one.given == two.given and one.made != two.made)
    waiting, known = [ends], set()
    while waiting:
        ends = waiting.pop(0)
        known.add(ends)
        yield from ((one, two) for one in left for two in right
                    if one.given == two.given and one.made & ends[0] and two.made & ends[1])
        for one, two in both:
            apart = one.given - two.given, two.given - one.given
            if one.made & ends[0] and two.made & ends[1] and len(apart[0]) == len(apart[1]) == 1 and apart not in known:
                waiting.append(apart)


def pair(function, left: dict, right: dict) -> dict | None:
    """The two calls, each with the "path" of its function, or None if there are none within the site. left, right: two
    calls of `function` whose row has equal inputs and other outputs, as prove.repro.reduce returns them."""
    try:
        watched = [_inside(function, call) for call in (left, right)]
        outer = [row_bits(function, call) for call in (left, right)]
        ends = tuple(frozenset(bits[tensor] for tensor in changed(*outer)) for bits in outer)
        for calls in _pairs(*(watch.calls for watch in watched), ends):
            inner = [_inside(function, call, keep=(found.path, found.count)).kept | {"path": found.path}
                     for call, found in zip((left, right), calls, strict=True)]
            if {call["path"] for call in inner} == {left["path"]}:
                return None  # the site itself
            if changed(*(row_bits(resolve(call["path"])[2], call) for call in inner)):
                return dict(zip(("left", "right"), inner, strict=True))
    except Exception as error:  # noqa: BLE001 - what is inside an operator can object to being watched in any way
        print(f"not looked into: {type(error).__name__}: {error}", flush=True)
    return None
