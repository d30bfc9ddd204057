"""Causal attention over packed sequences, grouped queries, no positional encoding.

Values: vLLM's `unified_attention` (v1/attention/ops/triton_unified_attention.py:828 of 0.33.0), the kernel of
TRITON_ATTN, over keys and values laid out in pages as the engine's are. Under VLLM_BATCH_INVARIANT it never splits over
keys and its tile is one constant, so a query's output is a function of that query and of the keys before it, in a
prefill as in a decode step. The page size decides where a key lies, not in which order keys are summed.

Backward: P is recomputed in fp32 by blocks of queries, then the usual derivative,
dV = P^T dO, dS = P (dO V^T - rowsum(dO V^T P)), dQ = dS K, dK = dS^T Q. Gradients: q, k and v.
"""
from functools import lru_cache
from typing import NamedTuple

import torch

from .batched import product
from .packing import Packed, wide

# Queries of one block of the backward: bounds the fp32 scores at heads x 512 x keys. Changes no forward bit.
BLOCK = 512


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, q, k, v, packed, scale):
        ctx.save_for_backward(q, k, v)
        ctx.packed, ctx.scale = packed, scale
        return kernel(q.detach(), k.detach(), v.detach(), packed, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        return None, *gradients(q, k, v, grad, ctx.packed, ctx.scale), None, None


class Pages(NamedTuple):
    """Where packed sequences lie in a private paged cache: page p of a sequence behind its page p - 1."""

    count: int
    rows: torch.Tensor  # [tokens] int64: a token's row, all pages laid end to end
    table: torch.Tensor  # [sequences, pages of the longest] int32

    @classmethod
    @lru_cache(maxsize=4)  # every layer of a batch asks, and the host waits for each copy to the device
    def of(cls, packed: Packed, page: int) -> "Pages":
        counts = [-(-length // page) for length in packed.lengths]
        first = torch.tensor([0, *counts]).cumsum(0)
        begins = torch.repeat_interleave(first[:-1] * page, torch.tensor(packed.lengths))
        table = (first[:-1, None] + torch.arange(max(counts))).clamp(max=int(first[-1]) - 1)
        return cls(int(first[-1]), begins.to(packed.device) + packed.positions,
                   table.to(packed.device, torch.int32))


def gradients(q, k, v, grad, packed: Packed, scale: float):
    """(dq, dk, dv) of `reference` at q, k and v, shaped and typed as they are."""
    found = [_backward(q[a:b], k[a:b], v[a:b], grad[a:b], scale) for a, b in packed.bounds]
    return (torch.cat(parts).to(q.dtype) for parts in zip(*found, strict=True))


def _queries(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[rows, groups * m, D] -> [groups, m * rows, D] in the wide type: a group's heads, one below the other."""
    return wide(x).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The way back: [groups, m * rows, D] -> [rows, groups * m, D]."""
    return x.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).flatten(1, 2)


def _probabilities(q, k, first: int, rows: int, scale: float) -> torch.Tensor:
    """q: [groups, m * rows, D] at positions first, ...; k: [groups, keys, D] -> [groups, m * rows, keys]."""
    scores = product(q, k.mT) * scale
    at = torch.arange(first, first + rows, device=q.device).repeat(q.shape[1] // rows)
    scores = scores.masked_fill(torch.arange(k.shape[1], device=q.device) > at[:, None], float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def _backward(q, k, v, grad, scale):
    """One sequence -> (dq, dk, dv), shaped as q, k, v."""
    groups = k.shape[1]
    k, v = (wide(t).transpose(0, 1) for t in (k, v))
    dk, dv, dq = torch.zeros_like(k), torch.zeros_like(v), []
    for first in range(0, len(q), BLOCK):
        rows, end = len(q[first : first + BLOCK]), min(first + BLOCK, len(q))
        own, back = (_queries(t[first:end], groups) for t in (q, grad))
        p = _probabilities(own, k[:, :end], first, rows, scale)
        dv[:, :end] += product(p.mT, back)
        dp = product(back, v[:, :end].mT)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq.append(_rows(product(ds, k[:, :end]), rows))
        dk[:, :end] += product(ds.mT, own)
    return torch.cat(dq), dk.transpose(0, 1), dv.transpose(0, 1)


def attention(kernel, q, k, v, packed: Packed, scale: float) -> torch.Tensor:
    """q: [tokens, heads, D], k and v: [tokens, kv heads, D] (views of one tensor may do) -> [tokens, heads, D]."""
    return _Attention.apply(kernel, q, k, v, packed, scale)


def reference(q, k, v, packed: Packed, scale: float) -> torch.Tensor:
    parts = []
    for a, b in packed.bounds:
        keys, values = (wide(t[a:b]).transpose(0, 1) for t in (k, v))
        p = _probabilities(_queries(q[a:b], k.shape[1]), keys, 0, b - a, scale)
        parts.append(_rows(product(p, values), b - a))
    return torch.cat(parts).to(q.dtype)
