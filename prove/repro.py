"""Turns a captured call into a file of its own that shows the difference without an engine.

Two forms are tried, the smaller first. "alone": one arm's arguments suffice, because the row's bits change when the
call is given that row alone; the rows beside it are then halved away while the difference stays. "arms": the two arms'
arguments are replayed as they were, and the row compared. What differs in neither form depends on state outside its
arguments, and no file is written.
"""
from __future__ import annotations

import pathlib

import torch

from prove.trace import by_rows, combined, resolve

SCRIPT = '''"""{title}

Run it with the engine's packages on PYTHONPATH; exit 1 and the words that differ, or exit 0.
"""
import pathlib
import sys

import torch

DATA = torch.load(pathlib.Path(__file__).with_suffix(".pt"), weights_only=False)


def target():
    if DATA["module"] is not None:
        return DATA["module"]
    import importlib

    module, _, names = DATA["path"].partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def row_of(call):
    """Bytes of one row of everything the call returns, or, if it returns nothing, of what it wrote to."""
    args, kwargs = call["args"], call["kwargs"]
    result = target()(*args, **kwargs)
    found, todo = [], [result if result is not None else [args, kwargs]]
    while todo:
        value = todo.pop(0)
        if isinstance(value, torch.Tensor):
            dims = [d for d in (0, 1) if value.dim() > d and value.shape[d] == call["rows"]]
            if dims and not isinstance(value, torch.nn.Parameter):
                found.append(value.movedim(dims[0], 0)[call["row"]].contiguous().reshape(-1).view(torch.uint8).cpu())
        elif isinstance(value, (list, tuple)):
            todo = list(value) + todo
        elif isinstance(value, dict):
            todo = list(value.values()) + todo
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.uint8)


with torch.no_grad():
    left, right = row_of(DATA["left"]), row_of(DATA["right"])
print(DATA["site"], "row", DATA["left"]["row"], "of", DATA["left"]["rows"], "against row", DATA["right"]["row"], "of",
      DATA["right"]["rows"])
if left.shape == right.shape and torch.equal(left, right):
    print("equal:", left.numel(), "bytes")
    sys.exit(0)
where = (left != right).nonzero().flatten() if left.shape == right.shape else None
print("differ:", "shapes" if where is None else
      f"{{where.numel()}} of {{left.numel()}} bytes, first at byte {{int(where[0])}}: "
      f"{{int(left[where[0]])}} and {{int(right[where[0]])}}")
sys.exit(1)
'''


def take(value, rows: int, start: int, stop: int):
    """A nest of arguments with only rows [start, stop) of every row tensor."""
    if isinstance(value, torch.Tensor):
        aligned = by_rows(value, rows)
        if aligned is None:
            return value
        cut = aligned[start:stop].clone()
        return cut if value.shape[0] == rows else cut.movedim(0, 1).contiguous()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(take(item, rows, start, stop) for item in value)
    if type(value) is dict:
        return {key: take(item, rows, start, stop) for key, item in value.items()}
    return value


def call_of(held: dict, row: int, start: int = 0, stop: int | None = None) -> dict:
    stop = held["rows"] if stop is None else stop
    args, kwargs = (take(held[name], held["rows"], start, stop) for name in ("args", "kwargs"))
    return {"args": args, "kwargs": kwargs, "rows": stop - start, "row": row - start}


def row_bits(function, call: dict):
    """The hash of one row of a call's result; None if the call cannot be made."""
    copy = take((call["args"], call["kwargs"]), call["rows"], 0, call["rows"])
    try:
        with torch.no_grad():
            result = function(*copy[0], **copy[1])
        hashed = combined(result, call["rows"])
        hashed = combined(copy, call["rows"]) if hashed is None else hashed
        return None if hashed is None else int(hashed[call["row"]])
    except (RuntimeError, ValueError, AssertionError, IndexError, TypeError, KeyError):
        return None  # many kernels take no cut arguments; the form is then not available


def reduce(function, left: dict, left_row: int, right: dict, right_row: int) -> dict | None:
    """The smallest pair of calls that still differ, or None."""
    for held, row in ((right, right_row), (left, left_row)):
        single = call_of(held, row, row, row + 1)
        alone, start, stop = row_bits(function, single), 0, held["rows"]
        if alone is None or row_bits(function, call_of(held, row)) in (None, alone):
            continue
        while stop - start > 2:  # halve the neighbours away, from the end and then from the front
            middle = (start + stop + 1) // 2
            part = next(((a, b) for a, b in ((start, middle), (middle, stop))
                         if a <= row < b and row_bits(function, call_of(held, row, a, b)) not in (None, alone)), None)
            if part is None:
                break
            start, stop = part
        return {"form": "alone", "left": call_of(held, row, start, stop), "right": single}
    one, two = call_of(left, left_row), call_of(right, right_row)
    bits = row_bits(function, one), row_bits(function, two)
    return {"form": "arms", "left": one, "right": two} if None not in bits and bits[0] != bits[1] else None


def write(folder: pathlib.Path, name: str, site: str, path: str | None, module, pair: dict) -> pathlib.Path:
    """<name>.py and <name>.pt: the script and the arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    torch.save({"site": site, "path": path, "module": module, "left": pair["left"], "right": pair["right"]},
               script.with_suffix(".pt"))
    script.write_text(SCRIPT.format(title=f"{site}: the same row, other bits ({pair['form']})."))
    return script


def function_of(held: dict, model: torch.nn.Module):
    """What a captured call called, and the module to save with it (None for a function found by its path)."""
    if held["path"] is not None:
        return resolve(held["path"])[2], None
    module = model.get_submodule(held["site"])
    return module, module
