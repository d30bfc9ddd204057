"""DeepSeek-V4's gradients beside those of the independent reference; as gradients.py, loss by loss.

`expected` is the reference in fp64 without any rounding, `usual` the same text in BF16 with the deployment's FP8 for
activations and K rows: its distance from fp64 is what FP8 and BF16 cost this model at these inputs, and the bound on
the actor is a multiple of it (prove/grad.py). Experts and compressed rows are the actor's own choice on all sides.

The second comparison (gradients.py) rounds to FP8 in fp64 as well, and gives both sides the actor's own values in front
of its quantisers, but for those inside the routed experts and of the compressed rows, which are rounded anew.

All gradients of one loss are held at once and only sums go on to the next: a gradient in fp64 is as large as four of
the BF16 models.
"""
from __future__ import annotations

import contextlib
import dataclasses
import types
from unittest import mock

import torch

from prove.gradients import DRAWS, VALUES, _signs, accumulate, held_to_usual, with_operands
from prove.reference_deepseek_v4 import Reference

# Each in the backward alone: a router that learns nothing, mHC's mixing matrix transposed, a norm whose length does not
# depend on its input, a sink without a gradient, rows that pool their own four tokens only, experts whose derivative
# passes where the forward clamped.
FAULTS = ("routing-weights", "transposed-mixing", "norm-length", "attention-sink", "previous-group", "dropped-clamp")


@dataclasses.dataclass
class Sums:
    """Of one parameter over the losses: own and usual against expected."""

    error: float = 0.0
    usual: float = 0.0
    want: float = 0.0
    own: float = 0.0
    dot: float = 0.0

    def add(self, own, usual, want) -> None:
        own, want = own.double(), want.double()
        self.error += float((own - want).square().sum())
        self.usual += float((usual.double() - want).square().sum())
        self.want += float(want.square().sum())
        self.own += float(own.square().sum())
        self.dot += float((own * want).sum())

    def row(self, name: str) -> dict:
        size = (self.own * self.want) ** 0.5
        return {"parameter": name, "error": (self.error / self.want) ** 0.5, "norm": self.want**0.5,
                "usual_error": (self.usual / self.want) ** 0.5, "cosine": self.dot / size if size else 0.0}


def compare(actor, config: dict, sequences: list[torch.Tensor], micro: int, faults: list[str]) -> dict:
    """rows, and `faults`: the same rows with each fault planted in the actor's backward. See gradients.compare."""
    cases: dict[str | None, tuple[dict[str, Sums], ...]] = {case: ({}, {}) for case in (None, *faults)}
    weights = {name: p.detach() for name, p in actor.model.named_parameters()}
    seen = None
    for draw in range(DRAWS):
        signs = _signs(sequences, draw)
        sides = None
        for case, kinds in cases.items():
            with planted(case) if case else contextlib.nullcontext():
                values, found = _of_actor(actor, sequences, signs, micro)
            seen = seen or found  # the forward is the same every time
            if sides is None:
                sides = [[_reference(actor, config, weights, sequences, signs, seen[:2], *how) for how in pair]
                         for pair in (((torch.bfloat16, True), (torch.float64, False)),
                                      ((torch.bfloat16, True, seen[2]), (torch.float64, True, seen[2])))]
            own = {VALUES: values} | actor.gradients()
            for sums, (usual, expected) in zip(kinds, sides, strict=True):
                for name, gradient in own.items():
                    sums.setdefault(name, Sums()).add(gradient, usual[name], expected[name])
            actor.ddp.zero_grad_buffer()
    sizes = {name: p.numel() for name, p in actor.model.named_parameters()}
    rows = {}
    for case, kinds in cases.items():
        rounded, same = ([s.row(name) for name, s in sums.items()] for sums in kinds)
        rows[case] = held_to_usual(rounded, sizes) + with_operands(same, sizes)
    return {"rows": rows.pop(None), "faults": rows, "tokens": sum(len(s) - 1 for s in sequences)}


def _of_actor(actor, sequences, signs, micro):
    """Fills the actor's gradient buffers -> (logprobs, (experts by layer, rows by compressed layer, what is quantised
    by name) of all tokens)."""
    values, parts = accumulate(actor, sequences, signs, micro, noted)
    experts, rows = ([torch.cat(layer) for layer in zip(*(part[kind] for part in parts), strict=True)]
                     for kind in (0, 1))
    given = {name: torch.cat([part[2][name] for part in parts]) for name in parts[0][2]}
    compressed = [i for i, ratio in enumerate(actor.model.shape.ratios) if ratio == 4]
    return values, (experts, dict(zip(compressed, rows, strict=True)), given)


