"""DeepSeek-V4's router behind its fp32 logits: which experts, and with which weights.

    p = sqrt(softplus(logit));  ids = the k largest of p + bias, ties to the lower id (or table[token id]: hash routing)
    weight[s] = factor * p[ids[s]] / sum over s of p[ids[s]]

Invariant: ids and weights are the engine's kernels' (`dsv4_topk`, one program a row, and `topk_hash_softplus_sqrt` for
the hash layers: fused_moe/router/fused_topk_bias_router.py:115), so the same logits give the same choice.

Backward: the choice is a constant; the formula is differentiated at it, by hand, in the wide type:

    g = factor / S * (dw - sum over s of dw[s] * w[s] / factor),  S = sum of p;   dlogit = g * sigmoid(logit) / (2 p)

Only the chosen logits get a gradient. bias, which steers the choice alone, table, ids and kernels get None; ids carry
no gradient. A row whose softplus underflows to p = 0 in fp32 (logit below -103) gets 0 there.
Upstream: vllm/model_executor/layers/fused_moe/router/dsv4_topk.py:40.
"""
from typing import NamedTuple

import torch

from .packing import wide


class RouterKernels(NamedTuple):
    """Both return (weights [T, k] fp32, ids [T, k] int32)."""

    top_k: object  # (logits [T, E] fp32, bias [E] fp32, k, factor)
    hashed: object  # (logits, token_ids [T] int, table [vocabulary, k] int32, factor)


def _chosen_weights(logits: torch.Tensor, ids: torch.Tensor, factor: float) -> torch.Tensor:
    p = torch.nn.functional.softplus(wide(logits)).sqrt().gather(1, ids.long())
    return factor * p / p.sum(-1, keepdim=True)


def _reference_top_k(logits, bias, k, factor):
    score = torch.nn.functional.softplus(wide(logits)).sqrt() + bias
    ids = torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :k].int()  # stable: ties to the lower id
    return _chosen_weights(logits, ids, factor), ids


def _reference_hashed(logits, token_ids, table, factor):
    ids = table[token_ids.long()].int()
    return _chosen_weights(logits, ids, factor), ids


REFERENCE = RouterKernels(_reference_top_k, _reference_hashed)


def _vllm_top_k(logits, bias, k, factor):
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias

    return fused_topk_bias(logits, logits, "sqrtsoftplus", bias, k, True, torch.int32, routed_scaling_factor=factor)


def _vllm_hashed(logits, token_ids, table, factor):
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias

    return fused_topk_bias(
        logits, logits, "sqrtsoftplus", None, table.shape[1], True, torch.int32, input_tokens=token_ids,
        hash_indices_table=table, routed_scaling_factor=factor,
    )


VLLM = RouterKernels(_vllm_top_k, _vllm_hashed)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, choose, logits, factor):
        weights, ids = choose(logits.detach())
        ctx.save_for_backward(logits, ids)
        ctx.factor = factor
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        logits, ids = ctx.saved_tensors
        chosen = wide(logits).gather(1, ids.long())
        p = torch.nn.functional.softplus(chosen).sqrt()
        total = p.sum(-1, keepdim=True)
        dp = ctx.factor / total * (grad - (grad * p).sum(-1, keepdim=True) / total)
        dchosen = torch.where(p > 0, dp * torch.sigmoid(chosen) / (2 * p), 0)
        # A row's ids are distinct, so no two adds meet.
        return None, torch.zeros_like(logits).scatter_add(1, ids.long(), dchosen.to(logits.dtype)), None


def route(kernels: RouterKernels, logits, bias, k: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [T, E] fp32 -> (weights [T, k] fp32, ids [T, k] int32)."""
    return _Route.apply(lambda z: kernels.top_k(z, bias.detach(), k, factor), logits, factor)


def route_hashed(kernels: RouterKernels, logits, token_ids, table, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The first layers: experts by token id, weights by the router."""
    return _Route.apply(lambda z: kernels.hashed(z, token_ids, table, factor), logits, factor)
