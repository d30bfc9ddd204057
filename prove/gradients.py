"""The actor's gradients beside those of the independent reference, and faults that the comparison must notice.

The loss is a sum of the logprobs of all predicted tokens with random signs, so that no part of the gradient cancels by
construction. `expected` is the reference in fp64; `usual` is the same text in BF16, of a quantised model with what it
rounds to e4m3: its distance from fp64 is what that costs this model at these inputs, and the bound on the actor is a
multiple of it (prove/grad.py). A quantised model's weights are on all sides those that its forward multiplies with,
dequantised: the derivative is taken there and handed to the masters as it is.
"""
from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import torch

from prove.reference_nemotron_h import Reference


VALUES = "logprobs"
FEW = 64     # numbers of a parameter up to which it is judged with the others like it; see held_to_usual
TIMES = 1.3  # on a CPU's tiny models the largest ratio is 1.13 in both families, 1.5 with DeepSeek-V4's mHC transposed
# A quantised model's own: ReLU^2 before an FP8 projection without its derivative. Beside those of prove/grad.py.
QUANTISED_FAULTS = ("relu-squared",)
DRAWS = 4  # losses: a parameter of few elements, whose terms nearly cancel, needs more than one to be judged by


def compare(actor, config: dict, sequences: list[torch.Tensor], micro: int, faults: list[str]) -> dict:
    """rows: (parameter, relative error and cosine of the actor's gradient, relative error of the usual BF16 one), all
    over the gradients of DRAWS losses laid end to end. The first row is that of the logprobs, which must agree before
    anything else can: with other experts, or other weights, another function would be differentiated.
    faults: the same rows with each fault planted in the actor's backward."""
    from megatron.zero_mismatch.models import nemotron_h_weights

    weights = nemotron_h_weights.multiplied(actor.model)
    draws = [_signs(sequences, draw) for draw in range(DRAWS)]
    found, choices = _of_actor(actor, sequences, draws, micro)
    calibrated = nemotron_h_weights.calibrated(actor.model)
    expected, usual = ([_reference(config, weights, sequences, signs, choices, dtype, scales) for signs in draws]
                       for dtype, scales in ((torch.float64, {}), (torch.bfloat16, calibrated)))

    sizes = {name: p.numel() for name, p in actor.model.named_parameters()}

    def rows(own: list[dict]) -> list[dict]:
        found = [_row(name, own, expected, usual, *_engine_name(name, weights)) for name in own[0]]
        return held_to_usual(found, sizes) if calibrated else found

    broken = {}
    for fault in faults:
        with planted(fault):
            broken[fault] = rows(_of_actor(actor, sequences, draws, micro)[0])
    return {"rows": rows(found), "faults": broken, "tokens": sum(len(s) - 1 for s in sequences)}


def _of_actor(actor, sequences, draws, micro) -> tuple[list[dict], list[torch.Tensor]]:
    """({logprobs and gradients by name} for each loss, the experts that were chosen: the same every time)."""
    found = []
    for signs in draws:
        values, parts = accumulate(actor, sequences, signs, micro, _noted)
        gradients = {name: g.detach().double().clone() for name, g in actor.gradients().items()}
        found.append({VALUES: values} | gradients)
        actor.ddp.zero_grad_buffer()
    return found, [torch.cat(layer) for layer in zip(*parts, strict=True)]


def _row(name: str, found, expected, usual, engine: str, factor) -> dict:
    own = torch.stack([draw[name].double() for draw in found])
    want, plain = (torch.stack([draw[engine].double() * factor for draw in side]) for side in (expected, usual))
    return {"parameter": name, "error": _error(own, want), "cosine": _cosine(own, want),
            "usual_error": _error(plain, want), "norm": float(want.norm())}


