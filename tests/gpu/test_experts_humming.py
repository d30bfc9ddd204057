"""On the GPU: NVFP4 experts by Humming, in upstream's own class under batch invariance, at the tiny and the real width.

A token's output has the same bits in every batch and at every place in it, and is the product of the dequantised
weights within BF16. vLLM must be imported with VLLM_BATCH_INVARIANT=1, so set it for this file's pytest.
"""
import os
import types

import pytest
import torch
from mamba2_cases import assert_same_bits

from prove import recipe
from prove.scripts import load

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("VLLM_BATCH_INVARIANT") != "1",
    reason="needs a CUDA GPU and VLLM_BATCH_INVARIANT=1")
SIZES = {"tiny": (16, 4, 512, 256), "real": (128, 6, 2688, 1856)}  # experts, top-k, hidden, intermediate
TOKENS = (1, 4, 16, 64, 257, 1000, 4096)  # across the table's tiles, and the batches that move Marlin's bits
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


@pytest.fixture(scope="module", params=SIZES)
def experts(request):
    return Experts(request.param)


def _routed(experts, tokens, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, experts.hidden, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(tokens, experts.count, device="cuda", generator=generator)
    weights, ids = scores.topk(experts.top_k)
    return x, ids.int(), weights


def test_a_token_keeps_its_bits_in_any_batch(experts):
    """vllm PR #46639: Marlin's stream-K gives a row other bits at 4, 16, 64 and 257 tokens."""
    x, ids, weights = _routed(experts, max(TOKENS))
    whole = experts(x, ids, weights)
    for tokens in TOKENS:
        assert_same_bits(experts(x[:tokens], ids[:tokens], weights[:tokens]), whole[:tokens], f"{tokens} tokens")


def test_order_in_the_batch_and_a_second_run_move_no_bit(experts):
    """vllm #52525: rows of an expert are aligned in another order and the result moves; #56887: split K by atomics."""
    x, ids, weights = _routed(experts, 600)
    whole, order = experts(x, ids, weights), torch.randperm(600, device="cuda")
    assert_same_bits(experts(x, ids, weights), whole, "again")
    assert_same_bits(experts(x[order], ids[order], weights[order]), whole[order], "permuted")


def test_crowded_experts_leave_the_others_alone(experts):
    """Every other token goes to the same experts: tiles fill and split differently, no row's sum does."""
    x, ids, weights = _routed(experts, 512)
    crowded = ids.clone()
    crowded[1::2] = torch.arange(experts.top_k, device="cuda", dtype=torch.int32)
    assert_same_bits(experts(x, crowded, weights)[::2], experts(x, ids, weights)[::2], "the tokens between")


def test_result_is_the_dequantised_product(experts):
    x, ids, weights = _routed(experts, 16)
    expected = experts.reference(x, ids, weights)
    error = (experts(x, ids, weights).double() - expected).abs().max() / expected.abs().max()
    assert error < 0.02, f"{float(error):.4f} of the largest value; BF16 between the two products allows about 0.01"
