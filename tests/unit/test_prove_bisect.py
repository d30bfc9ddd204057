"""Bisecting on a small torch model with a planted fault: the right operator is named, and its repro runs by itself."""
import json
import os
import pathlib
import resource
import subprocess
import sys
import types

import numpy as np
import pytest
from written_module import written_module

import torch

from prove import bisect, recipe, record, repro, tail, trace, ui, workload
from prove.engine import EngineError, pack
from prove.rollout import Answers

FAKE = str(pathlib.Path(__file__).with_name("bisect_fake.py"))

PLANTED = """
import torch

def mix(x, weight):
    '''x: [T, 8]. Above 4 rows the sum over K is made in two parts: other bits for the same row.'''
    if x.shape[0] > 4:
        return x[:, :4] @ weight[:, :4].T + x[:, 4:] @ weight[:, 4:].T
    return (x[:, None, :] * weight[None]).sum(-1)

def scale(x, out):
    out.copy_(x * 3)

def scores(tokens, hidden, logits_of, count):
    '''In chunks, as prompts are scored.'''
    words = [logits_of(hidden[at:at + 100]).sum(-1, keepdim=True) for at in range(0, len(hidden), 100)]
    return tokens[:, None], torch.cat(words), None
"""


@pytest.fixture
def ops(tmp_path, monkeypatch):
    return written_module(tmp_path, monkeypatch, "planted_ops", PLANTED)


class Layer(torch.nn.Module):
    def __init__(self, ops, planted):
        super().__init__()
        self.norm, self.ops, self.planted = torch.nn.LayerNorm(8), ops, planted
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = self.norm(x)
        y = self.ops.mix(y, self.weight) if self.planted else (y[:, None] * self.weight[None]).sum(-1)
        out = torch.empty_like(y)
        self.ops.scale(y, out)
        return x + out


class Model(torch.nn.Module):
    def __init__(self, ops, planted=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer(ops, False), Layer(ops, planted), Layer(ops, False)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


FUNCTIONS = ["planted_ops:mix", "planted_ops:scale", "planted_ops:gone"]
ROWS = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))


def traced(model, batches, keep=None):
    """Runs the rows in the given batches; row i is position i of request "r"."""
    tracer = trace.Tracer(model, FUNCTIONS, keep=keep)
    with torch.no_grad(), tracer.installed():
        for start, stop in batches:
            tracer.begin(stop - start)
            model(ROWS[start:stop])
            tracer.end([("r", i) for i in range(start, stop)], lambda key: key[1] <= 7)
    return tracer


def write(folder, name, site, module, pair, **more):
    """The script, of what imports nothing whose packages could be left bare."""
    (script,) = repro.scripts(repro.save(folder, name, site, module, pair), site, pair, **{"env": {}, **more})
    return folder / script


BATCHED, ALONE = [(0, 9)], [(i, i + 1) for i in range(9)]


def test_the_planted_operator_is_named(ops):
    model = Model(ops)
    left, right = traced(model, BATCHED), traced(model, ALONE)
    found = trace.first_difference(left.sites, right.sites)
    assert found["site"] == "layers.1/mix#0" and found["inputs_agree"] and found["last_agreeing"] == "layers.1.norm"
    assert found["rows_compared"] == 8  # position 8 was not wanted
    assert left.missing and "gone" in left.missing[0]


def test_a_consistent_model_shows_no_difference(ops):
    model = Model(ops, planted=False)
    assert trace.first_difference(traced(model, BATCHED).sites, traced(model, ALONE).sites) is None


def test_watching_leaves_no_hook_and_no_patch_behind(ops):
    model, before = Model(ops), ops.mix
    traced(model, BATCHED)
    assert ops.mix is before and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_call_that_returns_nothing_is_hashed_by_what_it_wrote(ops):
    sites = traced(Model(ops), BATCHED).sites
    site = sites["layers.0/scale#0"]
    assert site["written"] == {"argument 1 [8]"} and len(set(site["out"]["argument 1 [8]"].values())) == 8


