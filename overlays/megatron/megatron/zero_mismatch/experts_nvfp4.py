"""Routed experts of Nemotron-H with NVFP4 weights and BF16 activations (W4A16), on BF16 masters.

Invariant: a token's output is the engine's for the same row, weights and routing, bit for bit, whatever other tokens
are in the batch: ModelOpt's cast of each expert's master (quant_nvfp4), the engine's own conversion to Humming's layout
(quantization/utils/humming/moe.py:502 of 0.33.0), and the engine's own experts class over it, whose kernels add in one
order at every number of rows (vllm/zero_mismatch/experts_humming.py). Roundings to BF16: behind each product and behind
ReLU^2; the slots' weighted sum is fp32, in their order, and rounded once.

Backward: the cast is taken for the identity, and the derivative is that of `experts` at the weights that were
multiplied, dequantised to BF16, not at the masters. Gradients: x, both masters and the routing weights.

x: [tokens, H] bf16, w13: [E, I, H], w2: [E, H, I] bf16, weights: [tokens, k] fp32, ids: [tokens, k] int32.
"""
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import experts, quant_nvfp4, relu2
from .linear_fp8 import OperandCache
from .masters import Masters
from .packing import wide
from .version_guard import WeightGuard

RESIDENT = ("weight", "weight_scale", "weight_scale_2")  # the engine's tensors of a master, by the end of their names


class Operand(NamedTuple):
    """One master as the kernels take it."""

    values: Callable[[torch.dtype], torch.Tensor]  # dequantised, [E, N, K]
    resident: dict[str, torch.Tensor]  # RESIDENT: what the engine holds
    config: Any  # Humming's description of them


class ExpertKernels(NamedTuple):
    """Values only."""

    operand: Callable[[torch.Tensor], Operand]  # of a master, [E, N, K]
    experts: Callable  # (x, operand13, operand2, weights, ids) -> [tokens, H]
    read: Callable  # (resident tensors, E, N, K) -> the BF16 values they stand for, [E, N, K]


def _cast(master: torch.Tensor) -> tuple[Callable[[torch.dtype], torch.Tensor], dict[str, torch.Tensor]]:
    parts = quant_nvfp4.quantise(master)
    return lambda dtype: quant_nvfp4.dequantise(*parts, dtype), dict(zip(RESIDENT, parts, strict=True))


def _reference_experts(x, w13: Operand, w2: Operand, weights, ids) -> torch.Tensor:
    k, wider = ids.shape[1], torch.promote_types(x.dtype, torch.float32)
    up, down, rows = w13.values(wider), w2.values(wider), x.new_zeros(ids.numel(), x.shape[1])
    for expert in range(len(up)):
        own = (ids.flatten() == expert).nonzero()[:, 0]
        hidden = (wide(x[own // k]) @ up[expert].T).to(x.dtype)
        rows[own] = (wide(relu2.reference(hidden)) @ down[expert].T).to(x.dtype)
    return (wide(rows).view(*ids.shape, -1) * weights[..., None]).sum(1).to(x.dtype)


def _reference_read(resident: dict[str, torch.Tensor], experts: int, rows: int, columns: int) -> torch.Tensor:
    return quant_nvfp4.dequantise(*(resident[name] for name in RESIDENT), torch.bfloat16)


# Plain PyTorch: the deployment's cast and its places of rounding. EXACT leaves out both, in any dtype (gradcheck).
REFERENCE = ExpertKernels(lambda master: Operand(*_cast(master), None), _reference_experts, _reference_read)
EXACT = ExpertKernels(lambda master: Operand(lambda dtype: master.to(dtype), {}, None), _reference_experts,
                      _reference_read)


def _moe_config(count: int, hidden: int, width: int, top_k: int):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    return FusedMoEConfig(
        num_experts=count, experts_per_token=top_k, hidden_dim=hidden, intermediate_size=width,
        num_local_experts=count, num_logical_experts=count, activation=MoEActivation.RELU2_NO_MUL, device="cuda",
        routing_method=RoutingMethodType.Renormalize, in_dtype=torch.bfloat16,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel())


def _vllm_operand(master: torch.Tensor) -> Operand:
    from vllm.model_executor.layers.quantization.utils.humming import convert_to_humming_moe_kernel_format

    count, rows, columns = master.shape
    values, parts = _cast(master)
    layer = torch.nn.Module()  # holds one matrix an expert, under the first product's name
    layer.moe_config, layer.params_dtype, layer.layer_name = _moe_config(count, columns, rows, 1), master.dtype, ""
    for name, part in parts.items():
        layer.register_parameter(f"w13_{name}", torch.nn.Parameter(part, requires_grad=False))
    configs = convert_to_humming_moe_kernel_format(
        layer, quant_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        sublayer_configs={"w13": {"shape_n": rows, "shape_k": columns}})
    resident = {name: getattr(layer, f"w13_{name}").detach() for name in RESIDENT}
    schemas = layer.weight_schemas["w13"], layer.input_schemas["w13"]
    return Operand(values, resident, (configs["w13"], *schemas))


_BUILT: dict[tuple[int, ...], Any] = {}  # the engine's experts by their sizes; each call gives them its weights


def _engine(w13: Operand, w2: Operand, top_k: int):
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.experts.fused_humming_moe import HummingIndexedExperts
    from vllm.model_executor.layers.quantization.utils.humming import get_humming_moe_quant_config

    operands = {"w13": w13, "w2": w2}
    held = {f"{part}_{name}": t for part, operand in operands.items() for name, t in operand.resident.items()}
    configs, weight_schemas, input_schemas = (
        {part: operand.config[i] for part, operand in operands.items()} for i in range(3))
    quant_config = get_humming_moe_quant_config(SimpleNamespace(
        humming_configs=configs, weight_schemas=weight_schemas, input_schemas=input_schemas, **held))
    hidden, width = (config.shape_k - config.pad_shape_k for config in configs.values())
    sizes = configs["w13"].num_experts, hidden, width, top_k
    if sizes not in _BUILT:
        with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))):
            _BUILT[sizes] = HummingIndexedExperts(moe_config=_moe_config(*sizes), quant_config=quant_config)
    found = _BUILT[sizes]
    found.quant_config = quant_config
    return found


