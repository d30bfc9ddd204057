"""The derivative of RMSNorm, y = x * rsqrt(mean(x^2) + eps) * w, for operators whose kernel has a norm inside."""
import torch

from .packing import wide


def rms_grad(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float):
    """(dx, dw) in the wide type; x: [..., D], weight: [D], dw summed over rows. Without a weight dw is None."""
    grad, x = wide(grad), wide(x)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    dw = None
    if weight is not None:
        dw = (grad * x * rstd).flatten(0, -2).sum(0)
        grad = grad * wide(weight)
    return rstd * grad - rstd**3 * (grad * x).mean(-1, keepdim=True) * x, dw
