"""DeepSeek-V4's gradients beside those of the independent reference; as gradients.py, loss by loss.

`expected` is the reference in fp64 without any rounding, `usual` the same text in BF16 with the deployment's FP8 for
activations and K rows: its distance from fp64 is what FP8 and BF16 cost this model at these inputs, and the bound on
the actor is a multiple of it (prove/grad.py). Experts and compressed rows are the actor's own choice on all sides.

The second comparison (gradients.py) rounds to FP8 in fp64 as well, and gives both sides the actor's own values in front
of its quantisers, but for those inside the routed experts and of the compressed rows, which are rounded anew.

Held on the device at once: the weights in fp64 (in BF16 they are the actor's own), the gradients of one loss by one
reference in fp64, by the other as they are kept, in fp32, and by one in BF16, and the graph of one pass over all
sequences. Of the recipe's tiny-train these are 16, 16, 8, 4 and 14 GiB. Only sums go on to the next loss, and they are
read after each. Each loss runs its forward anew, a third of a pass: kept, the graphs of all four passes would lie
beside everything else.
"""
from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from unittest import mock

import torch

from prove.gradients import DRAWS, VALUES, _signs, accumulate, held_to_usual, require_all, with_operands
from prove.reference_deepseek_v4 import Reference

# Each in the backward alone: a router that learns nothing, mHC's mixing matrix transposed, a norm whose length does not
# depend on its input, a sink without a gradient, rows that pool their own four tokens only, experts whose derivative
# passes where the forward clamped.
FAULTS = ("routing-weights", "transposed-mixing", "norm-length", "attention-sink", "previous-group", "dropped-clamp")
# (dtype, FP8 is rounded to, at the actor's operands) of usual and expected, a comparison.
SIDES = (((torch.bfloat16, True, False), (torch.float64, False, False)),
         ((torch.bfloat16, True, True), (torch.float64, True, True)))


class Side:
    """One comparison: of each parameter, sums over the losses, in fp64 where the gradients lie."""

    def __init__(self):
        # Of the loss at hand, by parameter, in fp32: its rounding is 2**-24 of them, the distances are from 2**-9 on.
        self.want: dict[str, torch.Tensor] = {}
        self.yard: dict[str, torch.Tensor] = {}  # (usual - want)^2, want^2
        self.sums: dict[str | None, dict[str, torch.Tensor]] = {}  # by case: (own - want)^2, own^2, own * want

    def take(self, usual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names) -> None:
        """The next loss's yardstick, the same for every case."""
        self.want = {name: expected.pop(name).float() for name in names}
        for name, want in self.want.items():
            want = want.double()
            off = usual[name].double() - want
            self.yard[name] = self.yard.get(name, 0) + torch.stack([_dot(off, off), _dot(want, want)])

    def add(self, case: str | None, own: dict[str, torch.Tensor]) -> None:
        sums = self.sums.setdefault(case, {})
        for name, gradient in own.items():
            found, want = gradient.double(), self.want[name].double()
            off = found - want
            sums[name] = sums.get(name, 0) + torch.stack([_dot(off, off), _dot(found, found), _dot(found, want)])

    def rows(self, case: str | None) -> list[dict]:
        sums = self.sums[case]
        read = torch.stack([torch.cat([self.yard[name], sums[name]]) for name in sums]).tolist()
        return [_row(name, *numbers) for name, numbers in zip(sums, read, strict=True)]


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a.flatten(), b.flatten())


def _row(name: str, usual: float, want: float, error: float, own: float, dot: float) -> dict:
    """A gradient that is expected to be zero has no relative error: NaN, which is over any bound."""
    size = (own * want) ** 0.5
    error, usual = ((part / want) ** 0.5 if want else float("nan") for part in (error, usual))
    return {"parameter": name, "error": error, "norm": want**0.5, "usual_error": usual,
            "cosine": dot / size if size else 0.0}


def compare(actor, config: dict, sequences: list[torch.Tensor], micro: int, faults: list[str]) -> Iterator[dict]:
    """After each loss, of those so far: rows, and `faults`: the same rows with each fault planted in the actor's
    backward. See gradients.compare."""
    sizes = {name: p.numel() for name, p in actor.model.named_parameters()}
    cases = (None, *faults)
    weights = {name: p.detach() for name, p in actor.model.named_parameters()}
    references = {dtype: Reference(config, weights, actor.model.tables, dtype)
                  for dtype in (torch.bfloat16, torch.float64)}
    sides, seen = [Side() for _ in SIDES], None
    for draw in range(DRAWS):
        signs = _signs(sequences, draw)
        for case in cases:
            with planted(case) if case else contextlib.nullcontext():
                values, found = _of_actor(actor, sequences, signs, micro)
            seen = seen or found  # the forward is the same every time
            own = {VALUES: values} | actor.gradients()
            for side, pair in zip(sides, SIDES, strict=True):
                if case is None:
                    usual, expected = (_reference(references[how[0]], sequences, signs, seen, *how[1:])
                                       for how in pair)
                    require_all(expected, own)
                    side.take(usual, expected, own)
                    del usual, expected
                side.add(case, own)
            actor.ddp.zero_grad_buffer()
        for side in sides:
            side.want.clear()
        rounded, same = sides
        rows = {case: held_to_usual(rounded.rows(case), sizes) + with_operands(same.rows(case), sizes)
                for case in cases}
        left = DRAWS - draw - 1
        yield {"rows": rows.pop(None), "faults": rows, "missing": [f"{left} of {DRAWS} losses"] if left else []}


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


def _reference(reference, sequences, signs, seen, fp8: bool, operands: bool) -> dict[str, torch.Tensor]:
    """The logprobs and every gradient, which the reference's leaves are left without."""
    experts, rows, given = seen
    values = reference.logprobs(sequences, experts, rows, fp8=fp8, given=given if operands else None)
    (values * torch.cat(signs)).sum().backward()
    found = {VALUES: values.detach()} | {name: w.grad for name, w in reference.w.items()}
    for w in reference.w.values():
        w.grad = None
    return found


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