def held_to_usual(rows: list[dict], sizes: dict[str, int]) -> list[dict]:
    """The rows of a quantised model with the multiple of the usual error that each is held to.

    Both models lose the same by FP8, so a parameter of many numbers is off by the usual error itself: TIMES. One of few
    (mHC's scales and biases, sinks, decay rates) is off by as much as a few sums happen to cancel, in either model:
    those share the largest usual error among them, and prove/grad.py's own multiple.
    """
    few = [sizes.get(row["parameter"], FEW + 1) <= FEW for row in rows]
    shared = max((row["usual_error"] for row, small in zip(rows, few, strict=True) if small), default=0.0)
    return [row | ({"usual_error": shared} if small else {"times": TIMES})
            for row, small in zip(rows, few, strict=True)]


def _signs(sequences: list[torch.Tensor], draw: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(draw)
    return [(torch.randint(0, 2, (len(s) - 1,), generator=generator) * 2 - 1).to(s.device) for s in sequences]


def accumulate(actor, sequences, signs, micro, noting) -> tuple[torch.Tensor, list]:
    """Fills the actor's gradient buffers; the logprobs of all tokens, and what `noting(model)` noted by micro-batch."""
    from megatron.zero_mismatch.packing import pack

    values, parts, begin = [], [], 0
    while begin < len(sequences):
        end = begin + 1
        while end < len(sequences) and sum(map(len, sequences[begin:end + 1])) <= micro:
            end += 1
        tokens, packed = pack(sequences[begin:end])
        weight = torch.cat([torch.nn.functional.pad(s, (1, 0)) for s in signs[begin:end]]).float()
        with noting(actor.model) as noted:
            logprobs = actor.logprobs(tokens, packed)
        parts.append(noted)
        values.append(logprobs.detach()[packed.positions > 0])
        (logprobs * weight).sum().backward()
        begin = end
    return torch.cat(values), parts


@contextlib.contextmanager
def _noted(model):
    """Collects what the routers choose while it is open. A backward that recomputes a layer calls the same table again,
    later: that must not be collected."""
    original, chosen, live = model.kernels, [], [True]

    def note(*arguments):
        weights, ids = original.router_top_k(*arguments)
        if live:
            chosen.append(ids)
        return weights, ids

    model.kernels = dataclasses.replace(original, router_top_k=note)
    try:
        yield chosen
    finally:
        model.kernels = original
        live.clear()


def _reference(config, weights, sequences, signs, choices, dtype, scales) -> dict[str, torch.Tensor]:
    reference = Reference(config, weights, dtype, scales)
    values, begin = [], 0
    for tokens, sign in zip(sequences, signs, strict=True):  # one graph at a time: the recurrence keeps every state
        end = begin + len(tokens)
        found = reference.logprobs([tokens], [c[begin:end] for c in choices])
        (found * sign).sum().backward()
        values.append(found.detach())
        begin = end
    return {VALUES: torch.cat(values)} | {name: w.grad for name, w in reference.w.items()}


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
def planted(fault: str):
    from megatron.zero_mismatch import linear_fp8_static, mamba2, norm, router

    original, projection = norm.rms_grad, linear_fp8_static._LinearFp8Static.backward

    def unsquared(ctx, grad):
        ctx.squared = False
        return projection(ctx, grad)

    patches = {
        # the experts' outputs keep their weights, the router learns nothing
        "routing-weights": lambda: mock.patch.object(
            router, "weights_of", lambda logits, ids, renormalise: (logits * 0).gather(1, ids.long())),
        # chunks do not see the chunks before them
        "carried-state": lambda: mock.patch.object(
            mamba2, "_carried", lambda b, decay, scaled, share, grid: (scaled.sum(2)[..., None] * 0).expand(
                -1, -1, -1, b.shape[-1])),
        # the norm's own derivative forgets that the length of x depends on x
        "norm-length": lambda: mock.patch.object(
            norm, "rms_grad", lambda grad, x, weight, eps: (
                grad.float() * weight.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / x.shape[-1]
                                                            + eps), original(grad, x, weight, eps)[1])),
        # what an FP8 projection squares is taken for its input
        "relu-squared": lambda: mock.patch.object(
            linear_fp8_static._LinearFp8Static, "backward", staticmethod(unsquared)),
    }
    if fault not in patches:
        raise ValueError(f"no fault {fault!r}; there are: {', '.join(patches)}")
    with patches[fault]():
        yield
