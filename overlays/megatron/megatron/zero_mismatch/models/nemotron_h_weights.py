"""Nemotron-H's weights between trainer and engine: the engine's names, and its codes and scales for BF16 masters.

Invariant: `exported` yields the operands of the trainer's own forward, tensor for tensor and in the engine's layout:
FP8 codes lie [K, N] there, experts as Humming packs them; the very tensors where the model keeps them in a cache. They
go into the engine's resident tensors in place, and nothing is left for the engine to derive. The scales of inputs and
of the cache of keys and values go along unchanged.

`take` reads an engine's weights back, and starts masters from the values they stand for, rounded to BF16: quantised
again, these may give another scale and other codes, and A is the exponential of a logarithm. So export before the
first rollout; from then on both sides hold the same bytes.
"""
from collections.abc import Iterator

import torch

from .. import experts_nvfp4, linear_fp8_static

_CACHE_SCALES = (".attn._q_scale", ".attn._k_scale", ".attn._v_scale")


def is_cache_scale(name: str) -> bool:
    """Of the engine's buffers, those that take part: the others are no part of what a rollout answers with."""
    return name.endswith(_CACHE_SCALES)


def _named(model) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """(the engine's name, what it makes of the master, the master)."""
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module, kind = model.get_submodule(owner), ""
        if leaf == "A_log":
            name, kind = f"{owner}.A", "exponential"
        elif leaf == "input_scale" or is_cache_scale(name):
            kind = "scale"
        elif leaf == "weight" and module.fp8:
            kind = "FP8"
        elif getattr(module, "nvfp4", False):
            kind = "NVFP4"
        yield name.replace(".experts.w", ".experts.routed_experts.w"), kind, parameter


def _names(name: str, kind: str) -> list[str]:
    """The engine's tensors of a master."""
    if kind == "FP8":
        return [name, f"{name}_scale"]
    if kind == "NVFP4":
        return [name.removesuffix("weight") + leaf for leaf in experts_nvfp4.RESIDENT]
    return [name]


def exported(model) -> Iterator[tuple[str, torch.Tensor]]:
    for name, kind, parameter in _named(model):
        yield from zip(_names(name, kind), _made(model, kind, parameter), strict=True)


def _made(model, kind: str, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    master = parameter.detach()
    if kind == "exponential":
        return [-master.exp()]
    if kind == "scale":
        return [master.reshape(())]
    if kind == "FP8":
        codes, scale = _operand(model, model.kernels.quantised.linear.operand, parameter)
        return [codes.t(), scale]
    if kind == "NVFP4":
        resident = _operand(model, model.kernels.quantised.experts.operand, parameter).resident
        return [resident[leaf] for leaf in experts_nvfp4.RESIDENT]
    return [master]


def _operand(model, make, parameter: torch.nn.Parameter):
    return make(parameter.detach()) if model.cache is None else model.cache.get(parameter, make)


@torch.no_grad()
def take(model, engine: dict[str, torch.Tensor]) -> None:
    wanted = {n for name, kind, _ in _named(model) for n in _names(name, kind)}
    if wanted != engine.keys():
        odd = sorted(wanted ^ engine.keys())
        raise ValueError(f"{len(odd)} names are on one side only, first {odd[0]!r}; is this the same model?")
    for name, kind, parameter in _named(model):
        held = [engine[n] for n in _names(name, kind)]
        parameter.copy_(_taken(model.kernels.quantised, kind, held, parameter))


def _taken(kernels, kind: str, held: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if kind == "exponential":
        return (-held[0]).log()
    if kind == "scale":
        return held[0].reshape(1)
    if kind == "FP8":
        return linear_fp8_static.dequantise(held[0].t(), held[1], like.dtype)
    if kind == "NVFP4":
        return kernels.experts.read(dict(zip(experts_nvfp4.RESIDENT, held, strict=True)), *like.shape)
    return held[0]


def calibrated(model) -> dict[str, torch.Tensor]:
    """The scales of inputs and of the cache, by the engine's names."""
    return {name: p.detach() for name, kind, p in _named(model) if kind == "scale"}


def multiplied(model) -> dict[str, torch.Tensor]:
    """By the engine's name of a master: what the forward multiplies with, dequantised, in the master's shape. Made
    anew, not taken from a cache: it is there to compare with."""
    kernels, found = model.kernels.quantised, {}
    for name, kind, parameter in _named(model):
        master, wide = parameter.detach(), torch.promote_types(parameter.dtype, torch.float32)
        if kind == "FP8":
            found[name] = linear_fp8_static.dequantise(*kernels.linear.operand(master), wide)
        elif kind == "NVFP4":
            found[name] = kernels.experts.operand(master).values(wide)
        elif kind != "scale":
            (found[name],) = _made(model, kind, parameter)
    return found
