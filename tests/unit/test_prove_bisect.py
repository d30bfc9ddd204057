"""Bisecting on a small torch model with a planted fault: the right operator is named, and its repro runs by itself."""
import os
import resource
import subprocess
import sys

import pytest

import torch

from prove import bisect, repro, trace, workload
from prove.engine import pack
from prove.rollout import Answers

PLANTED = """
import torch

def mix(x, weight):
    '''x: [T, 8]. Above 4 rows the sum over K is made in two parts: other bits for the same row.'''
    if x.shape[0] > 4:
        return x[:, :4] @ weight[:, :4].T + x[:, 4:] @ weight[:, 4:].T
    return (x[:, None, :] * weight[None]).sum(-1)

def scale(x, out):
    out.copy_(x * 3)
"""


@pytest.fixture
def ops(tmp_path, monkeypatch):
    (tmp_path / "planted_ops.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("planted_ops", None)
    import planted_ops

    return planted_ops


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


def traced(model, batches, keep=None, keep_key=None):
    """Runs the rows in the given batches; row i is position i of request "r"."""
    tracer = trace.Tracer(model, FUNCTIONS, keep=keep, keep_key=keep_key)
    with torch.no_grad(), tracer.installed():
        for start, stop in batches:
            tracer.begin(stop - start)
            model(ROWS[start:stop])
            tracer.end([("r", i) for i in range(start, stop)], lambda key: key[1] <= 7)
    return tracer


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
    assert len(set(sites["layers.0/scale#0"]["out"])) == 8


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
    key = ("r", 3)
    left = traced(model, BATCHED, keep="layers.1/mix#0", keep_key=key).kept[0]
    right = traced(model, ALONE, keep="layers.1/mix#0", keep_key=key).kept[0]
    function, module = repro.function_of(left, model)
    assert function is ops.mix and module is None
    pair = repro.reduce(function, left, left["keys"].index(key), right, right["keys"].index(key))
    assert pair["form"] == "alone" and pair["left"]["rows"] == 5 and pair["right"]["rows"] == 1  # 9 rows halved to 5
    script = repro.write(tmp_path / "out", "repro", left["site"], left["path"], module, pair)
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
    left = {"site": "2", "path": None, "rows": 4, "args": (ROWS[:4],), "kwargs": {}}
    right = {"site": "2", "path": None, "rows": 4, "args": (ROWS[2:6],), "kwargs": {}}
    function, module = repro.function_of(left, model)
    assert module is model[2]
    pair = repro.reduce(function, left, 3, right, 1)
    assert pair["form"] == "alone"


def test_a_call_that_replays_equal_gives_no_repro():
    state = iter(range(100))
    held = {"site": "f", "path": "m:f", "rows": 1, "args": (torch.zeros(1, 2),), "kwargs": {}}
    assert repro.reduce(lambda x: x + 0 * next(state), held, 0, held, 0) is None


def test_the_earliest_parting_request_is_chosen():
    import numpy as np

    requests = workload.build(100, 97).requests[:3]
    work = workload.Workload(requests, 97)

    def answers(flips):
        return Answers({r.id: {"tokens": pack(np.zeros(4, np.int64)),
                               "words": pack(np.asarray([flips.get((r.id, i), 1) for i in range(4)], np.uint32))}
                        for r in requests})
    base = answers({})
    assert bisect.differing(work, base, base, base) is None
    other = answers({("r000", 0): 9, ("r002", 3): 9})
    request, position = bisect.differing(work, base, base, other)
    assert request.id == "r002" and position == len(request.prompt) - 1 + 3  # its prompt has one token


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="no such arm: decoed"):
        bisect.bisect(None, None, arms=("decoed", "prefill"), tokens=1, invariant=True, out=None, logs=None, budget=1,
                      env={})


def test_a_buffer_for_the_largest_step_counts_by_its_first_rows():
    buffer = torch.arange(40).reshape(20, 2)
    assert trace.combined(buffer, 4) is None
    assert torch.equal(trace.combined(buffer, 4, longer=True), trace.row_hash(buffer[:4], 4))
