"""Turns a captured call into a file of its own that shows the difference without an engine.

Two forms are tried, the smaller first. "alone": one arm's arguments suffice, because the row's bits change when the
call is given that row alone; the rows beside it are then halved away while the difference stays. "arms": the two arms'
arguments are replayed as they were, and the row compared; only for a call whose inputs agree, as any call has other
outputs for other inputs. What differs in neither form depends on state outside its arguments, and no file is written.

Files are written for the two calls inside the site that made the difference (prove/leaf.py) and for the site itself,
each first with what it imports cut down: of the packages on the way to a module only the module. The first that shows
the difference in a process of its own is kept.
"""
from __future__ import annotations

import pathlib
import pickletools
import re
import subprocess
import sys
import time
import zipfile

import torch

from prove.trace import by_rows, clone, hashes, mapped, resolve, result_hashes

LARGEST = 512 << 20  # bytes of a file; above it loading alone would take seconds, and something is in it by mistake
PATIENCE = 120.0     # seconds for a file that should take under ten, and its imports

SCRIPT = '''"""{title}

Run it with the engine's packages on PYTHONPATH; exit 1 and the words that differ, or exit 0.
"""
import contextlib
import importlib
import importlib.util
import os
import pathlib
import sys
import time

BEGAN = time.perf_counter()
os.environ.update({env!r})
import torch

for name in {bare!r}:  # packages without their __init__, which would import the whole engine
    sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], sys.modules[name])
for name in {modules!r}:  # which the data and the calls need
    with contextlib.suppress(ImportError):  # some cannot be imported first; then the load does it
        importlib.import_module(name)
IMPORTED = time.perf_counter()
DATA = torch.load(pathlib.Path(__file__).with_name({data!r}), weights_only=False)


def function(path):
    if path is None:
        return DATA["module"]
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def tensors(value, place=()):
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(item, (*place, key))


def row_in(values, call, longer):
    """Bytes of the row in every tensor that has one, by the tensor's place and the shape of its rows."""
    found = {{}}
    for place, value in tensors(values):
        if isinstance(value, torch.nn.Parameter) or value.dim() == 0 or value.numel() == 0:
            continue
        if value.shape[0] == call["rows"] or (longer and value.shape[0] > call["rows"]):
            row = value[call["row"]]
        elif value.dim() > 1 and value.shape[1] == call["rows"]:
            row = value[:, call["row"]]
        else:
            continue
        found[place, tuple(row.shape)] = row.clone().contiguous().reshape(-1).view(torch.uint8).cpu()
    return found


def row_of(call):
    """The row in everything the call returns, or, if it returns nothing, in what it wrote to."""
    args, kwargs = call["args"], call["kwargs"]
    given = row_in((args, kwargs), call, False)
    result = function(call["path"])(*args, **kwargs)
    left = row_in((args, kwargs), call, False)
    written = {{name: row for name, row in left.items() if not torch.equal(row, given[name])}}
    return row_in(result, call, False) or row_in(result, call, True) or written


with torch.no_grad():
    for path in {setup!r}:  # what the engine's process had called by then
        function(path)()
    left, right = row_of(DATA["left"]), row_of(DATA["right"])
for side in ("left", "right"):
    print(f"{{side}}: row {{DATA[side]['row']}} of {{DATA[side]['rows']}}, {{DATA[side]['path'] or DATA['site']}}")
both = [name for name in left if name in right]
if not both:
    sys.exit("the two calls return nothing that can be compared")
left, right = (torch.cat([side[name] for name in both]) for side in (left, right))
where = (left != right).nonzero().flatten()
print(f"seconds: {{IMPORTED - BEGAN:.1f}} for imports, {{time.perf_counter() - IMPORTED:.1f}} after them")
if not len(where):
    print("equal:", left.numel(), "bytes")
    sys.exit(0)
print(f"differ: {{len(where)}} of {{left.numel()}} bytes, first at byte {{int(where[0])}}: "
      f"{{int(left[where[0]])}} and {{int(right[where[0]])}}")
sys.exit(1)
'''