def _no_data_parallel():
    """The experts ask the engine's forward context how many tokens other ranks have; there are none."""
    from vllm.forward_context import override_forward_context

    return override_forward_context(SimpleNamespace(dp_metadata=None))


def _vllm_experts(x, w13: Operand, w2: Operand, weights, ids) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    found = _engine(w13, w2, ids.shape[1])
    activation, x = MoEActivation.RELU2_NO_MUL, x.contiguous()
    one, two, out = (x.new_empty(shape) for shape in found._workspace_shapes(x.shape[0], ids.shape[1], activation))
    with _no_data_parallel():
        found.apply(out, x, w13.resident["weight"], w2.resident["weight"], weights.contiguous(), ids.contiguous(),
                    activation, found.num_experts, None, None, None, one, two, None, False)
    return out


def _vllm_read(resident: dict[str, torch.Tensor], count: int, rows: int, columns: int) -> torch.Tensor:
    """The kernel itself reads its layout back: expert by expert, the unit matrix times its weights, one term a sum."""
    like = _vllm_operand(torch.ones(count, rows, columns, dtype=torch.bfloat16, device=resident["weight"].device))
    operand = like._replace(resident=resident)
    found = _engine(operand, operand, 1)
    unit = torch.eye(columns, dtype=torch.bfloat16, device=resident["weight"].device)
    read = unit.new_empty(count, rows, columns)
    for expert in range(count):
        ids = torch.full((columns, 1), expert, dtype=torch.int32, device=unit.device)
        out = unit.new_empty(columns, rows)
        with _no_data_parallel():
            settings, _, _ = found.prepare_humming_moe_kwargs(ids, None, None)
            found.humming_forward("w13", inputs=unit, weight=resident["weight"], input_scale=None, outputs=out,
                                  **settings)
        read[expert] = out.T
    return read


VLLM = ExpertKernels(_vllm_operand, _vllm_experts, _vllm_read)


class _ExpertsNvfp4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, x, w13, w2, weights, ids, cache, guard):
        ctx.masters = Masters(guard, w13=w13, w2=w2)
        operands = [
            kernels.operand(w.detach()) if cache is None else cache.get(w, kernels.operand) for w in (w13, w2)
        ]
        ctx.values = [operand.values for operand in operands]
        ctx.save_for_backward(x, weights, ids)
        return kernels.experts(x.detach(), *operands, weights.detach(), ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        x, weights, ids = ctx.saved_tensors
        multiplied = [values(x.dtype) for values in ctx.values]
        return None, *experts.gradients(x, *multiplied, weights, ids, grad), None, None, None


def experts_nvfp4(
    kernels: ExpertKernels, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
    ids: torch.Tensor, *, cache: OperandCache | None = None, guard: WeightGuard | None = None,
) -> torch.Tensor:
    """[tokens, H]: each token through its experts, weighted and summed; see the module."""
    count, width, hidden = w13.shape
    if w2.shape != (count, hidden, width) or x.shape[-1] != hidden or ids.shape != weights.shape:
        raise ValueError(
            f"experts_nvfp4: found x {tuple(x.shape)}, w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}, weights "
            f"{tuple(weights.shape)}, ids {tuple(ids.shape)}; expected [T, H], [E, I, H], [E, H, I], [T, k], [T, k]"
        )
    if kernels is not EXACT and not x.dtype == w13.dtype == w2.dtype == torch.bfloat16:
        raise ValueError(f"experts_nvfp4: found x {x.dtype}, w13 {w13.dtype} and w2 {w2.dtype}, expected bfloat16; "
                         "keep fp32 masters in the optimizer")
    return _ExpertsNvfp4.apply(kernels, x, w13, w2, weights, ids, cache, guard)
