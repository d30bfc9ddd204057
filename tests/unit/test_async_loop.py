"""The asynchronous loop with real worker processes and a tiny policy: kills, stops, resumes, and what they keep."""
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import struct
import sys
import threading
import time

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "overlays" / "megatron"))  # the worker processes get this path, not conftest's stub package

from megatron.zero_mismatch.async_loop import AsyncLoop  # noqa: E402
from megatron.zero_mismatch.rollout_workers import WorkerFailed, WorkerPool, _receive, _send, _Worker  # noqa: E402
from megatron.zero_mismatch.sample_queue import Group, SampleQueue  # noqa: E402
from megatron.zero_mismatch.version_guard import WeightsChanged  # noqa: E402
from megatron.zero_mismatch.weight_sync import SyncRefused, Tag  # noqa: E402
from tiny_policy import MakeRollout, TinyLearner  # noqa: E402

BATCH = 2  # groups an update


def loop(learner=None, rollout=None, *, workers=2, max_lag=2, state=None):
    return AsyncLoop(
        learner or TinyLearner(), rollout or MakeRollout(),
        workers=workers, groups_per_update=BATCH, max_lag=max_lag, state=state,
    )


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def synchronous_digest():
    """Lag 0 is deterministic: the reference for everything that must change nothing."""
    with loop(max_lag=0) as reference:
        reference.run(6)
        return reference.learner.guard.digest


# ---- learning, lag, and the bits


def test_learns_within_the_lag_bound_and_trains_every_task_once_in_order():
    with loop(max_lag=2) as asynchronous:
        metrics = asynchronous.run(16)
        assert asynchronous.learner.trained == list(range(16 * BATCH))
    lags = [lag for m in metrics for lag in m["lags"]]
    assert set(lags) <= {0, 1, 2} and max(lags) > 0, "nothing was asynchronous"
    rewards = [m["reward"] for m in metrics]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15


def test_kernel_mismatch_is_exactly_zero_at_the_rollouts_version_and_the_lag_is_not():
    with loop(max_lag=2) as asynchronous:
        splits = [m["split"] for m in asynchronous.run(12)]
    assert all(s.words.passed and s.kernel.k3 == 0 for s in splits)
    assert any(s.lag.k3 > 0 for s in splits)
    assert all(s.lag == s.total for s in splits)


def test_counter_one_ulp_in_the_engine_is_seen_in_every_token():
    with loop(rollout=MakeRollout(off_by_one_ulp=True)) as asynchronous:
        for s in (m["split"] for m in asynchronous.run(3)):
            assert s.words.differing_words == s.words.tokens and s.kernel.k3 > 0


def test_groups_arrive_while_the_learner_computes():
    arrived_during_update = []

    def compute(_):
        before = sum(asynchronous.queue.counts())
        if asynchronous.learner.guard.version == 1:
            wait_until(lambda: asynchronous.queue.counts()[0] == 3 * BATCH)
            arrived_during_update.append(before)

    with loop(TinyLearner(before_update=compute), max_lag=2) as asynchronous:
        asynchronous.run(2)
    assert arrived_during_update


# ---- backpressure


def test_a_stalled_learner_stalls_the_workers():
    with loop(workers=3, max_lag=1) as asynchronous:
        wait_until(lambda: asynchronous.queue.counts() == (2 * BATCH, 0))
        time.sleep(0.3)
        assert asynchronous.queue.counts() == (2 * BATCH, 0), "max_lag + 1 updates' worth, and no more"
        asynchronous.run(1)
        wait_until(lambda: asynchronous.queue.counts() == (2 * BATCH, 0))


def test_lag_zero_generates_nothing_ahead():
    with loop(workers=3, max_lag=0) as synchronous:
        assert {lag for m in synchronous.run(3) for lag in m["lags"]} == {0}


# ---- death


def test_killed_workers_are_replaced_and_change_no_bit(tmp_path, synchronous_digest):
    with loop(rollout=MakeRollout(str(tmp_path), die_on=(1, 4, 5)), max_lag=0) as asynchronous:
        asynchronous.run(6)
        assert asynchronous.learner.trained == list(range(6 * BATCH))
        assert asynchronous.pool.deaths == 3
        assert asynchronous.learner.guard.digest == synchronous_digest


