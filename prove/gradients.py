"""The actor's gradients beside those of the independent reference, and faults that the comparison must notice.

The loss is a sum of the logprobs of all predicted tokens with random signs, so that no part of the gradient cancels by
construction. `expected` is the reference in fp64; `usual` is the same text in BF16: its distance from fp64 is what
BF16 costs this model at these inputs, and the bound on the actor is a multiple of it (prove/grad.py).
"""
from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import torch

from prove.reference_nemotron_h import Reference


DRAWS = 4  # losses: a parameter of few elements, whose terms nearly cancel, needs more than one to be judged by


def compare(actor, config: dict, sequences: list[torch.Tensor], micro: int) -> dict:
    """Rows of (parameter, relative error and cosine of the actor's gradient, relative error of the usual BF16 one), all
    over the gradients of DRAWS losses laid end to end."""
    found, expected, usual = [], [], []
    weights = dict(actor.model.exported())
    for draw in range(DRAWS):
        signs = _signs(sequences, draw)
        choices = _accumulate(actor, sequences, signs, micro)
        found.append({name: g.detach().double().clone() for name, g in actor.gradients().items()})
        actor.ddp.zero_grad_buffer()
        for side, dtype in ((expected, torch.float64), (usual, torch.bfloat16)):
            side.append(_reference(config, weights, sequences, signs, choices, dtype))
    rows = []
    for name in found[0]:
        engine, factor = _engine_name(name, weights)
        own = torch.stack([draw[name] for draw in found])
        want, plain = (torch.stack([draw[engine].double() * factor for draw in side]) for side in (expected, usual))
        rows.append({"parameter": name, "error": _error(own, want), "cosine": _cosine(own, want),
                     "usual_error": _error(plain, want), "norm": float(want.norm())})
    return {"rows": rows, "tokens": sum(len(s) - 1 for s in sequences)}


def _signs(sequences: list[torch.Tensor], draw: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(draw)
    return [(torch.randint(0, 2, (len(s) - 1,), generator=generator) * 2 - 1).to(s.device) for s in sequences]


def _accumulate(actor, sequences, signs, micro) -> list[torch.Tensor]:
    """Fills the actor's gradient buffers; the experts it chose, by MoE layer, for all tokens."""
    from megatron.zero_mismatch.packing import pack

    layers, chosen, begin = actor.model.shape.pattern.count("E"), [], 0
    original = actor.model.kernels

    def note(*arguments):
        weights, ids = original.router_top_k(*arguments)
        chosen.append(ids)
        return weights, ids

    while begin < len(sequences):
        end = begin + 1
        while end < len(sequences) and sum(map(len, sequences[begin:end + 1])) <= micro:
            end += 1
        tokens, packed = pack(sequences[begin:end])
        weight = torch.cat([torch.nn.functional.pad(s, (1, 0)) for s in signs[begin:end]]).float()
        actor.model.kernels = dataclasses.replace(original, router_top_k=note)
        try:
            logprobs = actor.logprobs(tokens, packed)
        finally:
            actor.model.kernels = original  # a recomputed layer must not be noted twice
        (logprobs * weight).sum().backward()
        begin = end
    return [torch.cat(chosen[layer::layers]) for layer in range(layers)]


def _reference(config, weights, sequences, signs, choices, dtype) -> dict[str, torch.Tensor]:
    reference = Reference(config, weights, dtype)
    begin = 0
    for tokens, sign in zip(sequences, signs, strict=True):  # one graph at a time: the recurrence keeps every state
        end = begin + len(tokens)
        (reference.logprobs([tokens], [c[begin:end] for c in choices]) * sign).sum().backward()
        begin = end
    return {name: w.grad for name, w in reference.w.items()}


def _engine_name(name: str, weights: dict) -> tuple[str, torch.Tensor | float]:
    """The reference is differentiated in A = -exp(A_log): dA_log = dA A."""
    if name.endswith(".A_log"):
        engine = name.removesuffix("_log")
        return engine, weights[engine].double()
    return name.replace(".experts.w", ".experts.routed_experts.w"), 1.0


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found - want).norm() / want.norm())


def _cosine(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found * want).sum() / (found.norm() * want.norm()))


# ---- faults, each in the backward alone: the values stay bit-identical, only the comparison can see them

@contextlib.contextmanager
def planted(fault: str | None):
    from megatron.zero_mismatch import mamba2, norm, router

    if fault is None:
        yield
        return
    original = norm._norm_backward
    patches = {
        # the experts' outputs keep their weights, the router learns nothing
        "routing-weights": lambda: mock.patch.object(
            router, "weights_of", lambda logits, ids, renormalise: (logits * 0).gather(1, ids.long())),
        # chunks do not see the chunks before them
        "carried-state": lambda: mock.patch.object(
            mamba2, "_carried", lambda b, decay, scaled, share, by_step: (scaled.sum(2)[..., None] * 0).expand(
                -1, -1, -1, b.shape[-1])),
        # the norm's own derivative forgets that the length of x depends on x
        "norm-length": lambda: mock.patch.object(
            norm, "_norm_backward", lambda grad, x, weight, eps: (
                grad.float() * weight.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / x.shape[-1]
                                                            + eps), original(grad, x, weight, eps)[1])),
    }
    if fault not in patches:
        raise ValueError(f"no fault {fault!r}; there are: {', '.join(patches)}")
    with patches[fault]():
        yield