@contextlib.contextmanager
def noted(model):
    """Collects ([experts], [rows], {name: what is quantised}) by layer while it is open; a backward that recomputes a
    layer comes later."""
    from megatron.zero_mismatch import attention_inputs, indexer, o_proj_fp8
    from megatron.zero_mismatch.models import deepseek_v4

    original, found, live = model.run.kernels, ([], [], {}), [True]
    names = {id(p): name for name, p in model.named_parameters()}

    def note(kernel, place):
        def called(*arguments):
            result = kernel(*arguments)
            if live:
                found[place].append(result if place else result[1])
            return result
        return called

    def taken(function):
        def called(kernel, x, master, *arguments, **more):
            if live:
                found[2][names[id(master)]] = x.detach()
            return function(kernel, x, master, *arguments, **more)
        return called

    def cached(kernel, q, kv, *arguments):
        if live:
            layer = sum(name.endswith(".kv") for name in found[2])
            found[2][f"model.layers.{layer}.attn.kv"] = kv.detach()
        return q_and_k(kernel, q, kv, *arguments)

    q_and_k = attention_inputs.q_and_k
    router = original.router._replace(top_k=note(original.router.top_k, 0), hashed=note(original.router.hashed, 0))
    model.run.kernels = dataclasses.replace(original, router=router)
    try:
        with (mock.patch.object(indexer, "select", note(indexer.select, 1)),
              mock.patch.object(deepseek_v4, "linear_fp8", taken(deepseek_v4.linear_fp8)),
              mock.patch.object(o_proj_fp8, "o_proj_fp8", taken(o_proj_fp8.o_proj_fp8)),
              mock.patch.object(attention_inputs, "q_and_k", cached)):
            yield found
    finally:
        model.run.kernels = original
        live.clear()


def _reference(actor, config, weights, sequences, signs, choices, dtype, fp8, given=None) -> dict[str, torch.Tensor]:
    reference = Reference(config, weights, actor.model.tables, dtype, fp8)
    experts, rows = choices
    values, begin = [], 0
    for tokens, sign in zip(sequences, signs, strict=True):
        part = slice(begin, begin + len(tokens))
        found = reference.logprobs(tokens, [e[part] for e in experts], {i: r[part] for i, r in rows.items()},
                                   {name: x[part] for name, x in (given or {}).items()})
        if len(found):
            (found * sign).sum().backward()
        values.append(found.detach())
        begin = part.stop
    return {VALUES: torch.cat(values)} | {name: w.grad for name, w in reference.w.items()}


@contextlib.contextmanager
def planted(fault: str):
    from megatron.zero_mismatch import attention_inputs, attention_sparse, compressor, mhc, router_dsv4, swiglu

    def own_group(real):
        """Rows that pool their own tokens only, in the derivative: on a CPU the values come from the same text."""
        def changed(ctx, grad):
            with mock.patch.object(compressor, "_with_previous", lambda x, _, fill: torch.cat(
                    [torch.full_like(x.chunk(2, -1)[0], fill), x.chunk(2, -1)[1]], 1)):
                return real(ctx, grad)
        return staticmethod(changed)

    def transposed(real):
        """C.T where C belongs, both in the gradient that goes on and in C's own."""
        def changed(ctx, grad):
            x, residual, post, comb = ctx.saved_tensors
            *found, dcomb = real(types.SimpleNamespace(saved_tensors=(x, residual, post, comb.mT)), grad)
            return *found, dcomb.mT.contiguous()
        return staticmethod(changed)

    def without(function, place):
        """The Function's backward with one of its gradients changed."""
        real = function.backward

        def changed(ctx, *grads):
            found = list(real(ctx, *grads))
            found[place[0]] = place[1](found[place[0]])
            return tuple(found)
        return mock.patch.object(function, "backward", staticmethod(changed))

    real_norm, real_product = attention_inputs.rms_grad, swiglu.product_grad
    patches = {
        "routing-weights": lambda: without(router_dsv4._Route, (1, torch.zeros_like)),
        "transposed-mixing": lambda: mock.patch.object(mhc._Post, "backward", transposed(mhc._Post.backward)),
        "attention-sink": lambda: without(attention_sparse._Attend, (3, torch.zeros_like)),
        "norm-length": lambda: mock.patch.object(attention_inputs, "rms_grad", lambda grad, x, weight, eps: (
            (grad.float() * (1 if weight is None else weight.float())
             * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / x.shape[-1] + eps)),
            real_norm(grad, x, weight, eps)[1])),
        "dropped-clamp": lambda: mock.patch.object(swiglu, "product_grad", lambda gate_up, grad, limit: real_product(
            gate_up, grad, float("inf"))),
        "previous-group": lambda: mock.patch.object(
            compressor._Compress, "backward", own_group(compressor._Compress.backward)),
    }
    if fault not in patches:
        raise ValueError(f"no fault {fault!r}; there are: {', '.join(patches)}")
    with patches[fault]():
        yield
