"""What a sleep of the engine leaves to be put right, on a CPU: the allocator's regions are tensors of the test."""
import ctypes
import gc
import types

import pytest
import torch
from cuda_on_cpu import cuda_on_cpu

from prove.sleep import Sleeper, strays

NAN = float("nan")


class Model(torch.nn.Module):
    def __init__(self, pool: torch.Tensor):
        """As vLLM's models are: a parameter, a buffer that views it, a buffer, and a tensor that is neither."""
        super().__init__()
        self.weight = torch.nn.Parameter(pool[:4], requires_grad=False)
        self.register_buffer("view", self.weight.data.view(2, 2))


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def region(t: torch.Tensor) -> tuple[int, int]:
    return t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()


class Engine:
    """Sleeps as CuMemAllocator does: what is dropped comes back as anything; here as NaN."""

    def __init__(self, enabled=True):
        self.model = Model(tensor(1, 2, 3, 4))
        self.model.register_buffer("scale", tensor(5))
        self.model.broadcast = tensor(6, 7)  # neither parameter nor buffer
        self.elsewhere = tensor(8)           # not among the weights
        self.cache = tensor(9, 9)
        self.kv_caches = [self.cache[:1], self.cache[1:]]
        config = types.SimpleNamespace(enable_sleep_mode=enabled)
        self.vllm_config = types.SimpleNamespace(model_config=config)
        self.levels, self.wakes, self.used = [], True, 4 * 9

    def pool(self):
        return [self.model.weight, self.model.scale, self.model.broadcast]

    def regions(self, tag):
        return [region(t) for t in {"weights": self.pool(), "kv_cache": [self.cache]}[tag]]

    def bytes(self):
        return self.used

    def zero(self, address, size):
        ctypes.memset(address, 0, size)

    def sleep(self, level):
        self.levels.append(level)
        self.used = 0
        kept = self.model.scale.clone()  # vLLM keeps a model's buffers
        for t in [self.cache, *(self.pool() if level == 2 else [])]:
            t.fill_(NAN)
        self.model.scale.copy_(kept)

    def wake_up(self):
        return self.wakes


@pytest.fixture
def engine():
    with cuda_on_cpu():
        yield Engine()


def sleeper(engine):
    return Sleeper(engine, engine, engine)


def test_a_tensor_among_dropped_weights_comes_back_and_the_caches_are_zero(engine):
    made = sleeper(engine)
    said = made.sleep(2)
    assert engine.levels == [2] and said["strays"] == 1 and said["stray_bytes"] == 8 and said["freed_bytes"] == 36
    assert engine.model.broadcast.isnan().all()
    made.wake()
    assert engine.model.broadcast.tolist() == [6, 7] and engine.model.scale.tolist() == [5]
    assert engine.model.weight.isnan().all(), "the parameters are the sync's to bring back"
    assert engine.cache.tolist() == [0, 0] and engine.elsewhere.tolist() == [8]


def test_what_was_derived_since_is_kept_at_the_next_sleep(engine):
    made = sleeper(engine)
    for values in ([6, 7], [10, 11]):
        engine.model.broadcast.copy_(torch.tensor(values))
        made.sleep(2)
        made.wake()
        assert engine.model.broadcast.tolist() == values


def test_weights_that_are_kept_need_nothing_and_the_caches_are_zero(engine):
    made = sleeper(engine)
    assert made.sleep(1)["strays"] == 0
    made.wake()
    assert engine.model.weight.tolist() == [1, 2, 3, 4] and engine.cache.tolist() == [0, 0]


def test_strays_are_found_in_a_frozen_heap_and_the_heap_stays_frozen(engine):
    gc.collect()
    gc.freeze()
    try:
        found = strays(engine.regions("weights"), [engine.model.weight, engine.model.scale])
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert [t.view(torch.float32).tolist() for t in found] == [[6, 7]]


def test_two_tensors_of_one_storage_are_one_stray(engine):
    engine.model.half = engine.model.broadcast[1:]
    found = strays(engine.regions("weights"), [engine.model.weight, engine.model.scale])
    assert [len(t) for t in found] == [8]


def test_a_tensor_that_moved_in_its_sleep_is_an_error(engine):
    made = sleeper(engine)
    made.sleep(1)
    kept, engine.kv_caches[1] = engine.kv_caches[1], tensor(0)
    with pytest.raises(RuntimeError, match="first cache 1; captured graphs"):
        made.wake()
    del kept


def test_an_engine_that_stays_asleep_is_an_error(engine):
    made = sleeper(engine)
    made.sleep(1)
    engine.wakes = False
    with pytest.raises(RuntimeError, match="did not wake"):
        made.wake()


def test_an_engine_whose_memory_is_in_no_pool_is_refused():
    with pytest.raises(ValueError, match="without enable_sleep_mode"):
        sleeper(Engine(enabled=False))
