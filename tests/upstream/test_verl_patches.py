"""verl's step metrics, weight sync, reload and answers: upstream's functions as released and as patched.

Ray, ZMQ, the server and vLLM's model are plain Python here; what moves weights and tags answers is upstream's own code.
"""
import asyncio
import contextlib
import importlib
import logging
import os
import sys
import time
import types

import pytest
import torch
from megatron.zero_mismatch.weight_sync import SyncRefused, Tag
from upstream_source import define, patched, stock

from verl.zero_mismatch import resident, weight_sync

ROLLOUT = "verl/workers/rollout/vllm_rollout"
METRICS = "verl/utils/debug/metrics.py"


@pytest.fixture(autouse=True)
def aligned(monkeypatch):
    """Both arms run with the switch on: what differs is the patch."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(weight_sync, "CONFIRMED", weight_sync.Confirmed())


# Step metrics

def metrics(source, rollout, recomputed, mask):
    names = ["pearson_correlation_coefficient", "calculate_log_prob_diff", "calculate_debug_metrics"]
    scope = define(source, names, {"torch": torch, "os": os, "logger": logging.getLogger("verl")})
    batch = {"rollout_log_probs": rollout, "old_log_probs": recomputed, "response_mask": mask,
             "responses": torch.zeros(mask.shape)}
    return scope["calculate_debug_metrics"](types.SimpleNamespace(batch=batch))


def far_down():
    """Two tokens of probability 0 in fp32 whose logprobs differ, one with equal logprobs, and padding."""
    rollout = torch.tensor([[-105.0, -110.0, -0.5, 0.0]])
    recomputed = torch.tensor([[-106.0, -110.5, -0.5, -3.0]])
    return rollout, recomputed, torch.tensor([[1, 1, 1, 0]])


def test_words_that_differ_below_every_probability_are_counted():
    found = metrics(patched(METRICS), *far_down())
    assert (found["zero_mismatch/differing_words"], found["zero_mismatch/tokens"]) == (2, 3)
    assert 0 < found["zero_mismatch/max_dp"] < 1e-40 and found["zero_mismatch/k3"] > 0.1
    rollout, _, mask = far_down()
    equal = metrics(patched(METRICS), rollout, rollout.clone(), mask)
    assert [equal[f"zero_mismatch/{key}"] for key in ("differing_words", "invalid_tokens", "max_dp", "k3")] == [0] * 4
    zeros = torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.0, -1.0]])
    assert metrics(patched(METRICS), *zeros, torch.ones(1, 2))["zero_mismatch/differing_words"] == 1


def test_stock_metrics_call_underflowing_logprobs_equal():
    found = metrics(stock(METRICS), *far_down())
    assert found["training/rollout_probs_diff_valid"] == 1 and found["training/rollout_probs_diff_max"] == 0


@pytest.mark.parametrize("rollout,recomputed", [
    ([[-1.0, float("nan"), -2.0]], [[-1.0, float("nan"), -2.0]]),
    ([[-1.0, -float("inf"), -2.0]], [[-1.0, -float("inf"), -2.0]]),
    ([[-1.0, -3.0]], [[-1.0, -3.0, -2.0]])], ids=["nan", "infinite", "missing"])
def test_nan_and_missing_tokens_count_as_differing(rollout, recomputed):
    found = metrics(patched(METRICS), torch.tensor(rollout), torch.tensor(recomputed), torch.ones(1, 3))
    assert (found["zero_mismatch/differing_words"], found["zero_mismatch/invalid_tokens"]) == (1, 1)
    assert found["training/rollout_probs_diff_valid"] == 0


def test_rounded_or_foreign_logprobs_are_refused():
    ones = torch.ones(1, 3)
    with pytest.raises(ValueError, match="old_log_probs in torch.bfloat16"):
        metrics(patched(METRICS), -ones, -ones.bfloat16(), ones)
    with pytest.raises(ValueError, match="no column beyond"):
        metrics(patched(METRICS), -torch.ones(1, 4), -ones, ones)


def test_metrics_are_upstreams_own_when_the_switch_is_off(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert metrics(patched(METRICS), *far_down()) == metrics(stock(METRICS), *far_down())


# Weight sync and reload

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 4, bias=False)
        self.proj.absorbed = self.proj.weight.detach() * 2  # a plain attribute, as MLA keeps its projections
        self.register_buffer("scale", torch.ones(3))

    @torch.no_grad()
    def load_weights(self, updates):
        for name, tensor in updates:
            self.get_parameter(name).copy_(tensor)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"proj.weight": torch.randn(4, 8, generator=generator), "scale": torch.randn(3, generator=generator)}


def in_place(model, *_):
    model.proj.absorbed.copy_(model.proj.weight.detach() * 2)


def rebinding(model, *_):
    """What vLLM does where a kernel wants another layout: new storage for the parameter and for what is derived."""
    model.proj.weight = torch.nn.Parameter(model.proj.weight.detach().clone(), requires_grad=False)
    model.proj.absorbed = model.proj.weight.detach() * 2


class Remote:
    """A Ray actor's method."""

    def __init__(self, function):
        self.function = function

    async def remote(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Bench:
    """One trainer rank and one engine worker, joined by a list instead of a socket."""

    def __init__(self, monkeypatch, arm, post=in_place):
        self.wire, self.versions, self.meddle = [], [], None
        module = types.ModuleType
        modules = {"verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": module("transfer"),
                   "vllm.model_executor.model_loader.utils": module("utils"),
                   "verl.workers.rollout.utils": module("rollout_utils")}
        for name, one in modules.items():
            monkeypatch.setitem(sys.modules, name, one)
        transfer, loader, rollout_utils = modules.values()
        transfer.BucketedWeightReceiver = self._receiver
        loader.process_weights_after_loading = post
        define(stock("verl/workers/rollout/utils.py"), ["ensure_async_iterator"], vars(rollout_utils))
        self.worker, self.adapter = self._worker(arm), self._adapter(arm)
        self.model = self.worker.model_runner.model

    def _worker(self, arm):
        scope = {"torch": torch, "logger": logging.getLogger("verl"), "Base": object,
                 "is_quantized_model": lambda config: False, "patch_vllm_moe_model_weight_loader": lambda model: None}
        define(stock(f"{ROLLOUT}/weight_update_utils.py"), ["split_buffer_updates", "apply_buffer_updates"], scope)
        methods = ["update_weights_from_ipc", "_update_weights", "_apply_buffer_updates_all_models"]
        methods += ["commit_guarded_weights"] if arm is patched else []
        cls = define(arm(f"{ROLLOUT}/utils.py"), [f"vLLMColocateWorkerExtension.{name}" for name in methods],
                     scope)["vLLMColocateWorkerExtension"]
        worker = cls()
        config = types.SimpleNamespace(model_config=None)
        worker.model_runner = types.SimpleNamespace(model=Model(), vllm_config=config)
        worker._iter_all_models = lambda: [worker.model_runner.model]
        worker._iter_all_models_with_config = lambda: [(worker.model_runner.model, None)]
        worker.device, worker._is_qat_model, worker._is_modelopt_qat = torch.device("cpu"), False, False
        worker._get_zmq_handle = lambda: "ipc://none"
        return worker

    def _adapter(self, arm):
        scope = {"torch": torch, "time": time, "os": os, "logger": logging.getLogger("verl"), "Base": object,
                 "BucketedWeightSender": lambda **_: types.SimpleNamespace(async_send_weights=self._send)}
        adapter = define(arm(f"{ROLLOUT}/vllm_rollout.py"), ["ServerAdapter.update_weights"], scope)["ServerAdapter"]()
        adapter.config = types.SimpleNamespace(
            checkpoint_engine=types.SimpleNamespace(update_weights_bucket_megabytes=1))
        adapter.zmq_handle, adapter.use_shm, adapter._has_server = "ipc://none", True, True
        adapter.replica_rank = adapter.rollout_rank = 0
        adapter.server_handle = types.SimpleNamespace(clear_kv_cache=Remote(lambda: None),
                                                      set_global_steps=Remote(self.versions.append))
        adapter._execute_method = self._execute
        return adapter

    async def _execute(self, method, non_block=False, args=(), kwargs=None):
        call = Remote(getattr(self.worker, method)).remote(*args, **(kwargs or {}))
        return call if non_block else await call

    async def _send(self, stream):
        from verl.workers.rollout.utils import ensure_async_iterator

        self.wire = [[(name, tensor.clone())] async for name, tensor in ensure_async_iterator(stream)]
        if self.meddle:
            self.meddle(self.wire)

    def _receiver(self, **_):
        def receive_weights(on_bucket_received):
            for number, bucket in enumerate(self.wire):
                on_bucket_received(bucket, number == len(self.wire) - 1)
        return types.SimpleNamespace(receive_weights=receive_weights)

    def sync(self, seed, version, **options):
        return asyncio.run(self.adapter.update_weights(iter(weights(seed).items()), global_steps=version,
                                                       peft_config=None, base_sync_done=True, **options))

    def holds(self, seed) -> bool:
        state = self.model.state_dict()
        return all(torch.equal(state[name], tensor) for name, tensor in weights(seed).items()) and torch.equal(
            self.model.proj.absorbed, self.model.proj.weight * 2)

    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in (self.model.proj.weight, self.model.proj.absorbed, self.model.scale)]