def test_what_lies_in_a_buffer_before_it_is_written_is_no_input(ops):
    """The arms' output buffers hold whatever was there; the call that fills them was still given equal inputs."""
    def site(garbage, result):
        rows = {("r", 0): garbage}, {("r", 0): result}
        return {"f": {"in": {"argument 0 [8]": {("r", 0): 5}, "argument 1 [8]": rows[0]},
                      "out": {"argument 0 [8]": {("r", 0): 5}, "argument 1 [8]": rows[1]},
                      "written": {"argument 1 [8]"}}}
    assert trace.first_difference(site(1, 7), site(2, 7)) is None
    assert trace.first_difference(site(1, 7), site(2, 8))["inputs_agree"]


def test_a_scale_that_looks_like_a_row_is_no_difference():
    """In a step of one token a tensor of shape [1, 3] has as many rows as the step; in the other arm it has not."""
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, x):
            self.inner((x, torch.full((1, 3), float(len(x)))))
            return x
    model = torch.nn.Sequential(Scaled())
    assert trace.first_difference(traced(model, BATCHED).sites, traced(model, ALONE).sites) is None


class Asked(torch.nn.Module):
    """A module around one call, whose arguments `given` makes of the rows; the call adds up all that it gets."""

    def __init__(self, given):
        super().__init__()
        self.given, self.inner = given, Adder()

    def forward(self, x):
        self.inner(*self.given(x))
        return x


class Adder(torch.nn.Module):
    def forward(self, *given):
        flat = given[0] if isinstance(given[0], tuple) else given[0].values() if isinstance(given[0], dict) else given
        return sum(tensor * (place + 1) for place, tensor in enumerate(flat) if tensor is not None)


@pytest.mark.parametrize("left, right", [
    (lambda x: (x, None), lambda x: (x, x)),                      # one arm has a tensor that the other has not
    (lambda x: (x, None, 2 * x), lambda x: (x, 2 * x, 3 * x)),    # and the next would take its name
    (lambda x: ((x, None, 2 * x),), lambda x: ((x, 2 * x, 3 * x),)),
    (lambda x: ((x, None),), lambda x: ((x, x),)),                # within a tuple or a dict nobody's name moves
    (lambda x: ({"x": x, "bias": None},), lambda x: ({"x": x, "bias": x},)),
    (lambda x: ({"x": x},), lambda x: ({"x": x, "bias": x},))])
def test_arguments_are_not_equal_because_an_optional_one_moved_them(left, right):
    arms = [traced(torch.nn.Sequential(Asked(given)), BATCHED).sites for given in (left, right)]
    found = trace.first_difference(*arms)
    assert found["site"] == "0.inner" and not found["inputs_agree"] and not found["made_here"]


def test_a_list_as_long_as_the_batch_is_no_other_argument():
    one, other = (trace._given((ROWS, [3] * count), {}, 2) for count in (1, 9))
    assert torch.equal(one, other)


def test_arguments_that_both_arms_leave_out_are_equal():
    arms = [traced(torch.nn.Sequential(Asked(lambda x: (x, None, x))), BATCHED).sites for _ in range(2)]
    for made in arms[1]["0.inner"]["out"].values():
        made[("r", 3)] += 1
    found = trace.first_difference(*arms)
    assert found["inputs_agree"] and found["made_here"] == [{"site": "0.inner", "key": ["r", 3]}]


def test_a_call_without_a_row_among_its_arguments_has_no_equal_inputs():
    arms = [traced(torch.nn.Sequential(Asked(lambda x: (x[:0], None))), BATCHED).sites for _ in range(2)]
    arms[0]["0.inner"], arms[1]["0.inner"] = ({"in": each["0.inner"]["in"], "out": {"r": {("r", 3): at}},
                                               "written": {"r"}} for at, each in enumerate(arms))
    found = trace.first_difference(*arms)
    assert found["site"] == "0.inner" and not found["inputs_agree"]


def test_a_step_that_is_not_the_batch_read_is_refused(ops):
    tracer = trace.Tracer(Model(ops))
    tracer.begin(3)
    with pytest.raises(RuntimeError, match="a step of 3 tokens was read as 2 rows"):
        tracer.end([("r", 0), ("r", 1)], lambda key: True)


def test_a_row_that_begins_anywhere_is_hashed():
    flat = torch.arange(32, dtype=torch.uint8)
    assert torch.equal(trace.row_hash(flat[1:9].reshape(1, 8), 1), trace.row_hash(flat[1:9].clone().reshape(1, 8), 1))
    assert trace.hashes((torch.zeros(4, 0), torch.zeros(4, trace.WIDEST + 1, dtype=torch.uint8)), 4) == {}


