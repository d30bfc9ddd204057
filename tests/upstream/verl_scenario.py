"""A weight sync through verl itself, on a CPU: its ServerAdapter, worker extension, CheckpointEngineManager and
DataProto, real Ray actors, ZMQ and shared memory, vLLM's process_weights_after_loading. Prints what was seen as JSON.

Stand-ins: the engine's model is one linear layer, the trainer's weights are random numbers, and verl's platform is a
CPU, by the hook that verl has for other platforms. `python verl_scenario.py`, with verl on the path as released or
patched; test_verl_scenario.py runs both.
"""
import json
import os
import traceback
import types

import ray
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

NAMES = {"model.proj.weight": (8, 16), "model.scale": (3,)}


class Device(types.SimpleNamespace):
    """torch.cpu, and what verl asks of a device besides."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


class Cpu(PlatformCUDA):
    device_name, vendor_name = "cpu", "none"
    device_module = Device(empty_cache=lambda: None, ipc_collect=lambda: None)

    def is_available(self):
        return True

    def is_ipc_supported(self):
        return False


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def engine_worker():
    """What vLLM mixes verl's extension into, around a layer whose post-processing rebinds its weight."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Rebinding(QuantizeMethodBase):
        create_weights = apply = None

        def process_weights_after_loading(self, layer):
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Module()
            self.model.proj = torch.nn.Linear(16, 8, bias=False)
            self.model.proj.quant_method = Rebinding()
            self.model.register_buffer("scale", torch.ones(3))

        @torch.no_grad()
        def load_weights(self, updates):
            for name, tensor in updates:
                self.get_parameter(name).copy_(tensor)

    class Worker(vLLMColocateWorkerExtension):
        def __init__(self, vllm_config):
            self.model_runner = types.SimpleNamespace(model=Model(), vllm_config=vllm_config)
            self.device, self.local_rank = torch.device("cpu"), 0

    model = types.SimpleNamespace(dtype=torch.float32, word_embeddings_untied_by_checkpoint=False,
                                  quantization=None)
    return Worker(vllm_config=types.SimpleNamespace(model_config=model, quant_config=None, parallel_config=None,
                                                    speculative_config=None))


@ray.remote(num_cpus=1)
class Server:
    """The part of vLLMHttpServer that a sync calls."""

    def __init__(self):
        set_platform(Cpu())
        os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()
        self.worker, self.versions = engine_worker(), []
        self.graph = self.worker.model_runner.model.model.proj.weight.detach()  # as a captured graph reads it

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        try:
            return [getattr(self.worker, method)(*args, **(kwargs or {}))]
        except Exception:
            traceback.print_exc()  # the sender waits for ever where this raises before it receives
            raise

    def clear_kv_cache(self):
        pass

    def set_global_steps(self, version):
        self.versions.append(version)

    def flip_a_bit_on_the_way(self, on):
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

        receiver = bucketed_weight_transfer.BucketedWeightReceiver
        self.stock = getattr(self, "stock", receiver.receive_weights)

        def receive_weights(one, on_bucket_received):
            def flipped(weights, is_last):
                weights[0][1].view(torch.int32)[0, 0] ^= 1
                on_bucket_received(weights, is_last)
            self.stock(one, on_bucket_received=flipped)
        receiver.receive_weights = receive_weights if on else self.stock

    def seen(self, seed):
        state = self.worker.model_runner.model.state_dict()
        wanted = weights(seed)
        return {"holds": all(torch.equal(state[name], tensor) for name, tensor in wanted.items()),
                "graph_reads_it": torch.equal(self.graph, wanted["model.proj.weight"]), "versions": self.versions}


@ray.remote(num_cpus=1)
class Trainer:
    """One trainer rank: verl's ServerAdapter, fed by a generator."""

    def __init__(self):
        set_platform(Cpu())
        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        from verl.workers.config import RolloutConfig
        from verl.workers.config.rollout import CheckpointEngineConfig
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        engine = CheckpointEngineConfig(update_weights_bucket_megabytes=1)
        config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=engine)
        self.adapter = ServerAdapter(config, None, None)
        self.seed = 0

    async def update_weights(self, global_steps, mode="naive"):
        self.seed += 1
        tag = await self.adapter.update_weights(iter(weights(self.seed).items()), global_steps=global_steps,
                                                peft_config=None, base_sync_done=True)
        return None if tag is None else tuple(tag)


def outcome(call):
    try:
        found = call()
        return list(found) if isinstance(found, tuple) else found
    except Exception as error:  # noqa: BLE001 - which error is what the test asks
        return type(getattr(error, "cause", error)).__name__


def metrics():
    from verl import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    rollout = torch.tensor([[-105.0, -110.0, -0.5, 0.0]])
    recomputed = torch.tensor([[-106.0, -110.5, -0.5, -3.0]])
    batch = DataProto.from_dict(tensors={
        "rollout_log_probs": rollout, "old_log_probs": recomputed, "responses": torch.zeros(1, 4, dtype=torch.int64),
        "response_mask": torch.tensor([[1, 1, 1, 0]]), "attention_mask": torch.ones(1, 8, dtype=torch.int64)})
    return {key: float(value) for key, value in calculate_debug_metrics(batch).items()}


def manager(trainer):
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.workers.config.rollout import CheckpointEngineConfig

    group = types.SimpleNamespace(update_weights=lambda **given: [trainer.update_weights.remote(**given)])
    made = CheckpointEngineManager(CheckpointEngineConfig(backend="naive"), group, [])
    return lambda version: made.update_weights(global_steps=version)


def main():
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
    set_platform(Cpu())
    server = Server.options(name="vllm_server_0_0").remote()
    trainer = Trainer.remote()
    update = manager(trainer)

    def sync(version):
        return outcome(lambda: ray.get(trainer.update_weights.remote(version)))

    said = {"metrics": metrics()}
    said["syncs"] = [sync(5), sync(6)]
    said["after"] = ray.get(server.seen.remote(2))
    ray.get(server.flip_a_bit_on_the_way.remote(True))
    said["flipped"] = sync(7)
    said["after_flipped"] = ray.get(server.seen.remote(3))
    ray.get(server.flip_a_bit_on_the_way.remote(False))
    said["driver"] = outcome(lambda: update(8))
    said["after_driver"] = ray.get(server.seen.remote(4))
    said["driver_falls_back"] = outcome(lambda: update(4))
    ray.shutdown()
    print("SEEN " + json.dumps(said))


if __name__ == "__main__":
    main()