def take(value, rows: int, start: int, stop: int):
    """A nest of arguments with only rows [start, stop) of every row tensor."""
    def cut(tensor):
        aligned = by_rows(tensor, rows)
        if aligned is None:
            return tensor
        part = aligned[start:stop].clone()
        return part if tensor.shape[0] == rows else part.movedim(0, 1).contiguous()
    return mapped(value, cut)


def call_of(held: dict, row: int, start: int = 0, stop: int | None = None) -> dict:
    stop = held["rows"] if stop is None else stop
    args, kwargs = (take(held[name], held["rows"], start, stop) for name in ("args", "kwargs"))
    return {"path": held["path"], "args": args, "kwargs": kwargs, "rows": stop - start, "row": row - start}


def row_bits(function, call: dict) -> dict[str, int] | None:
    """The hashes of one row of a call's result; None if the call cannot be made."""
    copy = clone((call["args"], call["kwargs"]))  # of a state too: the next replay has to begin with the same
    try:
        with torch.no_grad():
            given = hashes(copy, call["rows"])
            found = result_hashes(function(*copy[0], **copy[1]), copy, call["rows"])
        return {tensor: int(hashed[call["row"]]) for tensor, hashed in found.items()
                if tensor not in given or not torch.equal(given[tensor], hashed)}
    except Exception as error:  # noqa: BLE001 - many kernels take no cut arguments, each says so in its own way
        print(f"no replay of {call['rows']} rows: {type(error).__name__}: {error}", flush=True)
        return None


def changed(one: dict[str, int] | None, other: dict[str, int] | None) -> set[str]:
    """The tensors that two calls both made, and made differently."""
    return {tensor for tensor in one.keys() & other.keys() if one[tensor] != other[tensor]} if one and other else set()


def reduce(function, left: dict, right: dict) -> dict | None:
    """The smallest pair of calls that still differ, or None. The caller has seen that the row's inputs agree."""
    for held in (right, left):
        row = held["row"]
        single = call_of(held, row, row, row + 1)
        alone, start, stop = row_bits(function, single), 0, held["rows"]
        if not changed(alone, row_bits(function, call_of(held, row))):
            continue
        while stop - start > 2:  # halve the neighbours away, from the end and then from the front
            middle = (start + stop + 1) // 2
            part = next(((a, b) for a, b in ((start, middle), (middle, stop))
                         if a <= row < b and changed(alone, row_bits(function, call_of(held, row, a, b)))), None)
            if part is None:
                break
            start, stop = part
        return {"form": "alone", "left": call_of(held, row, start, stop), "right": single}
    one, two = (call_of(held, held["row"]) for held in (left, right))
    if changed(row_bits(function, one), row_bits(function, two)):
        return {"form": "arms", "left": one, "right": two}
    return None


def _plain(value):
    """The same with bare parameters, as an engine's carry their loaders and with them the whole model, and with tensors
    of its own: what the file's first call writes to, a state, is none of its second's."""
    seen: dict[int, torch.nn.Parameter] = {}

    def bare(tensor):
        if isinstance(tensor, torch.nn.Parameter):
            return seen.setdefault(id(tensor), torch.nn.Parameter(tensor.data.clone(), requires_grad=False))
        # One too large for the file is refused as it is written, and needs no copy.
        return tensor.detach().clone() if tensor.numel() * tensor.element_size() <= LARGEST else tensor
    return mapped(value, bare)


class _Bounded:
    """A file that ends its writer when that becomes too long."""

    def __init__(self, path: pathlib.Path):
        self.file, self.length = path.open("wb"), 0

    def write(self, data) -> int:
        self.length += len(data)
        if self.length > LARGEST:
            raise ValueError(f"its arguments take more than {LARGEST >> 20} MiB")
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(folder: pathlib.Path, name: str, site: str, module, pair: dict) -> pathlib.Path:
    """<name>.pt: two calls, each with the "path" of its function, or None for the module that is saved with them."""
    folder.mkdir(parents=True, exist_ok=True)
    calls, data = _plain({side: pair[side] for side in ("left", "right")}), folder / f"{name}.pt"
    bounded = _Bounded(data)
    try:
        torch.save({"site": site, "module": module, **calls}, bounded)
    except BaseException:
        data.unlink()
        raise
    finally:
        bounded.file.close()
    return data