def test_row_hash_sees_one_bit_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        one = torch.ones(3, 5).to(dtype)
        two = one.clone()
        two.view(torch.uint8)[1, -1] ^= 1
        differs = trace.row_hash(one, 3) != trace.row_hash(two, 3)
        assert differs.tolist() == [False, True, False], dtype


def test_row_hash_is_the_same_in_any_batch():
    x = torch.randn(3000, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(trace.row_hash(x, 3000)[2500:2600], trace.row_hash(x[2500:2600], 100))


def test_the_repro_runs_by_itself_and_shows_the_difference(ops, tmp_path):
    model = Model(ops)
    site, keep = "layers.1/mix#0", {"layers.1/mix#0": ("r", 3)}
    left, right = (traced(model, batches, keep).kept[site] for batches in (BATCHED, ALONE))
    function, module = repro.function_of(left, model)
    assert function is ops.mix and module is None
    pair = repro.reduce(function, left, right)
    assert pair["form"] == "alone" and pair["left"]["rows"] == 5 and pair["right"]["rows"] == 1  # 9 rows halved to 5
    script = write(tmp_path / "out", "repro", left["site"], module, pair)
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 1 and "differ:" in done.stdout, done.stdout + done.stderr
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - started.ru_utime - started.ru_stime < 10  # not the clock: CI is crowded
    (tmp_path / "planted_ops.py").write_text(PLANTED.replace("> 4", "> 400"))  # the operator repaired
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 0 and "equal:" in done.stdout, done.stdout + done.stderr


def test_a_module_is_saved_with_its_repro(ops, tmp_path):
    class Doubler(torch.nn.Module):  # bits depend on the row's place: replayed arms differ, cut rows do not
        def forward(self, x):
            return x + torch.arange(len(x))[:, None]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Hardtanh(), Doubler())
    left = {"site": "2", "path": None, "rows": 4, "row": 3, "args": (ROWS[:4],), "kwargs": {}}
    right = {"site": "2", "path": None, "rows": 4, "row": 1, "args": (ROWS[2:6],), "kwargs": {}}
    function, module = repro.function_of(left, model)
    assert module is model[2]
    pair = repro.reduce(function, left, right)
    assert pair["form"] == "alone"


def test_a_call_that_replays_equal_gives_no_repro():
    state = iter(range(100))
    held = {"site": "f", "path": "m:f", "rows": 1, "row": 0, "args": (torch.zeros(1, 2),), "kwargs": {}}
    assert repro.reduce(lambda x: x + 0 * next(state), held, held) is None


def test_a_state_that_a_call_changes_is_no_effect_of_the_rows_beside_it():
    """Every replay begins with the state that was captured; else the second would differ from the first."""
    def counted(x, state):
        made = x + state.sum()
        state.add_(1)
        return made
    held = {"site": "s", "path": None, "args": (torch.ones(4, 2), torch.zeros(3)), "kwargs": {}, "rows": 4, "row": 1}
    assert repro.reduce(counted, held, held) is None
    assert not held["args"][1].any()


def test_a_repro_starts_where_equal_inputs_became_other_outputs():
    """Not in a call that was given other inputs, and not in the module around the call that made the difference."""
    def site(given, made):
        return {"in": {"argument 0 [8]": {("r", i): x for i, x in enumerate(given)}},
                "out": {"result 0 [8]": {("r", i): x for i, x in enumerate(made)}}, "written": {"result 0 [8]"}}
    left = {"a/f#0": site([1, 2], [3, 4]), "a": site([1, 2], [3, 4]), "b": site([3, 4], [5, 6]),
            "c": site([5, 6], [7, 8])}
    right = {"a/f#0": site([1, 2], [3, 9]), "a": site([1, 2], [3, 9]), "b": site([3, 9], [5, 9]),
             "c": site([5, 9], [9, 9])}
    found = trace.first_difference(left, right)
    assert found["site"] == "a/f#0" and found["inputs_agree"]
    assert found["made_here"] == [{"site": "a/f#0", "key": ["r", 1]}, {"site": "c", "key": ["r", 0]}]


