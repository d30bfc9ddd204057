"""Routed experts, not gated: y[t] = sum over k of w[t, k] relu(x[t] W1[e]^T)^2 W2[e]^T, with e = ids[t, k].

Values: vLLM's Triton experts, `fused_experts` (fused_moe/fused_moe.py:1602 of 0.33.0): under VLLM_BATCH_INVARIANT one
tile for every batch (:1307), rounding to BF16 behind each GEMM and behind ReLU^2, the routing weight applied before the
second rounding, then `moe_sum` over the slots in their order. A token's row takes nothing from its neighbours.

Backward: one expert after another, BF16 GEMMs over its own rows; hidden and activated rows are computed again, rounded
as in the forward. Rows return to their (token, slot) place and are summed over slots in fp32: no atomics, so two runs
give the same bits. Gradients: x, W1, W2 and the routing weights; the ids have none.
"""
import torch

from .packing import wide
from .relu2 import reference as relu2


def _groups(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """(the flat slots in the order of their expert, stable; the number of slots of each expert)."""
    flat = ids.flatten().long()
    return torch.argsort(flat, stable=True), torch.bincount(flat, minlength=experts).tolist()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, w1, w2, weights, ids):
        ctx.save_for_backward(x, w1, w2, weights, ids)
        return kernel(x.detach(), w1.detach(), w2.detach(), weights.detach(), ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, w1, w2, weights, ids = ctx.saved_tensors
        return None, *gradients(x, w1, w2, weights, ids, grad), None


def gradients(x, w1, w2, weights, ids, grad):
    """(dx, dw1, dw2, dweights) of `reference` at these operands, repeatable to the bit."""
    k = ids.shape[1]
    slots, counts = _groups(ids, w1.shape[0])
    dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
    rows, dweights = x.new_empty(ids.numel(), x.shape[1]), weights.new_empty(ids.numel())
    begin = 0
    for expert, count in enumerate(counts):
        own = slots[begin : begin + count]
        begin += count
        if count:
            found = _one_expert(x[own // k], grad[own // k], weights.flatten()[own], w1[expert], w2[expert])
            rows[own], dweights[own], dw1[expert], dw2[expert] = found
    dx = wide(rows).view(*ids.shape, -1).sum(1).to(x.dtype)
    return dx, dw1, dw2, dweights.view_as(weights)


def _one_expert(x, grad, weight, w1, w2):
    """x, grad: [rows, hidden], weight: [rows] -> (dx, dweight, dw1, dw2)."""
    hidden = x @ w1.T
    active = relu2(hidden)
    to_active = grad @ w2
    dweight = (wide(to_active) * wide(active)).sum(-1)
    dhidden = (wide(to_active) * weight[:, None] * 2 * wide(hidden).clamp(min=0)).to(x.dtype)
    weighted = (wide(grad) * weight[:, None]).to(x.dtype)
    return dhidden @ w1, dweight.to(weight.dtype), dhidden.T @ x, weighted.T @ active


def experts(kernel, x, w1, w2, weights, ids) -> torch.Tensor:
    """x: [tokens, hidden], w1: [experts, width, hidden], w2: [experts, hidden, width], weights: [tokens, k] fp32,
    ids: [tokens, k] int32 -> [tokens, hidden]."""
    return _Experts.apply(kernel, x, w1, w2, weights, ids)


def reference(x, w1, w2, weights, ids) -> torch.Tensor:
    """The same roundings: behind each GEMM, behind ReLU^2, and once behind the sum."""
    k = ids.shape[1]
    slots, counts = _groups(ids, w1.shape[0])
    rows = []
    for expert, own in enumerate(slots.split(counts)):
        hidden = (wide(x[own // k]) @ wide(w1[expert]).T).to(x.dtype)
        out = wide(relu2(hidden)) @ wide(w2[expert]).T * weights.flatten()[own][:, None]
        rows.append(out.to(x.dtype))
    back = torch.empty_like(slots)
    back[slots] = torch.arange(slots.numel(), device=slots.device)
    return wide(torch.cat(rows)[back]).view(*ids.shape, -1).sum(1).to(x.dtype)