def test_kill_9_from_outside_resubmits_the_unfinished_task(tmp_path):
    with loop(rollout=MakeRollout(str(tmp_path), hold_on=3), max_lag=2) as asynchronous:
        marker = tmp_path / "3"
        wait_until(lambda: marker.exists() and marker.read_text())
        victim = int(marker.read_text())
        assert victim in asynchronous.pool.pids()
        os.kill(victim, signal.SIGKILL)
        asynchronous.run(4)
        assert asynchronous.pool.deaths == 1
        assert asynchronous.learner.trained == list(range(4 * BATCH))
        assert victim not in asynchronous.pool.pids()


def test_idle_worker_that_dies_is_replaced():
    with loop(max_lag=0) as asynchronous:
        wait_until(lambda: asynchronous.queue.counts() == (BATCH, 0))
        for pid in asynchronous.pool.pids():
            os.kill(pid, signal.SIGKILL)
        asynchronous.run(2)
        assert asynchronous.pool.deaths == 2 and asynchronous.learner.trained == list(range(2 * BATCH))


def test_a_message_cut_off_by_a_kill_is_no_message():
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 100) + b"half of it")
    theirs.close()
    assert WorkerPool._receive(_Worker(None, ours)) is None


def test_a_message_cut_off_within_a_tensor_is_no_message():
    whole, (ours, theirs) = multiprocessing.Pipe(), multiprocessing.Pipe()
    _send(whole[1], group(0, torch.arange(3)))
    for _ in range(2):  # the lengths and the pickle, without the tensor
        theirs.send_bytes(whole[0].recv_bytes())
    theirs.close()
    assert WorkerPool._receive(_Worker(None, ours)) is None


@pytest.mark.parametrize("tensor", [
    torch.tensor([-0.0, float("nan"), 1e-45]), torch.randn(3, 4).bfloat16().t(), torch.empty(0, 2), torch.tensor(7),
    torch.tensor([True, False])], ids=["fp32", "transposed", "empty", "scalar", "bool"])
def test_a_tensor_keeps_every_bit_on_the_way_and_can_be_written_to(tensor):
    ours, theirs = multiprocessing.Pipe()
    _send(theirs, {"same": tensor})
    found = _receive(ours)["same"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in (found, tensor)))
    found.zero_()


def test_a_task_that_kills_every_worker_ends_the_loop_with_its_name(tmp_path):
    with loop(rollout=MakeRollout(str(tmp_path), always_die_on=1), max_lag=0) as asynchronous:
        with pytest.raises(WorkerFailed, match="died without finishing a task, the last on task 1 with exit code -9"):
            asynchronous.run(1)


def test_a_worker_that_raises_ends_the_loop_with_its_traceback():
    with loop(rollout=MakeRollout(raise_on=2)) as asynchronous:
        with pytest.raises(WorkerFailed, match="planted in task 2"):
            asynchronous.run(4)


