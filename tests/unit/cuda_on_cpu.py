"""Megatron-core's optimizer on a machine without a GPU: its hard-wired CUDA placements answered by the CPU.

0.19.2 sorts parameters by `param.type()` ("torch.cuda.BFloat16Tensor") and allocates with device="cuda". What runs is
its own code; only where tensors lie is another.
"""
import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _Placed(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        out = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


@contextlib.contextmanager
def cuda_on_cpu():
    with contextlib.ExitStack() as stack:
        for name, value in (("current_device", lambda: "cpu"), ("current_stream", mock.MagicMock()),
                            ("synchronize", lambda: None), ("stream", contextlib.nullcontext),
                            ("memory_allocated", lambda: 0), ("max_memory_allocated", lambda: 0),
                            ("reset_peak_memory_stats", lambda: None)):  # fmt: skip
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        stack.enter_context(_Placed())
        yield