def scripts(data: pathlib.Path, title: str, pair: dict, env: dict[str, str], setup: tuple[str, ...] = ()) -> list[str]:
    """The names of the files that replay the saved calls, the one that imports less first. env: what the process has to
    see; setup: paths of functions that it has to call before."""
    paths = {*setup, *(pair[side]["path"] for side in ("left", "right"))} - {None}
    needed = _modules(data, paths)
    packages = {name.rsplit(".", depth)[0] for name in needed for depth in range(1, name.count(".") + 1)}
    bare = sorted(name for name in packages - set(needed) if name.partition(".")[0] != "torch")
    written = []
    for without in (bare, []) if bare else ([],):
        script = data.with_name(f"{data.stem}{'-bare' if without else ''}.py")
        script.write_text(SCRIPT.format(title=title, env=env, bare=without, modules=needed, data=data.name,
                                        setup=setup))
        written.append(script.name)
    return written


def _modules(data: pathlib.Path, paths: set[str]) -> list[str]:
    """What loading the arguments imports, and where the functions are found by their paths."""
    with zipfile.ZipFile(data) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    named = {argument.split(" ")[0] for op, argument, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}
    named |= {module for path in paths for module in (path.partition(":")[0], *_registering(path))}
    return sorted(named & sys.modules.keys())  # a pickle calls builtins by the name they had in Python 2


def _registering(path: str) -> set[str]:
    """The extensions that register "torch:ops.NAMESPACE.name": they are named as their namespace begins."""
    namespace = path.split(".")[1] if path.startswith("torch:ops.") else None
    return {name for name, module in list(sys.modules.items()) if namespace and (
        name.rpartition(".")[2].startswith(namespace) and (getattr(module, "__file__", None) or "").endswith(".so"))}


def run(script: pathlib.Path, env: dict[str, str]) -> dict:
    """What the file says in a process of its own, and how long that takes: all of it, its imports, what comes after."""
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False,
                              timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"script": script.name, "shown": False, "seconds": PATIENCE, "import_seconds": None,
                "run_seconds": None, "said": f"not done after {PATIENCE:.0f} s"}
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    parts = re.search(r"^seconds: ([\d.]+) for imports, ([\d.]+) after them$", done.stdout, re.MULTILINE)
    imports, after = map(float, parts.groups()) if parts else (None, None)
    return {"script": script.name, "shown": done.returncode == 1 and "\ndiffer: " in done.stdout,
            "exit": done.returncode, "seconds": round(time.monotonic() - started, 1), "import_seconds": imports,
            "run_seconds": after, "said": said[-1] if said else ""}


def settle(folder: pathlib.Path, names: list[str], env: dict[str, str]) -> tuple[dict, list[dict]]:
    """Runs the files in turn until one shows the difference: what that one said, and the ones before it, which go, as
    do those after it. If none does, the last stays."""
    tried = []
    for name in names:
        tried.append(run(folder / name, env))
        if tried[-1]["shown"]:
            break
    kept = tried[-1]["script"]
    for name in set(names) - {kept}:
        (folder / name).unlink()
    for data in {_data_of(folder / name) for name in names} - {_data_of(folder / kept)}:
        data.unlink()
    return tried[-1], tried[:-1]


def _data_of(script: pathlib.Path) -> pathlib.Path:
    """A site may itself end in "-bare": then the data has the script's whole name."""
    own = script.with_suffix(".pt")
    return own if own.exists() else script.with_name(script.stem.removesuffix("-bare") + ".pt")


def function_of(held: dict, model: torch.nn.Module):
    """What a captured call called, and the module to save with it (None for a function found by its path)."""
    if held["path"] is not None:
        return resolve(held["path"])[2], None
    module = model.get_submodule(held["site"])
    return module, module