def test_leaving_the_block_leaves_no_process():
    with loop() as asynchronous:
        pids = asynchronous.pool.pids()
        asynchronous.run(1)

    def gone(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(lambda: all(map(gone, pids)))


# ---- stop and resume


def test_stop_and_resume_change_no_bit(tmp_path, synchronous_digest):
    with loop(max_lag=0) as first:
        first.run(3)
        first.save(tmp_path / "state.pt")
    with loop(max_lag=0, state=torch.load(tmp_path / "state.pt")) as second:
        assert second.learner.guard.version == 3
        second.run(3)
        assert second.learner.trained == list(range(6 * BATCH))
        assert second.learner.guard.digest == synchronous_digest


def test_what_had_arrived_before_a_clean_stop_is_trained_after_the_resume_bit_for_bit(tmp_path):
    with loop(max_lag=2) as first:
        first.run(2)
        state = first.stop()
        assert first.queue.counts()[1] == 0, "every running task was let finish"
    kept = {group["task"]: group for group in state["arrived"]}
    assert kept and min(kept) >= 2 * BATCH

    seen = {}
    learner = TinyLearner(before_update=lambda groups: seen.update({g.task: g for g in groups}))
    with loop(learner, state=state) as second:
        metrics = second.run(4)
        assert second.learner.trained == list(range(6 * BATCH))
    for task, group in kept.items():
        assert tuple(group["tag"]) == seen[task].tag
        for saved, trained in zip(group["logprobs"], seen[task].logprobs, strict=True):
            assert torch.equal(saved.view(torch.int32), trained.view(torch.int32))
    assert all(m["split"].words.passed for m in metrics), "also those generated before the stop"


def test_saving_while_workers_run_loses_and_repeats_nothing(tmp_path):
    """The process is then gone without a stop: only the file is left."""
    with loop(rollout=MakeRollout(delay=0.02), max_lag=2) as first:
        first.run(3)
        first.save(tmp_path / "state.pt")
        first.run(2)  # lost with the process
    with loop(state=torch.load(tmp_path / "state.pt")) as second:
        second.run(3)
        assert second.learner.trained == list(range(6 * BATCH))


def test_resume_with_other_weights_is_refused(tmp_path):
    with loop(max_lag=0) as first:
        first.run(1)
        state = first.state()
    state["learner"]["policy"]["table"][0, 0, 0] += 1
    with pytest.raises(WeightsChanged, match="checkpoint of version 1"):
        loop(state=state)


def test_a_kill_while_saving_leaves_the_old_state(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    with loop(max_lag=0) as asynchronous:
        asynchronous.run(1)
        asynchronous.save(path)

        def killed(state, file):
            file.write(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", killed)
        asynchronous.run(1)
        with pytest.raises(KeyboardInterrupt):
            asynchronous.save(path)
    assert torch.load(path)["version"] == 1


# ---- what the learner refuses


def test_a_group_of_other_weights_is_refused():
    with loop(max_lag=0) as asynchronous:
        wait_until(lambda: asynchronous.queue.counts()[0] == BATCH)
        arrived = asynchronous.queue._arrived
        arrived[0] = dataclasses.replace(arrived[0], tag=Tag(0, "0" * 64))
        with pytest.raises(SyncRefused, match="answered with version 0"):
            asynchronous.run(1)
        assert asynchronous.learner.trained == []


def test_a_learner_that_does_not_step_once_is_refused():
    class Twice(TinyLearner):
        def update(self, groups):
            metrics = super().update(groups)
            self.optimizer.step()
            return metrics

    with loop(Twice()) as asynchronous:
        with pytest.raises(RuntimeError, match="step once an update"):
            asynchronous.run(1)


# ---- the queue alone


def group(task, *tokens):
    return Group(task, Tag(0, ""), list(tokens), [], [])


def test_queue_issues_within_the_window_and_again_what_was_given_back():
    queue = SampleQueue(groups_per_update=2, max_lag=1)
    assert [queue.issue() for _ in range(5)] == [0, 1, 2, 3, None]
    queue.give_back(2)
    assert [queue.issue(), queue.issue()] == [2, None]
    for task in (3, 1, 0):
        queue.put(group(task))
    assert [g.task for g in queue.take()] == [0, 1]
    queue.trained()
    assert [queue.issue(), queue.issue(), queue.issue()] == [4, 5, None]


def test_queue_is_full_when_the_last_task_of_the_window_has_arrived():
    queue = SampleQueue(groups_per_update=1, max_lag=1)
    assert [queue.issue(), queue.issue()] == [0, 1] and queue.issued() == [0, 1]
    queue.put(group(1))
    late = threading.Timer(0.1, queue.put, [group(0)])
    late.start()
    queue.fill()
    assert queue.counts() == (2, 0) and queue.issued() == []
    queue.fail(WorkerFailed("planted"))
    queue.trained()
    with pytest.raises(WorkerFailed, match="planted"):
        queue.fill()


def test_queue_refuses_a_result_nobody_is_generating():
    queue = SampleQueue(groups_per_update=1, max_lag=1)
    queue.issue()
    queue.put(group(0))
    for again in (0, 1):
        with pytest.raises(RuntimeError, match=f"task {again}, which nobody is generating"):
            queue.put(group(again))
    queue.take()
    queue.trained()
    with pytest.raises(RuntimeError, match="task 0"):
        queue.put(group(0))


def test_queue_keeps_a_batch_until_it_was_trained():
    """An update that raises has trained nothing: the same groups come again."""
    queue = SampleQueue(groups_per_update=1, max_lag=0)
    queue.issue()
    queue.put(group(0))
    assert queue.take() == queue.take()
    assert [g["task"] for g in queue.state()] == [0]


def test_queue_wakes_a_waiting_learner_with_the_error():
    queue = SampleQueue(groups_per_update=1, max_lag=0)
    timer = threading.Timer(0.05, queue.fail, [WorkerFailed("planted")])
    timer.start()
    with pytest.raises(WorkerFailed, match="planted"):
        queue.take()


def test_queue_refuses_a_state_of_another_shape():
    with pytest.raises(ValueError, match="resume with the same"):
        SampleQueue(groups_per_update=1, max_lag=0, version=3, arrived=[group(4)])
    with pytest.raises(ValueError, match="at least 1 and 0"):
        SampleQueue(groups_per_update=0, max_lag=0)
