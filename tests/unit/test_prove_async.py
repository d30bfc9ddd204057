"""What `prove async` takes for a proof, by its rows alone; with real processes: tests/upstream/test_async_rl.py."""
import dataclasses
import pathlib
import types

import numpy as np
import pytest
import torch

from prove import async_backend, async_rl
from prove.engine import pack
from tiny_nemotron import model

SETTINGS = async_rl.Settings(lag=2, updates=12, stop_after=8, synchronous=7, groups=2, answers=2, tokens=4, lr=1e-3)
WORDS = {"tokens": 16, "differing_words": 0, "invalid_tokens": 0}


def row(part, task, lag=0, at=None, **change):
    d3 = 0.5 * lag
    made = {"part": part, "tasks": [task], "lags": [lag], "words": WORDS, "d3": d3, "lag_k3": d3, "kernel_k3": 0.0,
            "max_weight": 1.0 + lag, "reward": 0.1 * task, "waiting": 2, "at": float(task if at is None else at)}
    made |= change
    return made | {"equal": async_rl.equal(made, 16)}


def rows(**change):
    """Synchronous steps of 2 s, asynchronous ones of 1 s; the first of each part take a minute."""
    return ([row("synchronous", task, at=60 + 2 * task) for task in range(7)]
            + [row("asynchronous", task, min(task, 2), at=160 + task) for task in range(8)]
            + [row("resumed", task, 2, at=260 + task, **change) for task in range(8, 12)])


def test_a_run_as_it_must_be_passes_every_check():
    summary = async_rl.summarise(rows(), SETTINGS)
    checks = ("equal", "every_task_once", "lag_reached", "learned")
    assert all(summary[check] for check in checks) and summary["updates"] == 12
    assert summary["lags"] == {"0": 1, "1": 1, "2": 10}
    assert summary["d3_peak_to_median"] == 1.0 and summary["largest_weight"] == 3.0


def test_throughput_leaves_out_the_first_updates_of_a_part_and_the_resumed_one():
    found = async_rl.summarise(rows(), SETTINGS)["throughput"]
    assert (found["synchronous"], found["asynchronous"], found["ratio"]) == (8.0, 16.0, 2.0)


def test_emptying_the_queue_is_not_counted_as_speed():
    """Three updates are timed; two of their tasks had been generated before."""
    drained = rows()
    drained[14]["waiting"] = 0
    assert async_rl.summarise(drained, SETTINGS)["throughput"]["ratio"] == pytest.approx(2 / 3)
    filled = rows()
    filled[14]["waiting"] = 9
    assert async_rl.summarise(filled, SETTINGS)["throughput"]["ratio"] == 2.0, "nor is filling it"


@pytest.mark.parametrize("change", [
    {"words": WORDS | {"differing_words": 1}},
    {"words": WORDS | {"invalid_tokens": 1}},
    {"words": WORDS | {"tokens": 15}},              # a token without a comparison
    {"kernel_k3": 1e-12},
    {"lag_k3": 0.9},                                # something in D3 that is not lag
    {"lags": [0]},                                  # D3 without lag
])
def test_a_row_with_anything_but_lag_is_not_equal(change):
    assert not row("resumed", 8, 2, **change)["equal"]
    assert not async_rl.summarise(rows(**change), SETTINGS)["equal"]


def test_a_task_lost_or_trained_twice_is_seen():
    assert not async_rl.summarise(rows(tasks=[8]), SETTINGS)["every_task_once"]
    assert not async_rl.summarise(rows()[:-1], SETTINGS)["every_task_once"]


def test_a_run_without_lag_or_that_ended_early_proves_nothing():
    nothing = async_rl.summarise([row("asynchronous", task) for task in range(12)], SETTINGS)
    assert nothing["equal"] and not nothing["lag_reached"] and nothing["throughput"] is None
    below = [row("asynchronous", task, min(task, 1)) for task in range(12)]
    assert not async_rl.summarise(below, SETTINGS)["lag_reached"], "--lag 2 that never was 2"
    assert not async_rl.summarise([], SETTINGS)["equal"]


@pytest.mark.parametrize("key, other", [("version", 7), ("digest", "b"), ("arrived", [8])])
def test_a_resume_from_another_state_is_seen(key, other):
    stopped = {"version": 8, "digest": "a", "arrived": [8, 9], "issued": 0}
    assert async_rl.same_state(stopped, stopped)
    assert not async_rl.same_state(stopped, stopped | {key: other})
    assert not async_rl.same_state(stopped | {"issued": 1}, stopped)


