"""prove's trainer backend for the quantised Nemotron-H without a GPU or vLLM, as trainer_fake is for the BF16 one.

The "engine" holds FP8 and NVFP4 codes and scales in the engine's names and computes from those alone: its operands are
what it holds, not what masters would give. flags["fault"] plants what must be noticed: "scales" (the scales of its
first weights stay behind).
"""
import dataclasses
import types

import torch
import trainer_fake
from megatron.zero_mismatch import experts_nvfp4, kernels, linear_fp8_static, quant_nvfp4
from megatron.zero_mismatch.models import nemotron_h_weights
from tiny_nemotron_quantised import CONFIG, engine_weights, model


class Backend(trainer_fake.Backend):
    def __init__(self, *, model: str, flags: dict, weights_script=None, emit=None):
        super().__init__(model=model, flags={}, weights_script=weights_script, emit=emit)
        self.config, self.fault = CONFIG, flags.get("fault")
        held = {name: torch.nn.Parameter(t.clone(), requires_grad=False) for name, t in engine_weights().items()}
        first = {name: t.clone() for name, t in held.items() if name.endswith("weight_scale")}
        self.engine = _over(held, first if self.fault == "scales" else {})
        buffers = {name: t for name, t in held.items() if nemotron_h_weights.is_cache_scale(name)}
        parameters = {name: t for name, t in held.items() if name not in buffers}
        self.runner = types.SimpleNamespace(model=types.SimpleNamespace(
            named_parameters=parameters.items, named_buffers=buffers.items, model=self.engine.model))


def _over(held: dict[str, torch.Tensor], first: dict[str, torch.Tensor]):
    """A model that reads the engine's own tensors; a quantised master only says which of them are its."""
    made = model(weights=held)
    named = {}
    for name, kind, parameter in list(nemotron_h_weights._named(made)):
        own = nemotron_h_weights._names(name, kind)
        if kind == "exponential":
            owner = made.get_submodule(name.rpartition(".")[0])
            del owner.A_log
            owner.A_log = trainer_fake._Rates(held[name])
        elif kind in ("FP8", "NVFP4"):
            named[parameter.data_ptr()] = own
        else:
            parameter.data = held[name].data.view(parameter.shape)

    def of(master: torch.Tensor) -> list[torch.Tensor]:
        return [first.get(name, held[name]) for name in named[master.data_ptr()]]

    def projection(master):
        codes, scale = of(master)
        return linear_fp8_static.Operand(codes.t(), scale)

    def experts(master):
        parts = of(master)
        return experts_nvfp4.Operand(lambda dtype: quant_nvfp4.dequantise(*parts, dtype), {}, None)

    table = kernels.reference().quantised
    made.kernels = dataclasses.replace(made.kernels, quantised=dataclasses.replace(
        table, linear=table.linear._replace(operand=projection), experts=table.experts._replace(operand=experts)))
    return made
