"""The smallest DeepSeek-V4 of every kind of layer: in fp64 on exact kernels, and one whose block FP8 is real."""
import torch

from megatron.zero_mismatch import kernels_dsv4
from megatron.zero_mismatch.models.deepseek_v4 import DeepseekV4, Shape

CONFIG = {
    "vocab_size": 17, "hidden_size": 8, "num_attention_heads": 4, "head_dim": 6, "qk_rope_head_dim": 4,
    "q_lora_rank": 5, "o_lora_rank": 3, "o_groups": 2, "sliding_window": 5,
    "layer_types": ["sliding", "csa", "hca", "csa"], "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"csa": 4, "hca": 128}, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "hc_mult": 3,
    "hc_sinkhorn_iters": 3, "hc_eps": 1e-3, "rms_norm_eps": 1e-3, "moe_intermediate_size": 4, "n_routed_experts": 5,
    "num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "swiglu_limit": 0.7, "expert_dtype": "fp8",
}  # fmt: skip
FP8_CONFIG = CONFIG | {
    "hidden_size": 128, "num_attention_heads": 2, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 128,
    "o_lora_rank": 128, "o_groups": 1, "index_head_dim": 128, "moe_intermediate_size": 128,
    "layer_types": ["sliding", "csa"], "mlp_layer_types": ["hash_moe", "moe"], "swiglu_limit": 10.0,
}  # fmt: skip


def tables(config, dtype):
    generator, turned = torch.Generator().manual_seed(7), config["qk_rope_head_dim"]
    angles = {ratio: torch.rand(160, turned // 2, generator=generator) * 6 for ratio in (0, 4, 128)}
    return {ratio: torch.cat([a.cos(), a.sin()], -1).to(dtype) for ratio, a in angles.items()}


def build(config=CONFIG, table=kernels_dsv4.exact, dtype=torch.float64, **more):
    model = DeepseekV4(Shape.from_hf(config), table(), tables(config, torch.promote_types(dtype, torch.float32)), dtype,
                       **more)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                p.copy_(torch.stack([torch.randperm(config["n_routed_experts"], generator=generator)[: p.shape[1]]
                                     for _ in p]))
            elif "norm" in name or name.endswith("_scale"):
                p.copy_(1 + 0.1 * torch.randn(p.shape, generator=generator))
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.5))
    return model


def quantised(**more):
    return build(FP8_CONFIG, kernels_dsv4.reference, torch.bfloat16, **more)
