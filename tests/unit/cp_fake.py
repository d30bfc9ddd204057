"""prove's context-parallel rank on a machine without GPUs or vLLM: gloo, the reference kernels, Megatron-core as is.

Environment CP_FAULT plants what must be noticed: "own rows" (ranks take their own rows for whole sequences), "no sum"
(gradients stay on their rank).
"""
import os

import torch
import trainer_fake  # noqa: F401 - a stand-in for psutil
from cuda_on_cpu import cuda_on_cpu
from megatron.zero_mismatch import context_parallel, kernels

from prove import cp_backend


class Backend(cp_backend.Backend):
    def __init__(self, *, rank, ranks, store, emit=None):
        self.placed = cuda_on_cpu()
        self.placed.__enter__()  # for the life of the process
        kernels.from_vllm = lambda page: kernels.reference()
        self._join("gloo", rank, ranks, store)
        self.fault = os.environ.get("CP_FAULT")
        if self.fault == "own rows":
            _keep_rows_apart()

    def info(self):
        return {"versions": {"vllm": "fake"}, "gpu": "none", "vllm_path": os.environ["FAKE_SITE"] + "/vllm",
                "start_seconds": 0.0, "rank": self.rank, "ranks": self.ranks}

    def op_actor(self, **arguments):
        made = super().op_actor(**arguments)
        if self.fault == "no sum":
            self.actor.ddp.finish_grad_sync = lambda: None
        return made


def _keep_rows_apart():
    """The exchange brings zeros in place of the other ranks' rows."""
    moved = context_parallel._moved

    def lost(x, send, recv, group):
        out, rank, begin = moved(x, send, recv, group), torch.distributed.get_rank(group), 0
        for other, count in enumerate(recv):
            if other != rank:
                out[begin:begin + count] = 0
            begin += count
        return out
    context_parallel._moved = lost