def flip_a_bit(wire):
    wire[0][0][1].view(torch.int32)[2, 3] ^= 1


def lose_one(wire):
    del wire[-1]


def send_twice(wire):
    wire.append(wire[0])


def test_a_sync_delivers_and_confirms_one_version(monkeypatch):
    bench = Bench(monkeypatch, patched)
    first, second = bench.sync(1, 5), bench.sync(2, 6)
    assert bench.holds(2) and bench.versions == [5, 6]
    assert (first.version, second.version) == (5, 6) and first.digest != second.digest
    assert bench.sync(2, 6) == second, "the same weights again, after a sleep that dropped them"


@pytest.mark.parametrize("fault", [flip_a_bit, lose_one, send_twice])
def test_a_word_changed_on_the_way_is_refused_before_the_version_is_set(monkeypatch, fault):
    bench = Bench(monkeypatch, patched)
    bench.sync(1, 5)
    bench.meddle = fault
    with pytest.raises(SyncRefused, match="proj.weight|scale"):
        bench.sync(2, 6)
    assert bench.versions == [5]
    bench.meddle = None
    assert bench.sync(2, 6).version == 6 and bench.holds(2), "a sync after a refused one makes it whole"


@pytest.mark.parametrize("fault", [flip_a_bit, lose_one])
def test_stock_sync_sets_the_version_whatever_arrived(monkeypatch, fault):
    bench = Bench(monkeypatch, stock)
    bench.meddle = fault
    bench.sync(2, 6)
    assert bench.versions == [6] and not bench.holds(2)


