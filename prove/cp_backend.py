"""Runs inside one rank's process: the aligned actor under context parallelism, without an engine.

Every rank is given the same calls with the same arguments, at the same time: their operators wait for each other.
"""
from __future__ import annotations

import pathlib
import time
import types

from prove import trainer_backend
from prove.trainer_backend import _training


class Backend(trainer_backend.Backend):
    def __init__(self, *, rank: int, ranks: int, store: str, emit=lambda message: None):
        started = time.monotonic()
        import torch

        if (found := torch.cuda.device_count()) < ranks:
            raise ValueError(f"found {found} GPUs, expected {ranks}: each rank takes one; show more of them in "
                             "CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(rank)
        self._invariant()
        self._join("nccl", rank, ranks, store)
        self.start_seconds = time.monotonic() - started

    def _invariant(self) -> None:
        """PyTorch's GEMMs and reductions as the engine's init_batch_invariance sets them in the lone actor's process:
        nothing but the sharing shall part the gradients, and PyTorch by itself may add up the parts of a sum in BF16.
        What that function sets of NCCL is left out: it holds a collective to one channel."""
        import torch
        from vllm.model_executor.determinism.batch_invariant import enable_batch_invariant_mode

        enable_batch_invariant_mode()
        torch.backends.cuda.matmul.fp32_precision = "ieee"

    def _join(self, transport: str, rank: int, ranks: int, store: str) -> None:
        import torch

        torch.distributed.init_process_group(transport, rank=rank, world_size=ranks, init_method=f"file://{store}")
        self.rank, self.ranks, self.actor = rank, ranks, None

    def info(self) -> dict:
        import torch
        import triton
        import vllm

        return {"versions": {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__,
                             "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
                "gpu": torch.cuda.get_device_name(self.rank), "vllm_path": str(pathlib.Path(vllm.__file__).parent),
                "start_seconds": round(self.start_seconds, 1), "rank": self.rank, "ranks": self.ranks}

    def op_actor(self, *, lr: float, weights: str, page: int) -> dict:
        """`weights`: what another actor's save_weights wrote; `page`: tokens of its engine's KV page."""
        import torch

        self.saved = torch.load(weights)
        self.config = self.saved["config"]
        self.scheduler = types.SimpleNamespace(block_size=page)
        with _training():
            self.actor = self._build(lr, recompute=True)
        return {"optimizer": type(self.actor.optimizer.chained_optimizers[0]).__name__,
                "weights": self.actor.guard.digest}

    def _tables(self, where: str) -> tuple:
        if where == "deepseek_v4":
            from megatron.zero_mismatch import kernels_dsv4

            return kernels_dsv4.from_vllm(), {ratio: table.cuda() for ratio, table in self.saved["tables"].items()}
        return super()._tables(where)

    def _start(self, model) -> None:
        model.load_state_dict(self.saved["masters"])

    def op_score(self, *, sequences: list[dict], micro: int) -> dict:
        return self._score(self.actor.logprobs, sequences, micro)

    def op_score_alone(self, *, sequences: list[dict], micro: int) -> dict:
        """The same weights without the other ranks: the model over batches that are all this process's own."""
        return self._score(self.actor.model, sequences, micro)

    def op_distance(self, *, before: str, theirs: str) -> float | None:
        """Of this actor's weights from those in `theirs`, relative to theirs from `before`, over all of them: two files
        of save_weights. None: theirs are those before."""
        import torch

        before, theirs = (torch.load(path, map_location="cpu", mmap=True)["masters"] for path in (before, theirs))
        apart = moved = 0.0
        for name, own in self.actor.model.state_dict().items():
            was, now = (side[name].to(own.device).double() for side in (before, theirs))
            apart += float((own.double() - now).square().sum())
            moved += float((now - was).square().sum())
        return (apart / moved) ** 0.5 if moved else None

    def op_update(self, *, sequences: list[dict], micro: int) -> dict:
        with _training():
            return self._learn(sequences, micro)
