"""Blocks of decode steps in turns, on simulated hosts: what the ratio sees, what it does not, when it is refused."""
import gc
import json
import math
import os
import random
import subprocess
import sys
import time
import types

import pytest
from blocks_fake import Engine

from prove import blocks, machine, steps, ui
from prove.engine import EngineError
from prove.record import Record
from prove.steps import SETTLED, Decoding


class Host:
    """Two engines that take `step[side](index)` seconds a step, on a host that is `slow(time)` times slower."""

    def __init__(self, on=lambda index: 0.015 / 0.9, off=lambda index: 0.015, slow=lambda now: 1.0):
        self.step, self.slow, self.now, self.at, self.calls = {"off": off, "on": on}, slow, 0.0, {}, []

    def call(self, side, op, **arguments):
        self.calls.append((side, op))
        if op == "decode_begin":
            self.at[side] = 0
            return {"seconds": 0.2}
        if op == "decode":
            times = []
            for _ in range(arguments["untimed"] + arguments["steps"]):
                times.append(self.step[side](self.at[side]) * self.slow(self.now))
                self.now, self.at[side] = self.now + times[-1], self.at[side] + 1
            times = times[arguments["untimed"]:]
            return {"steps": len(times), "seconds": sum(times), "median": sorted(times)[len(times) // 2],
                    "longest": max(times)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "quiet", lambda patience: (0.1, 0.0))

    def call(host, quads=40, until=math.inf):
        kept = Record("bench", "fake", {}, tmp_path)
        rows = blocks.alternate(host.call, [], quads, kept, ui.UI(json_only=True), until=until)
        return blocks.summary(rows, 256), kept.data
    return call


def phases(seed):
    """A host that is up to 1.6 times slower, for 2 to 8 seconds at a time."""
    source, ends = random.Random(seed), [(0.0, 1.0)]
    while ends[-1][0] < 400:
        ends.append((ends[-1][0] + source.uniform(2, 8), source.choice([1.0, 1.1, 1.3, 1.6])))
    return lambda now: next(factor for end, factor in ends if now <= end)


@pytest.mark.parametrize("seed", range(5))
def test_a_host_that_is_slow_for_seconds_at_a_time_does_not_move_the_ratio(run, seed):
    found, _ = run(Host(slow=phases(seed)))
    assert found["ratio"] == pytest.approx(0.9, abs=0.01) and found["quads"] == 40
    assert found["noise"] < blocks.MOST_NOISE


def test_a_cost_that_comes_every_few_steps_is_in_the_ratio_though_no_median_step_has_it(run):
    found, _ = run(Host(on=lambda index: 0.015 * (6 if index % 32 == 31 else 1)))
    assert found["steps"] == pytest.approx(1.0) and found["ratio"] == pytest.approx(32 / 37, abs=0.01)


def test_a_few_long_steps_of_the_host_do_not_move_the_ratio(run):
    found, _ = run(Host(on=lambda index: 0.015 + 2.0 * (index in (50, 400, 777)), off=lambda index: 0.015))
    assert found["ratio"] == pytest.approx(1.0) and found["plain"] < 0.9


@pytest.mark.parametrize("stall,every", [(1.0, 300), (0.5, 200)])
def test_an_engine_that_stalls_now_and_then_gets_no_verdict(run, stall, every):
    """Rarer than every second quad the median leaves it out; all time does not."""
    found, _ = run(Host(on=lambda index: 0.015 + stall * (index % every == every // 2), off=lambda index: 0.015))
    assert found["ratio"] == pytest.approx(1.0) and found["plain"] < 0.88 and not blocks.enough(found)


def test_neither_side_always_goes_first_nor_between(run):
    host = Host()
    run(host, quads=2)
    assert "".join(side[1] for side, op in host.calls if op == "decode") == "fnnf" + "nffn"
    assert [call for call in host.calls if call[1] != "decode"] == [
        ("off", "decode_begin"), ("on", "decode_begin"), ("off", "decode_end"), ("on", "decode_end")]


def test_what_a_record_keeps_of_a_quad(run):
    _, data = run(Host(), quads=1)
    assert data["rows"][:2] == [{"side": side, "prefill_seconds": 0.2} for side in ("off", "on")]
    row = data["rows"][2]
    assert (row["quad"], row["first"], row["others"]) == (0, "off", 0.1) and len(row["off"]) == len(row["on"]) == 2
    assert row["off"][0]["median"] == row["off"][0]["longest"] == 0.015 and row["off"][0]["steps"] == blocks.STEPS


def test_a_baseline_that_does_not_agree_with_itself_within_a_quad_bears_no_verdict(run):
    found, _ = run(Host(off=lambda index: 0.015 if index // (blocks.TOKENS - 1) % 2 == 0 else 0.018))
    assert found["noise"] == pytest.approx(0.2) and not blocks.enough(found)


def test_a_baseline_that_does_not_agree_with_itself_over_the_run_bears_no_verdict(run):
    found, _ = run(Host(slow=lambda now: 1.0 + now / 150))
    assert found["ratio"] == pytest.approx(0.9, abs=0.01) and found["spread"] > blocks.MOST_SPREAD
    assert not blocks.enough(found)


def test_fewer_quads_than_a_verdict_needs_bear_none(run):
    assert blocks.enough(run(Host(), quads=15)[0]) and not blocks.enough(run(Host(), quads=14)[0])
    assert not blocks.enough(run(Host(), quads=0)[0])


def test_on_a_machine_that_is_not_idle_nothing_is_timed(run, monkeypatch):
    seen = iter([(0.3, 0.1), (0.2, 0.1), *[(9.0, 70.0)] * 99])
    monkeypatch.setattr(machine, "quiet", lambda patience: next(seen))
    monkeypatch.setattr(machine, "allowed", lambda: 2.0)
    found, data = run(Host())
    assert found["quads"] == 2 and not blocks.enough(found)
    assert "2 of 40 quads: the machine was not idle: others use 9.0 of its cores, 2.0 are allowed" in data["stopped"]


def test_the_patience_with_others_is_one_for_the_whole_run(run, monkeypatch):
    left = []
    monkeypatch.setattr(machine, "quiet", lambda patience: (left.append(patience), (0.0, 10.0))[1])
    run(Host(), quads=3)
    assert left == pytest.approx([60.0, 50.2, 40.4])


def test_a_full_cache_ends_the_run_and_what_was_timed_counts(run):
    host, call = Host(), Host.call

    def full(side, op, **arguments):
        if op == "decode" and host.at[side] > 1300:
            raise EngineError("failed", "the cache does not hold them")
        return call(host, side, op, **arguments)
    host.call = full
    found, data = run(host)
    assert 15 < found["quads"] < 40 and blocks.enough(found) and "does not hold them" in data["stopped"]
    assert host.calls[-2:] == [("off", "decode_end"), ("on", "decode_end")]


def test_an_engine_that_cannot_drop_its_requests_costs_no_quad(run):
    host, call = Host(), Host.call

    def kept_back(side, op, **arguments):
        answer = call(host, side, op, **arguments)
        if (side, op) == ("off", "decode_end"):
            raise EngineError("failed", "blocks are still in use")
        return answer
    host.call = kept_back
    found, data = run(host)
    assert found["quads"] == 40 and blocks.enough(found) and "blocks are still in use" in data["stopped"]
    assert host.calls[-1] == ("on", "decode_end")


def test_an_engine_that_dies_is_no_end_of_a_run_but_a_failure(run):
    host, call = Host(), Host.call
    host.call = lambda side, op, **arguments: (_ for _ in ()).throw(EngineError("died", "it")) if op == "decode" \
        else call(host, side, op, **arguments)
    with pytest.raises(EngineError):
        run(host)


def test_no_quad_begins_that_would_not_end_in_time(run):
    found, data = run(Host(), until=time.monotonic() - 1)
    assert found["quads"] == 0 and "out of time" in data["stopped"]


# ---- the engine's side


def test_a_block_is_so_many_steps_and_no_garbage_is_collected_in_it():
    engine = Engine()
    before, decoding = engine.runner.execute_model, Decoding(engine, engine.runner, ["a", "b", "c"])
    assert decoding.begin()["seconds"] > 0 and engine.taken == 2 + SETTLED
    found = decoding.block(32, 4)
    assert engine.taken == 2 + SETTLED + 37 == 2 + SETTLED + blocks.TOKENS and found["steps"] == 32
    assert found["seconds"] >= found["longest"] >= found["median"] > 0
    assert engine.seen == [False] * engine.taken and gc.isenabled() and engine.runner.execute_model is before
    decoding.end()
    assert engine.aborted == ["a", "b", "c"]


def test_what_a_block_takes_is_that_of_its_timed_steps(monkeypatch):
    engine = Engine()
    decoding = Decoding(engine, engine.runner, ["a", "b", "c"])
    decoding.begin()
    slow = engine.taken + 1 + 4  # the next block's untimed steps take 100 s each
    monkeypatch.setattr(steps, "time", types.SimpleNamespace(
        perf_counter=lambda: engine.taken + 99.0 * min(engine.taken, slow)))
    assert decoding.block(32, 4) == {"steps": 32, "seconds": 32.0, "median": 1.0, "longest": 1.0}


def test_steps_in_which_not_all_decode_are_no_block_and_do_not_go_on_for_ever():
    engine = Engine(most=50)
    decoding = Decoding(engine, engine.runner, ["a", "b", "c"])
    decoding.begin()
    with pytest.raises(RuntimeError, match="only 28 of 74 steps had all 3 requests decoding, 37 are needed"):
        decoding.block(32, 4)
    assert gc.isenabled()


@pytest.mark.parametrize("step, seen", [(1, False), (5, False), (6, True), (37, True), (38, False)])
def test_no_timed_step_is_one_in_which_fewer_decode(step, seen):
    """As where a cache is just full: the requests that it does not hold are prefilled anew between two stamps."""
    begun = 2 + SETTLED
    engine = Engine(short=(begun + step,))
    decoding = Decoding(engine, engine.runner, ["a", "b", "c"])
    decoding.begin()
    if seen:
        with pytest.raises(RuntimeError, match="1 steps between the 32 timed ones did not have all 3 requests"):
            decoding.block(32, 4)
    else:
        assert decoding.block(32, 4)["steps"] == 32 and engine.taken == begun + 37 + (step < 38)
    engine.short = ()
    assert decoding.block(32, 4)["steps"] == 32  # each block by itself


# ---- the machine's side


def test_the_main_thread_has_a_core_to_itself_and_everything_is_as_before_afterwards(monkeypatch):
    code = ("import os, sys, threading\nready = threading.Event()\nt = threading.Thread(target=ready.wait)\nt.start()\n"
            "print(t.native_id, flush=True)\nsys.stdin.read()\nready.set()")
    allowed, cores = {}, sorted(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        other = int(child.stdout.readline())
        with pytest.raises(ZeroDivisionError), machine.pinned([child.pid], cores):
            allowed = {task: os.sched_getaffinity(task) for task in (child.pid, other)}
            raise ZeroDivisionError
        after = [os.sched_getaffinity(task) for task in (child.pid, other)]
        child.stdin.close()
    assert allowed == {child.pid: set(cores[-1:]), other: set(cores[:-1] or cores)}
    assert after == [set(cores)] * 2


def test_a_thread_begun_while_pinned_has_all_cores_afterwards():
    """A pool that a library opens in the first timed step would work on the main thread's one core for ever."""
    code = ("import sys, threading\nready = threading.Event()\nprint(flush=True)\nsys.stdin.readline()\n"
            "t = threading.Thread(target=ready.wait)\nt.start()\nprint(t.native_id, flush=True)\nsys.stdin.read()\n"
            "ready.set()")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: nothing can be kept from it")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()  # it is up
        with machine.pinned([child.pid], cores):
            child.stdin.write(b"\n")
            child.stdin.flush()
            begun = int(child.stdout.readline())
            assert os.sched_getaffinity(begun) == set(cores[-1:])  # its starter's
        assert os.sched_getaffinity(begun) == set(cores)
        child.stdin.close()


def test_a_process_that_ended_is_not_pinned():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    with machine.pinned([child.pid], machine.cores()):
        pass


def test_a_busy_core_is_counted():
    busy, until = machine.Busy(), time.process_time() + 0.5
    while time.process_time() < until:
        pass
    assert 0.3 < busy.mean() <= os.cpu_count() + 0.5


def test_a_core_that_the_host_took_is_counted_as_busy_and_by_itself(tmp_path, monkeypatch):
    def stat(*ticks):
        (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, ticks))} 0 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    now = iter([10.0, 12.0, 12.0])
    monkeypatch.setattr(machine, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    hertz = os.sysconf("SC_CLK_TCK")
    stat(100, 0, 50, 9000, 70, 1, 2, 40)
    busy = machine.Busy()
    stat(100 + 3 * hertz, hertz, 50 + hertz, 9999, 99, 1, 2 + hertz, 40 + 2 * hertz)  # of two seconds
    assert busy.mean() == 4.0 and busy.stolen() == 1.0


def test_others_are_waited_for_and_not_for_ever(monkeypatch):
    seen = iter([3.0, 3.0, 0.5])
    monkeypatch.setattr(machine, "Busy", lambda: types.SimpleNamespace(mean=lambda: next(seen, 9.0)))
    monkeypatch.setattr(machine, "GLANCE", 0.01)
    monkeypatch.setattr(machine, "allowed", lambda: 1.0)
    others, waited = machine.quiet(5.0)
    assert others == 0.5 and 0.03 <= waited < 5
    assert machine.quiet(0.05)[0] == 9.0


def test_a_machine_is_idle_by_its_size(monkeypatch):
    for count, cores in ((2, 1.0), (16, 1.0), (32, 2.0)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert machine.allowed() == cores


def test_the_record_of_blocks_is_json(run):
    assert json.loads(json.dumps(run(Host())[0], allow_nan=False))["quads"] == 40
