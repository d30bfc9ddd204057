"""The router: fp32 logits, sigmoid scores, top-k by score + correction bias, weights renormalised over the chosen.

Values: logits by `zero_mismatch.mm_fp32.bi_mm_fp32` (patch router-gate-ieee: BF16 rows times fp32 weights, exact
products), choice and weights by `_moe_C.grouped_topk` with one group (fused_moe/router/grouped_topk_router.py:28 of
0.33.0). Each token's row is its own. The choice is discrete: it has no gradient, and neither has the correction bias,
which only takes part in the choice.

Backward: logits as a GEMM in fp32; the weights w_i = s_i / sum of the chosen s_j by re-running that formula at the
forward's own logits and choice. Gradients: x and the gate's weight, through `logits`; logits, through `weights`.
"""
import torch

from .packing import wide
from .ste import visible_with_grad

_SMALLEST_SUM = 1e-20  # as in the kernel: keeps a row of zero scores finite


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, weight):
        ctx.save_for_backward(x, weight)
        return kernel(x.detach(), weight.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return None, (grad @ wide(weight)).to(x.dtype), (grad.T @ wide(x)).to(weight.dtype)


def logits(kernel, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [tokens, K] bf16, weight: [experts, K] fp32 -> [tokens, experts] fp32."""
    return _Logits.apply(kernel, x, weight)


def top_k(kernel, logits: torch.Tensor, bias: torch.Tensor, k: int, renormalise: bool):
    """logits: [tokens, experts] fp32 -> (weights [tokens, k] fp32, ids [tokens, k] int32). `bias`: [experts] fp32."""
    visible, ids = kernel(logits.detach(), bias.detach(), k, renormalise)
    return visible_with_grad(visible, weights_of(logits, ids, renormalise)), ids


def weights_of(logits: torch.Tensor, ids: torch.Tensor, renormalise: bool) -> torch.Tensor:
    """The differentiable part: the scores of a given choice."""
    chosen = torch.sigmoid(logits.gather(1, ids.long()))
    return chosen / (chosen.sum(-1, keepdim=True) + _SMALLEST_SUM) if renormalise else chosen


def reference_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return wide(x) @ wide(weight).T


def reference_top_k(logits: torch.Tensor, bias: torch.Tensor, k: int, renormalise: bool):
    ids = torch.topk(torch.sigmoid(logits) + bias, k, dim=-1).indices.to(torch.int32)
    return weights_of(logits, ids, renormalise), ids