def test_a_parameter_is_saved_without_what_the_engine_hung_on_it(tmp_path):
    """vLLM's parameters carry their loaders, bound methods of layers: pickled, they would be the whole model."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    weight.weight_loader = lambda: None  # cannot be pickled at all
    call = {"path": "torch.nn.functional:linear", "args": (torch.randn(1, 8), weight), "kwargs": {}, "rows": 1,
            "row": 0}
    script = write(tmp_path, "r", "f", None, {"left": call, "right": call})
    kept = torch.load(script.with_suffix(".pt"), weights_only=False)["left"]["args"][1]
    assert isinstance(kept, torch.nn.Parameter) and torch.equal(kept, weight)
    said = repro.run(script, dict(os.environ))
    assert not said["shown"] and said["exit"] == 0 and said["said"].startswith("equal:"), said


SLOW = """
import time

import torch

time.sleep(1.5)

class Doubler(torch.nn.Module):
    def forward(self, x):
        return x + torch.arange(len(x))[:, None]

def double(x):
    return x + torch.arange(len(x))[:, None]
"""


@pytest.mark.parametrize("as_module", [True, False])
def test_what_a_file_imports_is_timed_apart_from_what_it_does(as_module, tmp_path, monkeypatch):
    """A module's class is imported by loading it, a function's by its path: neither counts for the file's own time."""
    slow_to_import = written_module(tmp_path, monkeypatch, "slow_to_import", SLOW)
    call = {"path": None if as_module else "slow_to_import:double", "args": (torch.zeros(2, 4),), "kwargs": {},
            "rows": 2}
    pair = {"left": call | {"row": 0}, "right": call | {"row": 1}}
    script = write(tmp_path / "out", "r", "f", slow_to_import.Doubler() if as_module else None, pair)
    said = repro.run(script, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert said["shown"], said
    assert said["import_seconds"] >= 1.5 and said["run_seconds"] < said["import_seconds"] <= said["seconds"], said
    assert "'slow_to_import'" in script.read_text()


def test_a_file_has_to_be_quick_with_its_imports():
    def shown(seconds, **ran):
        return bisect._shown({"repro": {"run": {"shown": True, "seconds": seconds, **ran}}})
    assert shown(9.9, import_seconds=7.0, run_seconds=2.0) and not shown(10.1, import_seconds=7.0, run_seconds=2.0)
    assert not bisect._shown({"repro": {"run": {"shown": False, "seconds": 2.0}}})
    assert not bisect._shown({"repro": {"form": None}}) and not bisect._shown(None)


def test_arguments_that_would_take_seconds_to_load_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(repro, "LARGEST", 1000)
    call = {"path": "torch:neg", "args": (torch.zeros(1, 4000),), "kwargs": {}, "rows": 1, "row": 0}
    with pytest.raises((ValueError, RuntimeError)):
        repro.save(tmp_path, "r", "f", None, {"left": call, "right": call})
    assert not list(tmp_path.iterdir())
    assert repro._plain(call["args"][0]) is call["args"][0]  # not copied first: a cache is too large


PREPARED = """
import os
print("imported with", os.environ.get("A_WORD"))
def call_first():
    print("prepared")
"""


def test_the_file_begins_with_what_it_has_to_do_first(tmp_path, monkeypatch):
    written_module(tmp_path, monkeypatch, "preparing", PREPARED)  # imported, as the engine has
    call = {"path": "torch:neg", "args": (torch.zeros(1, 4),), "kwargs": {}, "rows": 1, "row": 0}
    script = write(tmp_path, "r", "f", None, {"left": call, "right": call}, env={"A_WORD": "seen"},
                   setup=("preparing:call_first",))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and done.stdout.startswith("imported with seen\nprepared\n"), done.stdout + done.stderr


@pytest.fixture
def package(tmp_path, monkeypatch):
    """heavy/ops/kernel.py, in packages that print when they are imported as a whole."""
    folder = tmp_path / "heavy" / "ops"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        (place / "__init__.py").write_text("print('the whole package')\nFACTOR = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
        del sys.modules[name]


KERNEL = """
import torch
{imports}
def double(x):
    return x * FACTOR + torch.arange(len(x))[:, None]
"""


@pytest.mark.parametrize("imports, bare", [("FACTOR = 2", True), ("from heavy.ops import FACTOR", False)])
def test_a_file_imports_a_module_without_its_packages_where_that_is_enough(imports, bare, package, tmp_path):
    (package / "kernel.py").write_text(KERNEL.format(imports=imports))
    import heavy.ops.kernel  # noqa: F401 - as the engine has

    call = {"path": "heavy.ops.kernel:double", "args": (torch.zeros(2, 4),), "kwargs": {}, "rows": 2}
    pair = {"left": call | {"row": 0}, "right": call | {"row": 1}}
    names = repro.scripts(repro.save(tmp_path / "out", "r", "f", None, pair), "f", pair, {})
    assert names == ["r-bare.py", "r.py"]
    said, tried = repro.settle(tmp_path / "out", names, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert said["shown"] and said["script"] == names[0 if bare else 1], said
    assert [each["script"] for each in tried] == ([] if bare else ["r-bare.py"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"r.pt", said["script"]}


def test_of_several_files_the_first_that_shows_it_is_kept_or_else_the_last(tmp_path):
    call = {"path": "torch:neg", "args": (torch.zeros(1, 4),), "kwargs": {}, "rows": 1, "row": 0}
    same, other = {"left": call, "right": call}, {"left": call, "right": call | {"path": "torch:cos"}}

    def settled(**pairs):
        names = [write(tmp_path, name, "f", None, pair).name for name, pair in pairs.items()]
        said, tried = repro.settle(tmp_path, names, dict(os.environ))
        return said["script"], said["shown"], len(tried), {path.name for path in tmp_path.iterdir()}
    assert settled(a=same, b=other, c=other) == ("b.py", True, 1, {"b.py", "b.pt"})
    (tmp_path / "b.py").unlink()
    (tmp_path / "b.pt").unlink()
    assert settled(a=same, b=same) == ("b.py", False, 1, {"b.py", "b.pt"})


def test_a_site_that_is_named_bare_has_data_of_its_own(tmp_path):
    call = {"path": "torch:neg", "args": (torch.zeros(1, 4),), "kwargs": {}, "rows": 1, "row": 0}
    same, other = {"left": call, "right": call}, {"left": call, "right": call | {"path": "torch:cos"}}
    names = [write(tmp_path, name, "f", None, pair).name for name, pair in (("site-bare", same), ("other", other))]
    said, _ = repro.settle(tmp_path, names, dict(os.environ))
    assert said["shown"] and {path.name for path in tmp_path.iterdir()} == {"other.py", "other.pt"}


WRITING = """
def first(x, out):
    out.copy_(x + 1)

def second(out, x):
    out.copy_(x + MORE)

def counted(x, state):
    made = x + state.sum()
    state.add_(1)
    return made
"""


@pytest.mark.parametrize("more,code", [(1, 0), (2, 1)])
def test_a_file_compares_what_the_calls_wrote_and_not_what_stands_in_its_place(more, code, tmp_path, monkeypatch):
    (tmp_path / "writing_ops.py").write_text(WRITING.replace("MORE", str(more)))
    call = {"args": [], "kwargs": {"x": torch.ones(2, 4), "out": torch.zeros(2, 4)}, "rows": 2, "row": 1}
    swapped = {"kwargs": dict(reversed(call["kwargs"].items()))}
    pair = {"left": call | {"path": "writing_ops:first"}, "right": call | swapped | {"path": "writing_ops:second"}}
    script = write(tmp_path / "out", "r", "f", None, pair)
    said = repro.run(script, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert said["exit"] == code and said["said"].startswith(("equal: 16", "differ: ")[code]), said


def test_the_second_call_of_a_file_begins_with_the_state_of_the_first(tmp_path):
    (tmp_path / "writing_ops.py").write_text(WRITING)
    call = {"path": "writing_ops:counted", "args": (torch.ones(2, 4), torch.zeros(3)), "kwargs": {}, "rows": 2,
            "row": 1}
    script = write(tmp_path / "out", "r", "f", None, {"left": call, "right": call})
    said = repro.run(script, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert said["exit"] == 0 and said["said"].startswith("equal: "), said


def test_the_earliest_parting_request_comes_first():
    requests = workload.build(100, 97).requests[:3]
    work = workload.Workload(requests, 97)

    def answers(flips):
        return Answers({r.id: {"tokens": pack(np.zeros(4, np.int64)),
                               "words": pack(np.asarray([flips.get((r.id, i), 1) for i in range(4)], np.uint32))}
                        for r in requests})
    base = answers({})
    assert bisect.differing(work, base, base)[1] == {}
    other = answers({("r000", 0): 9, ("r002", 3): 9})
    figures, watch = bisect.differing(work, base, other)
    assert figures.differing_words == 2
    assert list(watch.items()) == [("r002", 3), ("r000", 149)]  # r002's prompt has one token, r000's has 150


def test_as_many_requests_are_followed_as_fit_and_at_least_one(monkeypatch):
    requests = workload.build(100, 97).requests[:3]
    work = workload.Workload(requests, 97)
    one, two = (Answers({r.id: {"tokens": pack(np.zeros(4, np.int64)), "words": pack(np.full(4, word, np.uint32))}
                         for r in requests}) for word in (1, 2))
    monkeypatch.setattr(bisect, "ROWS", 151)
    assert list(bisect.differing(work, one, two)[1]) == ["r002", "r000"]
    monkeypatch.setattr(bisect, "ROWS", 0)
    assert list(bisect.differing(work, one, two)[1]) == ["r002"]


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="no such arm: decoed"):
        bisect.bisect(None, None, arms=("decoed", "prefill"), tokens=1, invariant=True, out=None, logs=None, budget=1,
                      env={})


def test_a_run_against_itself_is_refused():
    with pytest.raises(ValueError, match="both decode: a run against itself shows nothing"):
        bisect.bisect(None, None, arms=("decode", "decode"), tokens=1, invariant=True, out=None, logs=None, budget=1,
                      env={})


def test_a_buffer_for_the_largest_step_counts_by_its_first_rows():
    buffer = torch.arange(40).reshape(20, 2)
    assert trace.hashes(buffer, 4) == {}
    assert torch.equal(trace.hashes(buffer, 4, longer=True)["argument 0 [2]"], trace.row_hash(buffer[:4], 4))


@pytest.fixture
def command(ops, tmp_path, monkeypatch):
    """Runs `prove bisect` on the fake engine, in real processes; `state` is what the tree that ran is to the lock."""
    def go(arms=("decode", "decode-alone"), invariant=False, fault=None, functions=FUNCTIONS, state="locked"):
        monkeypatch.setattr(record, "bind", lambda folder: {"state": state, "entry": "e", "digest": "d"})
        monkeypatch.setattr(bisect, "QUICK", 1000.0)  # CI is crowded
        made = recipe.Recipe("fake", tmp_path, None, {"model": {"path": "m", "vocab": 97}, "engine": {"fault": fault},
                                                      "bisect": {"functions": functions}})
        return bisect.bisect(made, ui.UI(json_only=True), arms=arms, tokens=100, invariant=invariant, out=tmp_path,
                             logs=tmp_path / "logs", budget=300.0, backend=FAKE,
                             env={"FAKE_SITE": str(tmp_path), "PYTHONPATH": str(tmp_path)})
    return go


def test_the_contrast_passes_when_the_operator_is_named_and_its_file_shows_it(command, tmp_path):
    data = command()
    found = data["finding"]
    assert found["site"] == "layers.1/mix#0" and found["inputs_agree"] and found["last_agreeing"] == "layers.1.norm"
    assert found["watched"]["r002"] == 0 and sum(found["watched"].values()) < bisect.ROWS
    assert found["repro"]["site"] == found["site"] and found["repro"]["form"] == "alone"
    assert found["repro"]["run"]["shown"] and found["repro"]["run"]["said"].startswith("differ: "), found["repro"]
    assert data["rows"][0]["state"] == "differs" and data["rows"][0]["differing_words"] > 0
    assert data["complete"] and data["passed"]
    assert json.loads((tmp_path / "bisect-contrast-fake.json").read_text()) == data


def test_a_difference_with_batch_invariance_on_is_found_and_does_not_pass(command, tmp_path):
    """Its file first makes of its process what the engine's was: here the module stands for vLLM's."""
    folder = tmp_path / "vllm" / "model_executor" / "determinism"
    folder.mkdir(parents=True)
    for package in list(folder.parents)[:2] + [folder]:
        (package / "__init__.py").touch()
    (folder / "batch_invariant.py").write_text("def init_batch_invariance():\n    print('made invariant')\n")
    data = command(("decode", "prefill-alone"), invariant=True)
    assert data["finding"]["site"] == "layers.1/mix#0" and not data["passed"]
    assert data["finding"]["repro"]["run"]["shown"], data["finding"]["repro"]
    script = tmp_path / "logs" / "repro" / data["finding"]["repro"]["script"]
    assert ":init_batch_invariance" in script.read_text()


def test_arms_that_agree_pass_only_with_batch_invariance_on(command):
    invariant = command(("decode", "decode-reversed"), invariant=True)
    assert invariant["finding"] is None and invariant["passed"] and invariant["rows"][0]["state"] == "equal"
    contrast = command(("decode", "decode-reversed"))
    assert contrast["finding"] is None and contrast["complete"] and not contrast["passed"]


def test_a_tree_that_is_not_locked_proves_nothing(command):
    assert not command(("decode", "decode-reversed"), invariant=True, state="other")["complete"]


def test_an_operator_that_is_not_watched_is_named_inside_its_layer(command):
    """The layer itself cannot be saved: it hangs a function on its parameter."""
    data = command(functions=["planted_ops:gone"])
    found = data["finding"]["repro"]
    assert data["finding"]["site"] == "layers.1" and "gone" in data["finding"]["missing"][0]
    assert found["operators"] == ["planted_ops:mix", "planted_ops:mix"] and found["run"]["shown"], found
    assert "cannot be saved" in found["why"] and data["passed"]


@pytest.mark.parametrize("fault", ["logits", "sampler"])
def test_a_difference_made_behind_the_forward_is_named(fault, command):
    data = command(("decode", "decode-reversed"), fault=fault)
    found = data["finding"]
    assert found["site"] == fault and found["inputs_agree"] and found["repro"]["form"] is None
    assert found["last_agreeing"] == {"logits": None, "sampler": "logits"}[fault]
    assert data["rows"][0]["state"] == "differs" and not data["passed"]


def test_a_prompt_scored_otherwise_than_it_was_sampled_is_named(command, tmp_path):
    """The sampler adds the place where it samples, and scoring, which has none, does not."""
    (tmp_path / "planted_ops.py").write_text(PLANTED.replace("> 4", "> 40000"))  # the operator repaired
    found = command(("decode", "prefill"), fault="sampler")["finding"]
    assert found["site"] == "sampler" and found["inputs_agree"] and found["last_agreeing"] == "logits"


@pytest.mark.parametrize("fault, why", [("answers", "so do the logits and the sampler"),
                                        ("no logits", "could not be watched: trace_behind: RuntimeError: logits of ")])
def test_a_difference_that_no_site_has_is_said_to_have_none(fault, why, command):
    data = command(("decode", "decode-reversed"), fault=fault)
    assert data["finding"]["site"] is None and why in data["finding"]["why"] and not data["passed"]


def test_a_token_sampled_within_a_prompt_is_no_word_of_it(ops):
    """At the end of a chunk one is sampled and thrown away; where the prompt is scored, its next token counts."""
    class Runner:
        model = types.SimpleNamespace(compute_logits=lambda hidden: hidden * 2)

        def sample(self, hidden, batch, grammar):
            logits = self.model.compute_logits(hidden[batch.logits_indices])
            made = types.SimpleNamespace(logprob_token_ids=torch.tensor([[5], [6]]), logprobs=logits[:, :1])
            return types.SimpleNamespace(logprobs_tensors=made), None, None
    runner, functions = Runner(), (ops.scores, Runner.model.compute_logits)
    rows = [("chunked", 0), ("chunked", 1), ("last", 2), ("last", 3), ("last", 4)]
    watched = tail.Tail(runner, "planted_ops:scores", lambda batch: rows, {"chunked": 9, "last": 3},
                        {"chunked": 4, "last": 4})
    with watched.installed():
        batch = types.SimpleNamespace(logits_indices=torch.tensor([1, 3]))
        runner.sample(ROWS[:5], batch, None)
        assert set(watched.sites["logits"]["out"]["logits"]) == {("chunked", 1), ("last", 3)}
        assert watched.sites["sampler"]["out"]["token"] == {("last", 3): 6}
        ops.scores(torch.arange(10, 15), ROWS[:5], runner.model.compute_logits, 0)
    assert watched.sites["sampler"]["out"]["token"] == {
        ("chunked", 0): 10, ("chunked", 1): 11, ("last", 2): 12, ("last", 3): 13}
    assert (ops.scores, runner.model.compute_logits) == functions


def test_missing_answers_are_no_agreement():
    requests = workload.build(100, 97).requests[:2]
    work, nothing = workload.Workload(requests, 97), Answers({})
    with pytest.raises(EngineError, match="missing in one arm"):
        bisect.differing(work, nothing, nothing)