def test_versions_never_fall_and_never_name_two_digests(monkeypatch):
    bench = Bench(monkeypatch, patched)
    bench.sync(1, 5)
    for seed, version in ((2, 4), (2, 5)):
        with pytest.raises(SyncRefused, match="expected a newer version than 5"):
            bench.sync(seed, version)
    assert bench.versions == [5]


def test_what_has_no_digest_is_refused_before_anything_is_sent(monkeypatch):
    bench = Bench(monkeypatch, patched)
    for options, words in (({"version": None}, "without a version"),
                           ({"version": 1, "wire_format": "delta_flush"}, "delta_flush")):
        with pytest.raises(SyncRefused, match=words):
            bench.sync(1, **options)
    with pytest.raises(SyncRefused, match="LoRA"):
        asyncio.run(bench.adapter.update_weights(iter([]), global_steps=1, peft_config={"r": 8}))
    with pytest.raises(SyncRefused, match="no complete stream"):
        weight_sync.Outgoing(iter([]), 1, "named_tensors", None).manifest()
    with pytest.raises(SyncRefused, match="no weights before it"):
        sent = weight_sync.Manifest(1, weight_sync.total_digest({}), {})
        bench.worker.commit_guarded_weights(sent.to_json())
    assert bench.wire == [] and bench.versions == []


