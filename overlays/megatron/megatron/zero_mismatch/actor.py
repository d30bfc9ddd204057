"""The actor: an aligned model under Megatron-core's data-parallel buffers, distributed optimizer and checkpoints.

Megatron owns what moves weights (fp32 main parameters, gradient buffers, AdamW, sharded checkpoints), this package what
computes values. Between them stands the guard: every output is sealed, so a backward on weights that are not its
forward's raises, and the version advances with the optimizer's step and with nothing else.

Micro-batches: `accumulate` may be called any number of times before `update`. Gradients add up in fp32 buffers in the
order of the calls. Ranks share a batch by context parallelism (`context_parallel`), or there is one: data, tensor,
pipeline and expert parallelism are refused, not emulated. Every rank makes the same calls with the same arguments.
Runs without TransformerEngine and apex: Megatron then takes torch.optim.AdamW (core/optimizer/__init__.py of 0.19.2).
"""
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from .context_parallel import ALONE, Ranks
from .packing import Packed
from .version_guard import WeightGuard

_VERSION_FILE = "zero_mismatch.json"
WRITERS = 4  # threads, and files, of a checkpoint; half of it is AdamW's two moments, each one tensor


def _groups(ranks: int) -> Ranks:
    """Megatron's process groups over the default group: the engine's own, when it made one in this process."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        raise ValueError("actor: found no process group, expected one; call torch.distributed.init_process_group first "
                         "(an engine in the same process has done so)")
    if (world := torch.distributed.get_world_size()) != ranks:
        raise ValueError(f"actor: found {world} ranks, expected {ranks}, the context-parallel size; other ways to "
                         "share the work are not proven")
    if not parallel_state.model_parallel_is_initialized():
        # Gloo groups serve host-side gathers, which nothing here makes.
        parallel_state.initialize_model_parallel(context_parallel_size=ranks, create_gloo_process_groups=False)
    if (found := parallel_state.get_context_parallel_world_size()) != ranks:
        raise ValueError(f"actor: found Megatron's groups of context-parallel size {found}, expected {ranks}")
    return Ranks(parallel_state.get_context_parallel_group()) if ranks > 1 else ALONE


def _param_groups(config) -> dict:
    """Megatron's usual groups, and the fp32 parameters (router, decay rates) in one of their own.

    A group that holds both dtypes is numbered in buffer order but handed to AdamW with fp32 first
    (optimizer/distrib_optimizer.py:344 and :485 of 0.19.2), so its checkpoint mixes up the states. The learning rate
    given here is the one they would have anyway; naming it is what makes the group another one.
    """
    from megatron.core.optimizer import ParamKey, get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    fp32 = ParamPredicate(name="fp32", fn=lambda p: p.dtype == torch.float32)
    return {**get_standard_config_overrides(config), ParamKey(predicate=fp32): {"wd_mult": 0.0, "max_lr": config.lr}}


class Actor:
    """model: its parameters may lie anywhere before; they move into Megatron's flat buffers here, once.
    context_parallel: how many ranks share each batch; all that there are."""

    def __init__(self, model: nn.Module, *, heads: int, layers: int, hidden: int, lr: float, clip: float = 1.0,
                 weight_decay: float = 0.0, context_parallel: int = 1):  # fmt: skip
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        self.ranks = _groups(context_parallel)
        self.model = model
        config = TransformerConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, bf16=True,
                                   params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
                                   context_parallel_size=context_parallel,
                                   calculate_per_token_loss=True)  # gradients of the ranks are summed, not averaged
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True,
                                                check_for_nan_in_grad=True)
        self.ddp = DistributedDataParallel(config, buffers, model)
        adam = OptimizerConfig(optimizer="adam", lr=lr, weight_decay=weight_decay, clip_grad=clip, bf16=True,
                               params_dtype=torch.bfloat16, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(adam, [self.ddp], _param_groups(adam), use_gloo_process_groups=False)
        self.guard = WeightGuard(lambda: self.model.named_parameters())
        self.guard.watch(self.optimizer)

    def logprobs(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """fp32 [tokens] on every rank, sealed: see the model's forward."""
        return self.guard.seal(self.ddp(tokens, replace(packed, ranks=self.ranks)))

    def accumulate(self, loss: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, packed: Packed) -> float:
        """One micro-batch: forward, `loss` of its logprobs (the same on every rank), backward into the fp32 buffers."""
        value = loss(self.logprobs(tokens, packed))
        value.backward()
        return value.item()

    def update(self) -> float:
        """One optimizer step on what was accumulated; the gradient's norm."""
        self.ddp.finish_grad_sync()
        done, norm, _ = self.optimizer.step()
        if not done:
            raise RuntimeError("actor: the optimizer skipped its step: a gradient is not finite")
        self.ddp.zero_grad_buffer()
        return float(norm)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The accumulated fp32 gradient of each parameter that has one, by the model's names, summed over the ranks."""
        found = {name: p.main_grad for name, p in self.model.named_parameters() if p.requires_grad}
        if self.ranks.size > 1:
            found = {name: grad.clone() for name, grad in found.items()}
            for grad in found.values():
                torch.distributed.all_reduce(grad, group=self.ranks.group)
        return found

    def save(self, folder: Path) -> None:
        """Weights, optimizer state, and the version with its digest. `folder` must be empty or absent, and the same for
        every rank."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        folder.mkdir(parents=True, exist_ok=True)
        stamp, _ = self.guard.export()
        writers = TorchDistSaveShardedStrategy(thread_count=WRITERS)
        dist_checkpointing.save(self._state(is_loading=False), str(folder), writers)
        saved = {"version": stamp.version, "digest": stamp.digest, "steps": self._steps()}
        if self.ranks.rank == 0:
            (folder / _VERSION_FILE).write_text(json.dumps(saved))

    def load(self, folder: Path) -> None:
        """The saved bytes into this actor's tensors, in place; raises unless every bit is the saved one."""
        from megatron.core import dist_checkpointing

        saved = json.loads((folder / _VERSION_FILE).read_text())
        state = dist_checkpointing.load(self._state(is_loading=True), str(folder))
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in state["model"].items():
                named[name].copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])  # copies into fp32 weights that require a gradient
        self._restore_steps(saved["steps"])
        self.guard.reload(saved["version"], saved["digest"])

    def _state(self, is_loading: bool) -> dict:
        from megatron.core.dist_checkpointing import ShardedTensor

        self._steps()
        # Every rank holds the whole weights; the first one's copy is written.
        model = {name: ShardedTensor.from_rank_offsets(name, p.detach(), replica_id=self.ranks.rank)
                 for name, p in self.model.named_parameters()}
        parts = self.optimizer.sharded_state_dict(
            {name: ShardedTensor.from_rank_offsets(name, p) for name, p in self.model.named_parameters()},
            is_loading=is_loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"},
        )  # fmt: skip
        return {"model": model, "optimizer": parts}

    def _states(self):
        """AdamW's state of every main parameter this rank holds; made where a first step has not made it yet."""
        for part in self.optimizer.chained_optimizers:
            for p in (p for group in part.optimizer.param_groups for p in group["params"]):
                if not part.optimizer.state[p]:
                    part.optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p),
                                               "exp_avg_sq": torch.zeros_like(p)}
                yield part.optimizer.state[p]

    # Without TransformerEngine and apex, 0.19.2 reads the number of steps out of the states, also when it is about to
    # load them, and then loads it over itself (optimizer/distrib_optimizer.py:837, :1215): it is kept here as well.
    def _steps(self) -> int:
        (steps,) = {int(state["step"]) for state in self._states()}
        return steps

    def _restore_steps(self, steps: int) -> None:
        for state in self._states():
            state["step"] = torch.tensor(float(steps))
