"""The parts of the vLLM backend that need no vLLM: reading answers, naming rows, counting steps."""
import types

import numpy as np
import pytest
import torch
from blocks_fake import Engine

from prove import host, steps, vllm_backend
from prove.engine import unpack


def flat(*positions):
    """A stand-in for vllm.logprobs.FlatLogprobs: one list of floats a position, the chosen token's first."""
    starts, ends, values = [], [], []
    for position in positions:
        starts.append(len(values))
        values += position
        ends.append(len(values))
    return types.SimpleNamespace(start_indices=starts, end_indices=ends, logprobs=values)


def test_the_chosen_token_is_read_and_the_first_prompt_position_skipped():
    output = types.SimpleNamespace(
        outputs=[types.SimpleNamespace(token_ids=[5, 6], logprobs=flat([-1.5, -0.5], [-2.0, -0.25]))],
        prompt_logprobs=flat([], [-3.0], [-0.0]), num_cached_tokens=None)
    answer = vllm_backend._answer(output)
    assert unpack(answer["tokens"]).tolist() == [5, 6] and answer["cached"] == 0
    assert unpack(answer["words"]).view(np.float32).tolist() == [-1.5, -2.0]
    assert unpack(answer["prompt_words"]).tolist() == [0xC0400000, 0x80000000]


def test_rows_are_named_by_our_request_id_and_the_position():
    batch = types.SimpleNamespace(num_tokens=4, positions=torch.tensor([7, 0, 1, 2, 99, 99]),
                                  req_ids=["r001.12-0a1b2c3d", "e257+3.13-ffffffff"],
                                  query_start_loc_np=np.array([0, 1, 4]))
    assert vllm_backend._row_keys(batch) == [("r001", 7), ("e257+3", 0), ("e257+3", 1), ("e257+3", 2)]


def test_steps_are_counted_only_inside_a_run():
    desc = types.SimpleNamespace(cg_mode=types.SimpleNamespace(name="FULL"))
    manager = types.SimpleNamespace(dispatch=lambda: desc)
    runner = types.SimpleNamespace(execute_model=lambda output: manager.dispatch() and "ran", cudagraph_manager=manager)
    pool = types.SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=lambda: 4)
    scheduler = types.SimpleNamespace(kv_cache_manager=types.SimpleNamespace(block_pool=pool),
                                      _preempt_request=lambda request: None)
    seen = steps.Steps(runner, scheduler)

    def step(**counts):
        assert runner.execute_model(types.SimpleNamespace(num_scheduled_tokens=counts)) == "ran"

    step(a=5)
    with seen.counted():
        step(a=1, b=1)
        step(a=1, b=300)
        step(a=7)
        scheduler._preempt_request("a")
    step(a=1)
    assert seen.summary() == {"modes": {"FULL": 3}, "decode_rows": [2], "mixed_steps": 1,
                               "mixed_modes": {"FULL": 1}, "longest_chunk": 300, "chunks": 2, "preemptions": 1,
                               "peak_blocks": 6}


def test_the_weights_digest_sees_one_bit():
    model = torch.nn.Linear(3, 5)
    before = vllm_backend.parameters_digest(model)
    assert before == vllm_backend.parameters_digest(model)
    model.bias.data.view(torch.int32)[2] ^= 1
    assert before != vllm_backend.parameters_digest(model)


def test_only_steps_in_which_all_decode_are_timed():
    runner = types.SimpleNamespace(execute_model=lambda output: "ran")
    clock = steps.Clock(runner, rows=3, profile_steps=0)

    def step(*counts):
        runner.execute_model(types.SimpleNamespace(num_scheduled_tokens=dict(enumerate(counts)),
                                                   total_num_scheduled_tokens=sum(counts)))
    with clock:
        for counts in ((5, 5, 5), (1, 1, 1), (1, 1, 1), (1, 1)):
            step(*counts)
    step(1, 1, 1)  # the clock is gone
    found = clock.summary()
    assert found["decode_steps"] == 2 and found["decode_tokens_per_second"] > 0 and found["kernels"] == []
    assert found["host"] == []


