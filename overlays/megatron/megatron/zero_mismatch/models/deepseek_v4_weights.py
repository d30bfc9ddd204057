"""DeepSeek-V4's weights between trainer and engine: BF16 masters here, FP8 codes with fp32 scales there.

Invariant: `exported` yields the operands of the trainer's own forward, tensor for tensor: the exporter's cast and then
the engine's load, by the same two functions, and the very tensors where the model keeps them in a cache. They go into
the engine's resident tensors in place; after it the engine must derive once more what it keeps besides (mHC's broadcast
weight: model.process_weights_after_loading).

`take` reads an engine's weights back. A code times its scale is a BF16 number, so masters are exact. A block whose
largest code is 224 is exported with half the scale and twice the codes, the same values: export before the first
rollout, so that both sides hold the same bytes as well.
"""
from collections.abc import Iterator

import torch

from .. import quant_fp8


def _quantised(model, name: str) -> str | None:
    """How the engine quantises this parameter: "linear", "grouped" (wo_a), "experts", or None."""
    if ".ffn.experts." in name:
        return "experts"
    if not getattr(model.get_submodule(name.rpartition(".")[0]), "fp8", False):
        return None
    return "grouped" if name.endswith(".wo_a.weight") else "linear"


def _named(model) -> Iterator[tuple[str, str | None, torch.nn.Parameter]]:
    """(the engine's name, how it is quantised, the master)."""
    for name, parameter in model.named_parameters():
        yield name.replace(".experts.w", ".experts.routed_experts.w"), _quantised(model, name), parameter


def exported(model) -> Iterator[tuple[str, torch.Tensor]]:
    k, cache = model.run.kernels, model.run.cache
    make = {"linear": k.linear.operand, "experts": k.experts.operand,
            "grouped": lambda w: k.o_proj.operand(w, model.shape.groups)}
    for name, kind, parameter in _named(model):
        if kind is None:
            yield name, parameter.detach()
        else:
            codes, scales = make[kind](parameter.detach()) if cache is None else cache.get(parameter, make[kind])
            yield name, codes
            yield name + "_scale_inv", scales


@torch.no_grad()
def take(model, engine: dict[str, torch.Tensor]) -> None:
    wanted = {n for name, kind, _ in _named(model) for n in ([name, name + "_scale_inv"] if kind else [name])}
    if wanted != engine.keys():
        odd = sorted(wanted ^ engine.keys())
        raise ValueError(f"{len(odd)} names are on one side only, first {odd[:4]}; is this the same model?")
    for name, kind, parameter in _named(model):
        value = engine[name]
        if kind:
            value = torch.stack([quant_fp8.dequantise_weight(*part) for part in _matrices(value, engine, name)])
        parameter.copy_(value.reshape(parameter.shape))


def rotary_tables(engine: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Cosines and sines by compression ratio, as the engine's layers read them: [positions, rotated] fp32.

    Copies: what an engine made in inference mode cannot be saved for a backward.
    """
    layers = [layer.attn for layer in engine.model.layers]
    return {attn.compress_ratio if attn.compress_ratio > 1 else 0: attn.rotary_emb.cos_sin_cache.clone()
            for attn in layers}


def _matrices(codes: torch.Tensor, engine: dict, name: str):
    """(codes, scales) of each matrix; SM90 keeps one fp32 scale a 128 x 128 block."""
    scales = engine[name + "_scale_inv"]
    blocks = codes.shape[-2] // quant_fp8.BLOCK, codes.shape[-1] // quant_fp8.BLOCK
    if scales.dtype != torch.float32 or tuple(scales.shape[-2:]) != blocks:
        raise ValueError(f"{name}: found scales {scales.dtype} {tuple(scales.shape)}, expected fp32 {blocks}, the "
                         "layout of SM90; on SM100 start from the checkpoint instead")
    return zip(codes.reshape(-1, *codes.shape[-2:]), scales.reshape(-1, *blocks), strict=True)
