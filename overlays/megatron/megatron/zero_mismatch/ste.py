"""Gradients for values that come from an inference kernel.

Invariant: the forward value is the kernel's, bit for bit: the sign of zero, infinities and NaN payloads included. It
holds because the value passes through a Function as it is: nothing is added to it or subtracted from it. The
arithmetic form `visible + (graph - graph.detach())` does not keep it: -0.0 + 0.0 is +0.0, and inf - inf is NaN.

Gradients: `visible_with_grad` hands the incoming gradient to `graph`, cast to graph's dtype; `visible` gets None.
`straight_through` takes a quantiser for the identity, everywhere, also where it saturates. `replayed` evaluates a
PyTorch reference at the saved inputs during backward, under grad mode, only for its derivative; the kernel and the
reference themselves get None, as does an input that needs no gradient. An undefined incoming gradient stays None.

Second derivatives: through `visible_with_grad` and `straight_through` they are those of `graph` (routing is linear).
`replayed` raises under create_graph=True. Forward-mode differentiation is not defined for any of the three.
"""
from collections.abc import Callable

import torch


class _VisibleWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, visible: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph_dtype = graph.dtype
        return visible

    @staticmethod
    def backward(ctx, grad):
        return None, None if grad is None else grad.to(ctx.graph_dtype)


def visible_with_grad(visible: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
    """The bits of `visible`, with the gradient of `graph`; both [any shape], floating point, on one device.

    The result shares visible's memory. Autograd refuses to change it in place.
    """
    if visible.requires_grad:
        raise ValueError(
            "visible_with_grad: found a `visible` that requires a gradient, expected a kernel's output without one; "
            "its own gradient would be lost: detach it, or run the kernel under torch.no_grad()"
        )
    if visible.shape != graph.shape or visible.device != graph.device:
        raise ValueError(
            f"visible_with_grad: found visible {tuple(visible.shape)} on {visible.device} and graph "
            f"{tuple(graph.shape)} on {graph.device}, expected one shape on one device; reshape or move the graph"
        )
    if not (visible.is_floating_point() and graph.is_floating_point()):
        raise ValueError(
            f"visible_with_grad: found {visible.dtype} and {graph.dtype}, expected floating point on both; "
            "dequantise codes first"
        )
    return _VisibleWithGrad.apply(visible, graph)


def straight_through(master: torch.Tensor, quantise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`quantise(master)`, values of the deployment's own rule in master's shape; the gradient reaches master unchanged.

    `quantise` sees a detached alias and must not write to it: the masters belong to the optimizer.
    """
    source = master.detach()
    with torch.no_grad():
        before = source._version
        visible = quantise(source)
        if source._version != before:
            raise ValueError("straight_through: the quantiser wrote to the master weights; let it return a new one")
    return visible_with_grad(visible, master)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, reference, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.reference = reference
        ctx.save_for_backward(*inputs)  # autograd raises in backward if one of them was written to in between
        return kernel(*(x.detach() for x in inputs))

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("replayed: found create_graph=True; only visible_with_grad has second derivatives")
        needs = ctx.needs_input_grad[2:]
        if grad is None:
            return (None, None) + (None,) * len(needs)
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            out = ctx.reference(*leaves)
        if out.shape != grad.shape:
            raise ValueError(
                f"replayed: found a reference of shape {tuple(out.shape)} for a kernel of shape {tuple(grad.shape)}; "
                "both must compute the same tensor"
            )
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True))
        return (None, None) + tuple(next(found) if need else None for need in needs)


def replayed(
    kernel: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """`kernel(*inputs)`, one tensor, differentiated through `reference(*inputs)`, which runs in backward only.

    `reference` must be deterministic (no dropout): it runs once more, later. It pays with a second computation for
    not keeping the reference's intermediates; `visible_with_grad(kernel(x), reference(x))` is the opposite trade.
    """
    return _Replayed.apply(kernel, reference, *inputs)