@pytest.mark.parametrize("ran", [40, 27])  # the run may end before the host has had all its steps
def test_the_device_is_profiled_first_and_then_the_host(monkeypatch, ran):
    def busy(output):
        return "ran"

    runner, seen = types.SimpleNamespace(execute_model=busy), []

    def begin(clock):
        clock.profiler = "device"
        seen.append(len(clock.times))

    def end(clock):
        clock.profiler = None
        seen.append(len(clock.times))
    monkeypatch.setattr(steps.Clock, "_start", begin)
    monkeypatch.setattr(steps.Clock, "_stop", end)
    clock = steps.Clock(runner, rows=1, profile_steps=5)
    with clock:
        for _ in range(ran):
            runner.execute_model(types.SimpleNamespace(num_scheduled_tokens={0: 1}, total_num_scheduled_tokens=1))
    found = clock.summary()
    assert seen == [20, 25] and found["profiled_steps"] == 5
    assert clock.host.steps == (5 if ran == 40 else 2)
    mine = next(row for row in found["host"] if row["function"].endswith(" busy"))
    assert mine["calls"] == (1.0 if ran == 40 else 1.5)  # the step under way when the run ends is not counted
    assert not any("begin" in row["function"] for row in found["host"])


def test_the_host_functions_that_differ_most_come_first():
    off = [{"function": "wait", "calls": 1, "own_us": 10.0}, {"function": "same", "calls": 1, "own_us": 500.0}]
    on = [{"function": "wait", "calls": 1, "own_us": 4000.0}, {"function": "same", "calls": 1, "own_us": 501.0},
          {"function": "new", "calls": 3, "own_us": 90.0}]
    assert [row["function"] for row in host.differences(off, on, most=2)] == ["wait", "new"]
    assert host.differences(off, on)[1] == {"function": "new", "off_us": 0.0, "on_us": 90.0}


def test_a_script_that_writes_is_given_the_sizes_and_an_empty_folder(tmp_path):
    seen = []
    writes = types.SimpleNamespace(write=lambda source, folder: seen.append((source, folder)))
    assert vllm_backend._small_model(writes, "sizes", str(tmp_path)) == str(tmp_path)
    assert seen == [("sizes", str(tmp_path))]


def test_every_tokens_logprob_stands_at_its_id_and_one_that_is_not_listed_is_a_nan():
    """Two positions of a vocabulary of three, the sampled token twice, as vLLM lists them."""
    listed = types.SimpleNamespace(token_ids=[2, 0, 1, 2, 1, 0], logprobs=[-3.0, -0.5, -1.0, -3.0, -0.0, -2.0],
                                   start_indices=[0, 4], end_indices=[4, 6])
    found = vllm_backend.vocabulary_words(listed, 3)
    assert found[0].view(np.float32).tolist() == [-0.5, -1.0, -3.0]
    assert found[1, :2].view(np.float32).tolist() == [-2.0, 0.0] and found[1, 1] == 1 << 31, "a negative zero stays one"
    assert np.isnan(found[1].view(np.float32)[2])


def test_requests_that_decode_in_blocks_are_dropped_at_the_end_and_the_step_under_way_is_waited_for(monkeypatch):
    class Late(Engine):
        """Gives its blocks back in the second step after the abort."""
        def reset_prefix_cache(self):
            return self.taken == 0 or self.aborted is not None and self.taken >= self.over

        def abort_request(self, names):
            super().abort_request(names)
            self.over = self.taken + 2

    engine = Late()
    backend = object.__new__(vllm_backend.Backend)
    backend.engine, backend.runner = engine, engine.runner
    monkeypatch.setattr(backend, "_add", lambda request: request["id"] + ".1", raising=False)
    assert backend.op_decode_begin(requests=[{"id": name} for name in "abc"])["seconds"] > 0
    assert backend.op_decode(steps=8, untimed=2)["steps"] == 8
    with pytest.raises(RuntimeError, match="blocks are still in use"):
        backend.op_decode_begin(requests=[])
    backend.op_decode_end()
    assert engine.aborted == ["a.1", "b.1", "c.1"] and engine.taken == engine.over
    backend._forget()