def test_sync_is_upstreams_own_when_the_switch_is_off(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    bench = Bench(monkeypatch, patched, rebinding)
    assert bench.sync(1, 5) is None and bench.holds(1) and bench.versions == [5]
    assert not {weight_sync.ATTRIBUTE, resident.ATTRIBUTE} & vars(bench.worker).keys()


def test_a_rebound_weight_is_copied_back_to_its_address(monkeypatch):
    bench = Bench(monkeypatch, patched, rebinding)
    before, graph = bench.addresses(), bench.model.proj.weight.detach()  # as a captured graph reads it
    for version in (1, 2, 3):
        bench.sync(version, version)
        assert bench.addresses() == before and bench.holds(version)
        assert torch.equal(graph, weights(version)["proj.weight"])


@pytest.mark.parametrize("family", ["tiny_nemotron", "tiny_deepseek_v4"])
def test_every_weight_of_our_models_is_brought_back_to_its_address(family):
    """Post-processing that rebinds each parameter, on the trainers' models: the names and shapes that are sent."""
    model = importlib.import_module(family).model()
    keeper = resident.Resident(lambda: [model])
    for seed in (1, 2):
        keeper.begin()
        before = {name: (p.data_ptr(), p.detach()) for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, old in list(model.named_parameters()):
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(old.clone(), requires_grad=False))
                model.get_parameter(name).view(torch.uint8).bitwise_xor_(seed)
        wanted = {name: p.detach().clone().view(torch.uint8) for name, p in model.named_parameters()}
        assert keeper.settle() == len(before)
        for name, p in model.named_parameters():
            address, graph = before[name]
            assert p.data_ptr() == address
            assert torch.equal(p.view(torch.uint8), wanted[name]) and torch.equal(graph.view(torch.uint8), wanted[name])


def test_stock_reload_moves_a_rebound_weight(monkeypatch):
    bench = Bench(monkeypatch, stock, rebinding)
    before, graph = bench.addresses(), bench.model.proj.weight.detach()
    for version in (1, 2):
        bench.sync(version, version)
    assert bench.addresses() != before and bench.holds(2) and not torch.equal(graph, weights(2)["proj.weight"])


def transposing(model, *_):
    model.proj.weight = torch.nn.Parameter(model.proj.weight.detach().t().contiguous(), requires_grad=False)


def exchanging(model, *_):
    """Two tensors trade their storages."""
    weight, absorbed = model.proj.weight.data, model.proj.absorbed
    model.proj.weight.data, model.proj.absorbed = absorbed, weight


@pytest.mark.parametrize("post,words", [(transposing, "changed in this reload"), (exchanging, "exchanged storages")])
def test_a_reload_that_cannot_go_back_is_refused(monkeypatch, post, words):
    bench = Bench(monkeypatch, patched, post)
    with pytest.raises(SyncRefused, match=words):
        bench.sync(1, 1)
    assert bench.versions == []


def test_a_weight_moved_between_syncs_is_refused_after_the_sender_was_answered(monkeypatch):
    bench = Bench(monkeypatch, patched)
    bench.sync(1, 1)
    rebinding(bench.model)
    with pytest.raises(SyncRefused, match="since the first sync"):
        bench.sync(2, 2)
    assert bench.wire and bench.versions == [1]


# Answers and the driver

def answer(arm, versions):
    """What the server says of a request that was admitted at versions[0] and ended at versions[-1]."""
    class Server:
        global_steps = versions[0]
        lora_as_adapter, _disaggregation_role, _pd_decode_peers = False, "null", []
        _admitting, replica_rank, model_config = 1, 0, types.SimpleNamespace(processor=None)
        config = types.SimpleNamespace(max_model_len=64, response_length=8, prompt_length=8, full_determinism=False,
                                       enable_rollout_routing_replay=False, mtp=None, get=lambda key, default: default)

        async def _park_until_admitted(self, request_id):
            return None

        @property
        def engine(self):
            async def generate(**_):
                for version in versions:
                    self.global_steps = version
                    yield types.SimpleNamespace(outputs=[])  # as an aborted request ends: nothing else is read
            return types.SimpleNamespace(generate=generate)

    scope = {"os": os, "Base": Server, "normalize_token_ids": list, "SamplingParams": types.SimpleNamespace,
             "qwen2_5_vl_dedup_image_tokens": lambda ids, processor: ids, "TokensPrompt": dict,
             "RLInsightLogger": types.SimpleNamespace(trace_state=lambda *_, **__: contextlib.nullcontext()),
             "TokenOutput": types.SimpleNamespace}
    cls = define(arm(f"{ROLLOUT}/vllm_async_server.py"), ["vLLMHttpServer.generate"], scope)["vLLMHttpServer"]
    return asyncio.run(cls().generate([1, 2, 3], {}, "r0")).extra_fields["global_steps"]


def test_an_answer_that_straddles_a_sync_is_refused():
    assert answer(patched, [4, 4]) == 4
    with pytest.raises(SyncRefused, match="begun with weights of version 4 and ended with version 5"):
        answer(patched, [4, 5])


def test_stock_answer_that_straddles_a_sync_has_the_new_version():
    assert answer(stock, [4, 5]) == 5


def driver_sync(arm, sent, backend="naive"):
    """The driver's half: `sent` is what the ranks return."""
    async def nothing(self):
        return None

    steps = ("abort_replicas", "release_kv_cache_replicas", "resume_kv_cache_replicas", "resume_generation_replicas")
    base = type("Base", (), dict.fromkeys(steps, nothing))
    group = types.SimpleNamespace(update_weights=lambda **_: sent, execute_checkpoint_engine=lambda _: [],
                                  world_size=len(sent))
    scope = {"os": os, "ray": types.SimpleNamespace(get=lambda found: found), "Base": base, "_worker_cls": None,
             "RayWorkerGroup": lambda **_: group, "RayClassWithInitArgs": lambda **_: None}
    cls = define(arm("verl/checkpoint_engine/base.py"), ["CheckpointEngineManager.update_weights"], scope)
    manager = cls["CheckpointEngineManager"]()
    manager.backend, manager.actor_wg, manager.replicas, manager.build_process_group = backend, group, [], print
    return asyncio.run(manager.update_weights(global_steps=3))


def recompute(arm, tags):
    """The V1 trainer's first step on a batch, in the mode that stops soonest."""
    batches = []
    store = types.SimpleNamespace(kv_batch_get=lambda **_: {"rollout_log_probs": None},
                                  kv_batch_put=lambda **given: batches.append(given))
    cls = define(arm("verl/trainer/ppo/v1/trainer_base.py"), ["PPOTrainer._compute_old_log_prob"],
                 {"os": os, "tq": store, "Base": object})["PPOTrainer"]
    trainer = cls()
    trainer.config = types.SimpleNamespace(algorithm={"rollout_correction": {"bypass_mode": True}})
    trainer._compute_old_log_prob(types.SimpleNamespace(tags=tags, keys=[], partition_id="train"), {})
    return len(batches)


def tag(low, high, **more):
    return {"min_global_steps": low, "max_global_steps": high, **more}


@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_a_rollout_of_an_unconfirmed_version_is_refused(backend):
    driver_sync(patched, [Tag(3, "a"), Tag(3, "a")], backend)
    assert recompute(patched, [tag(3, 3), tag(None, None, is_padding=True)]) == 1
    for low, high in ((3, 4), (2, 3), (None, None)):
        with pytest.raises(SyncRefused, match="found rollout 1 with"):
            recompute(patched, [tag(3, 3), tag(low, high)])


def test_stock_trainer_takes_any_version():
    driver_sync(stock, [Tag(3, "a"), Tag(3, "b")])
    assert recompute(stock, [tag(17, 99)]) == 1


def test_ranks_must_confirm_one_digest():
    for sent in ([Tag(3, "a"), Tag(3, "b")], [Tag(3, "a"), None], [None], []):
        with pytest.raises(SyncRefused, match="answers to one weight sync"):
            driver_sync(patched, sent)
    driver_sync(patched, [Tag(3, "a")])
    driver_sync(patched, [Tag(3, "a")])
    for sent in (Tag(3, "b"), Tag(2, "a")):
        with pytest.raises(SyncRefused, match="expected a newer version than 3"):
            driver_sync(patched, [sent])


def test_what_the_adapter_confirmed_reaches_the_driver():
    """Both workers between them hand on what update_weights returned."""
    async def update_weights(*_, **__):
        return Tag(3, "a")

    base = type("Base", (), {})
    worker = define(patched("verl/checkpoint_engine/base.py"), ["CheckpointEngineWorker.update_weights"],
                    {"Base": base})["CheckpointEngineWorker"]()
    worker.checkpoint_engine = types.SimpleNamespace(receive_weights=lambda **_: [])
    worker.server_adapter = types.SimpleNamespace(update_weights=update_weights)
    assert asyncio.run(worker.update_weights(3)) == Tag(3, "a")
    scope = {"Base": base, "set_expandable_segments": lambda on: None, "log_gpu_memory_usage": lambda *_, **__: None,
             "logger": None, "get_torch_device": lambda: device}
    device = types.SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
    actor = define(patched("verl/workers/engine_workers.py"), ["ActorRolloutRefWorker.update_weights"],
                   scope)["ActorRolloutRefWorker"]()
    actor.config = types.SimpleNamespace(rollout=types.SimpleNamespace(free_cache_engine=False, get=lambda *_: "vllm"))
    actor.actor = types.SimpleNamespace(engine=types.SimpleNamespace(
        get_per_tensor_param=lambda **_: ([], None), is_param_offload_enabled=False))
    actor.rollout, actor.layered_summon, actor.peft_merge = worker.server_adapter, False, False
    assert asyncio.run(actor.update_weights(3, mode="naive")) == Tag(3, "a")
