"""ReLU squared: y = max(x, 0)^2, rounded once.

Values: `_C.relu_squared`, as vLLM's ReLUSquaredActivation calls it (layers/activation.py:654 of 0.33.0).
Backward: dx = 2 max(x, 0) dy in fp32. Gradients: x.
"""
import torch

from .packing import wide
from .ste import replayed


def relu2(kernel, x: torch.Tensor) -> torch.Tensor:
    """Any shape."""
    return replayed(kernel, reference, x)


def reference(x: torch.Tensor) -> torch.Tensor:
    return wide(x).clamp(min=0).square().to(x.dtype)