@pytest.mark.parametrize("key, other", [("lost", False), ("deaths", 2), ("deaths", 0)])
def test_a_death_that_cost_nothing_or_was_not_the_only_one_is_seen(key, other):
    killed, end = {"task": 9, "lost": True, "deaths": 1}, {"deaths": 1, "issued": 0}
    assert async_rl.made_good(killed, end)
    assert not async_rl.made_good(killed | {key: other}, end)
    assert not async_rl.made_good(killed, end | {"deaths": 2})
    assert not async_rl.made_good(killed, end | {"issued": 1})


@pytest.mark.parametrize("change", [{"lag": 0}, {"stop_after": 12}, {"stop_after": 11}, {"stop_after": 6}, {"lag": 8},
                                    {"synchronous": 6}])
def test_settings_that_leave_a_part_without_a_measurement_are_refused(change):
    with pytest.raises(ValueError, match="expected"):
        dataclasses.replace(SETTINGS, **change)


# ---- a task, between the engine's words and the loop's tensors

WORK = async_backend.Work(groups=2, answers=2, tokens=3, vocab=64, micro=64, share=0.5)


def answers(tokens=(1, 20, 2)):
    words = np.asarray([0xBF000000, 0x80000000, 1], np.uint32)  # -0.5, a negative zero, a subnormal number
    return {r.id: {"tokens": pack(np.asarray(tokens)), "words": pack(words)} for r in WORK.requests(5)}


def test_a_words_bits_survive_the_way_through_the_loop():
    from megatron.zero_mismatch.sample_queue import Group
    from megatron.zero_mismatch.weight_sync import Tag

    tokens, logprobs, rewards = WORK.answered(5, answers())
    assert all(one.dtype == torch.float32 for one in logprobs) and rewards == [2.0] * 4
    sequences = WORK.sequences(Group(5, Tag(0, ""), tokens, logprobs, [1.0, 3.0, 2.0, 2.0]))
    for request, sequence in zip(WORK.requests(5), sequences, strict=True):
        assert sequence["id"] == request.id and sequence["prompt"] == list(request.prompt)
        assert {key: sequence[key] for key in ("tokens", "words")} == answers()[request.id]
    assert [s["advantage"] for s in sequences] == [-1.0, 1.0, 0.0, 0.0], "the mean is that of the prompt's answers"


def test_a_missing_or_short_answer_is_an_error():
    short = answers() | {WORK.requests(5)[3].id: answers((1, 2))[WORK.requests(5)[3].id]}
    lost = dict(list(answers().items())[1:])
    for broken in (short, lost):
        with pytest.raises(RuntimeError, match="missing or short"):
            WORK.answered(5, broken)


def test_a_worker_from_other_files_than_the_learners_is_refused(monkeypatch):
    monkeypatch.setenv("FAKE_SITE", "/theirs")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    fake = str(pathlib.Path(__file__).with_name("prove_fake.py"))
    make = async_backend.MakeRollout(fake, {"model": "", "flags": {}}, WORK, "/ours/vllm")
    with pytest.raises(RuntimeError, match="runs /theirs/vllm, expected the learner's /ours/vllm"):
        make()


def test_a_model_that_a_workers_sync_would_not_reach_whole_is_refused():
    backend = types.SimpleNamespace(config={"architectures": ["DeepseekV4ForCausalLM"]})
    with pytest.raises(ValueError, match="no asynchronous loop for DeepseekV4ForCausalLM"):
        async_backend.Asynchronous.op_open(backend, work={}, max_lag=2, folder="")


# ---- the weights of an older version


def test_the_shadow_takes_the_weights_of_the_rollouts_version_or_nothing():
    from megatron.zero_mismatch.digest import tensor_digests, total_digest
    from megatron.zero_mismatch.weight_sync import Tag

    made, shadow = model(), model()
    masters = {name: p.detach() * 1.5 for name, p in made.named_parameters()}
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(masters[name])
    tag = Tag(3, total_digest(tensor_digests(made.exported())))
    learner = types.SimpleNamespace(shadow=shadow, shadow_version=None, masters={3: masters})
    async_backend.Learner._show(learner, tag)
    assert learner.shadow_version == 3
    assert all(torch.equal(p, masters[name]) for name, p in shadow.named_parameters())

    learner.shadow_version = 2
    masters["lm_head.weight"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(RuntimeError, match="the weights kept of version 3 have digest"):
        async_backend.Learner._show(learner, tag)
    assert learner.shadow_version is None, "the next answer looks again"
