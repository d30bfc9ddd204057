"""NVFP4 experts by Humming, in upstream's own class on random weights, and a batch of tokens routed to them."""
import types

import pytest
import torch

from prove import recipe
from prove.scripts import load

SIZES = {"tiny": (16, 4, 512, 256), "real": (128, 6, 2688, 1856)}  # experts, top-k, hidden, intermediate
FP4 = load(recipe.load("nemotron-3.5-lightning", tiny="tiny-quantised").weights_script)


def _quantise(weight):
    """(packed, scales, one scale an expert, the values they stand for)."""
    packed, scales, overall = (torch.stack(parts) for parts in zip(*map(FP4.to_fp4, weight.float().cpu()), strict=True))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    values = FP4.FP4_VALUES[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    values = values * (scales.float() * overall[:, None, None]).repeat_interleave(16, -1)
    return packed.cuda(), scales.cuda(), overall.cuda(), values.cuda()


class Experts:
    """Upstream's experts on random weights, called as the layer calls them."""

    def __init__(self, size):
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import (
            FusedMoEConfig,
            FusedMoEParallelConfig,
            RoutingMethodType,
        )
        from vllm.model_executor.layers.fused_moe.experts.fused_humming_moe import HummingIndexedExperts
        from vllm.model_executor.layers.quantization.utils.humming import (
            convert_to_humming_moe_kernel_format,
            get_humming_moe_quant_config,
        )

        self.count, self.top_k, self.hidden, inner = SIZES[size]
        generator = torch.Generator("cuda").manual_seed(5)
        up = torch.randn(self.count, inner, self.hidden, device="cuda", generator=generator) * self.hidden**-0.5
        down = torch.randn(self.count, self.hidden, inner, device="cuda", generator=generator) * inner**-0.5
        self.activation = MoEActivation.RELU2_NO_MUL
        config = FusedMoEConfig(
            num_experts=self.count, experts_per_token=self.top_k, hidden_dim=self.hidden, intermediate_size=inner,
            num_local_experts=self.count, num_logical_experts=self.count, activation=self.activation, device="cuda",
            routing_method=RoutingMethodType.Renormalize, in_dtype=torch.bfloat16,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel())
        self.masters = up, down = up.bfloat16(), down.bfloat16()
        layer = torch.nn.Module()
        layer.moe_config, layer.params_dtype, layer.layer_name = config, torch.bfloat16, "experts"
        for name, weight in (("w13", up), ("w2", down)):
            packed, scales, overall, values = _quantise(weight)
            setattr(self, name, values)
            for suffix, tensor in (("weight", packed), ("weight_scale", scales), ("weight_scale_2", overall)):
                layer.register_parameter(f"{name}_{suffix}", torch.nn.Parameter(tensor, requires_grad=False))
        convert_to_humming_moe_kernel_format(layer, quant_config={"quant_method": "modelopt", "quant_algo": "nvfp4"})
        self.layer = layer
        with set_current_vllm_config(VllmConfig()):
            self.experts = HummingIndexedExperts(moe_config=config, quant_config=get_humming_moe_quant_config(layer))

    def __call__(self, x, ids, weights):
        shapes = self.experts._workspace_shapes(x.shape[0], self.top_k, self.activation)
        one, two, output = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        context = types.SimpleNamespace(dp_metadata=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm.model_executor.layers.fused_moe.experts.fused_humming_moe.get_forward_context",
                          lambda: context)
            self.experts.apply(output, x, self.layer.w13_weight, self.layer.w2_weight, weights, ids, self.activation,
                               self.count, None, None, None, one, two, None, False)
        return output

    def reference(self, x, ids, weights):
        """Token by token in fp64, with the roundings to BF16 that the kernels have between operators."""
        rows = []
        for row, chosen, share in zip(x.double(), ids.tolist(), weights.double(), strict=True):
            parts = []
            for expert in chosen:
                inner = (self.w13[expert].double() @ row).bfloat16().double().clamp(min=0) ** 2
                parts.append((self.w2[expert].double() @ inner.bfloat16().double()).bfloat16().double())
            rows.append(share @ torch.stack(parts))
        return torch.stack(rows)


def routed(experts, tokens, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, experts.hidden, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(tokens, experts.count, device="cuda", generator=generator)
    weights, ids = scores.topk(experts.top_k)
    return x, ids.int(), weights
