"""prove's cost backend on a machine without a GPU or vLLM: reference kernels in the aligned model, Megatron-core as is.

Two environment variables reach it: FAMILY is the model's, FAULT "another model" gives the ordinary one other weights.
"""
import os

import tiny_deepseek_v4
import tiny_nemotron
import torch
from cuda_on_cpu import cuda_on_cpu
from megatron.zero_mismatch import kernels, kernels_dsv4

from prove import cost_backend

CONFIGS = {"nemotron_h": tiny_nemotron.CONFIG, "deepseek_v4": tiny_deepseek_v4.CONFIG}


class Backend(cost_backend.Backend):
    def __init__(self, **start):
        self.placed = cuda_on_cpu()
        self.placed.__enter__()  # for the life of the process
        kernels.from_vllm = lambda page: kernels.reference()
        kernels_dsv4.from_vllm, kernels_dsv4.rotary_tables = kernels_dsv4.reference, lambda _: tiny_deepseek_v4.tables()
        super().__init__(**start)
        self.config = CONFIGS[os.environ["FAMILY"]]

    def info(self):
        return {"versions": {"vllm": "fake"}, "gpu": "none", "vllm_path": os.environ["FAKE_SITE"] + "/vllm",
                "start_seconds": self.start_seconds, **cost_backend.megatron_path()}

    def _invariant(self):
        assert os.environ["VLLM_BATCH_INVARIANT"] == "1"

    def _transport(self):
        return "gloo"

    def _profiled(self, batch):
        return {"kernels_ms": 0.0, "launches": 0, "longest": []}

    def _fill(self, model):
        if os.environ["FAMILY"] == "nemotron_h":
            model = super()._fill(model)
        else:
            tiny_deepseek_v4.fill(model, ("_expert_table", tiny_deepseek_v4._expert_table))
        if os.environ.get("FAULT") == "another model" and self.kind == "ordinary":
            with torch.no_grad():
                model.lm_head.weight.neg_()
        return model
