"""The actor's gradients beside those of the independent reference, and faults that the comparison must notice.

The loss is a sum of the logprobs of all predicted tokens with random signs, so that no part of the gradient cancels by
construction. `expected` is the reference in fp64; `usual` is the same text in BF16, of a quantised model with what it
rounds to e4m3: its distance from fp64 is what that costs this model at these inputs, and the bound on the actor is a
multiple of it (prove/grad.py). A quantised model's weights are on all sides those that its forward multiplies with,
dequantised: the derivative is taken there and handed to the masters as it is.

Of a quantised model that distance is 20 to 30 %, and a wrong derivative may be smaller. A second comparison (rows with
`operands`) has both sides of the reference multiply the actor's own operands, so what parts them is BF16 alone. The
codes are taken from the actor's forward and not rounded anew: a value beside the edge of a code falls to the other side
in fp64, and such flips, a step of e4m3 each, add up over the layers. Rounded anew, half of the parameters of the tiny
models on a CPU are off by more than 9 % (Nemotron-H) and 14 % (DeepSeek-V4), at the actor's codes by about 1 %. What
the second comparison cannot see is a forward that quantises wrongly; the first one is there for that.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch

from prove.grad import TIMES as BF16_TIMES
from prove.reference_nemotron_h import Reference

VALUES = "logprobs"
FEW = 64     # numbers of a parameter up to which it is judged with the others like it; see held_to_usual
TIMES = 1.3  # on a CPU's tiny models the largest ratio is 1.13 in both families, 1.5 with DeepSeek-V4's mHC transposed
# A quantised model's own: ReLU^2 before an FP8 projection without its derivative. Beside those of prove/grad.py.
QUANTISED_FAULTS = ("relu-squared",)
DRAWS = 4  # losses: a parameter of few elements, whose terms nearly cancel, needs more than one to be judged by


def compare(actor, config: dict, sequences: list[torch.Tensor], micro: int, faults: list[str]) -> Iterator[dict]:
    """What is known after each step, the last time with nothing `missing`.
    rows: (parameter, relative error and cosine of the actor's gradient, relative error of the usual BF16 one), all over
    the gradients of DRAWS losses laid end to end. The first row is that of the logprobs, which must agree before
    anything else can: with other experts, or other weights, another function would be differentiated.
    faults: the same rows with each fault planted in the actor's backward."""
    from megatron.zero_mismatch.models import nemotron_h_weights

    weights = nemotron_h_weights.multiplied(actor.model)
    draws = [_signs(sequences, draw) for draw in range(DRAWS)]
    found, choices, read = _of_actor(actor, sequences, draws, micro)
    calibrated = nemotron_h_weights.calibrated(actor.model)

    def by_reference(dtype, scales=None, read=None):
        return _reference(Reference(config, weights, dtype, scales), sequences, draws, choices, read or {})

    expected, usual = by_reference(torch.float64), by_reference(torch.bfloat16, calibrated)
    require_all(expected[0], {_engine_name(name, weights)[0] for name in found[0]})
    same = [by_reference(dtype, read=read) for dtype in (torch.float64, torch.bfloat16)] if calibrated else None
    sizes = {name: p.numel() for name, p in actor.model.named_parameters()}

    def rows(own: list[dict]) -> list[dict]:
        def against(*sides):
            return [_row(name, own, *sides, *_engine_name(name, weights)) for name in own[0]]

        found = against(expected, usual)
        return held_to_usual(found, sizes) + with_operands(against(*same), sizes) if calibrated else found

    done, broken = rows(found), {}
    yield {"rows": done, "faults": {}, "missing": [f"planted {fault}" for fault in faults]}
    for index, fault in enumerate(faults, 1):
        with planted(fault):
            broken[fault] = rows(_of_actor(actor, sequences, draws, micro)[0])
        yield {"rows": done, "faults": broken, "missing": [f"planted {left}" for left in faults[index:]]}


def _of_actor(actor, sequences, draws, micro) -> tuple[list[dict], list[torch.Tensor], dict[str, torch.Tensor]]:
    """({logprobs and gradients by name} for each loss, the experts that were chosen and what was read back from FP8:
    the same every time)."""
    found = []
    for signs in draws:
        values, parts = accumulate(actor, sequences, signs, micro, _noted)
        gradients = {name: g.detach().double().clone() for name, g in actor.gradients().items()}
        found.append({VALUES: values} | gradients)
        actor.ddp.zero_grad_buffer()
    chosen = [torch.cat(layer) for layer in zip(*(part[0] for part in parts), strict=True)]
    return found, chosen, {name: torch.cat([part[1][name] for part in parts]) for name in parts[0][1]}


def _row(name: str, found, expected, usual, engine: str, factor) -> dict:
    own = torch.stack([draw[name].double() for draw in found])
    want, plain = (torch.stack([draw[engine].double() * factor for draw in side]) for side in (expected, usual))
    return {"parameter": name, "error": _error(own, want), "cosine": _cosine(own, want),
            "usual_error": _error(plain, want), "norm": float(want.norm())}


def held_to_usual(rows: list[dict], sizes: dict[str, int], times: float = TIMES) -> list[dict]:
    """The rows of a quantised model with the multiple of the usual error that each is held to.

    Both models lose the same by FP8, so a parameter of many numbers is off by the usual error itself: `times`. One of
    few (mHC's scales and biases, sinks, decay rates) is off by as much as a few sums happen to cancel, in either model:
    those share the largest usual error among them, and prove/grad.py's own multiple.
    """
    few = [sizes.get(row["parameter"], FEW + 1) <= FEW for row in rows]
    shared = max((row["usual_error"] for row, small in zip(rows, few, strict=True) if small), default=0.0)
    return [row | ({"usual_error": shared} if small else {"times": times})
            for row, small in zip(rows, few, strict=True)]


def with_operands(rows: list[dict], sizes: dict[str, int]) -> list[dict]:
    """The rows of the comparison at the actor's operands. Nothing but BF16 parts its sides, as in a model that is not
    quantised: prove/grad.py's own multiple, and few numbers share the largest usual error here too."""
    return [row | {"operands": "the actor's"} for row in held_to_usual(rows, sizes, BF16_TIMES)]


def require_all(expected: dict[str, torch.Tensor | None], names) -> None:
    """A parameter that the loss depends on and that has no gradient in the actor is no row, and would be overlooked."""
    if lacking := [name for name, gradient in expected.items()
                   if name not in names and gradient is not None and gradient.any()]:
        raise RuntimeError(f"the actor has no gradient of {', '.join(lacking)}; the reference has one")


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
    """Collects ([experts that the routers choose], {name of a scale: rows read back from FP8}) while it is open. A
    backward that recomputes a layer calls the same table again, later: that must not be collected."""
    original, found, live = model.kernels, ([], {}), [True]
    names = {p.data_ptr(): name for name, p in model.named_parameters() if name.endswith("_scale")}

    def note(*arguments):
        weights, ids = original.router_top_k(*arguments)
        if live:
            found[0].append(ids)
        return weights, ids

    def keep(codes, scale):
        if live:
            found[1][names[scale.data_ptr()]] = codes.flatten(1).double() * scale.double()
        return codes

    def keep_cached(q, k, v, scales, packed):
        codes, cache = original.quantised.attention.quantise(q, k, v, scales, packed)
        for part, scale in zip(codes, scales, strict=True):
            keep(part, scale)
        return codes, cache

    model.kernels = dataclasses.replace(original, router_top_k=note)
    if names:
        linear, cached = original.quantised.linear, original.quantised.attention
        model.kernels = dataclasses.replace(model.kernels, quantised=dataclasses.replace(
            original.quantised, attention=cached._replace(quantise=keep_cached), linear=linear._replace(
                quantise=lambda x, scale: keep(linear.quantise(x, scale), scale),
                square=lambda x, scale: keep(linear.square(x, scale), scale))))
    try:
        yield found
    finally:
        model.kernels = original
        live.clear()


def _reference(reference, sequences, draws, choices, read) -> list[dict[str, torch.Tensor]]:
    """The logprobs and the gradients of each loss. A sequence runs forward once for all losses, and its graph goes
    before the next: the recurrence keeps every state."""
    leaves, begin = list(reference.w.values()), 0
    values, sums = [], [[None] * len(leaves) for _ in draws]
    for i, tokens in enumerate(sequences):
        part = slice(begin, begin + len(tokens))
        found = reference.logprobs([tokens], [c[part] for c in choices],
                                   {name: rows[part] for name, rows in read.items()})
        for signs, total in zip(draws, sums, strict=True):
            new = torch.autograd.grad((found * signs[i]).sum(), leaves, retain_graph=total is not sums[-1],
                                      allow_unused=True)
            for place, gradient in enumerate(new):
                if gradient is not None:
                    total[place] = gradient if total[place] is None else total[place] + gradient
        values.append(found.detach())
        begin = part.stop
    return [{VALUES: torch.cat(values)} | dict(zip(reference.w, total, strict=True)) for total in sums]


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
