"""A DeepSeek-V4 of every kind of layer whose block FP8 is real and which a CPU runs in tens of milliseconds.

Its experts' gate and up have a deviation near 1, so swiglu_limit 2.5 clamps about one value in a hundred, as 10 does
at the recipe's 4: a derivative without the clamp shows."""
import pathlib

import torch
from megatron.zero_mismatch import kernels_dsv4
from megatron.zero_mismatch.models.deepseek_v4 import DeepseekV4, Shape

from prove.scripts import load

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "deepseek-v4"
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 64, "hidden_size": 128, "num_attention_heads": 2,
    "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 1,
    "sliding_window": 8, "layer_types": ["sliding", "csa", "hca"], "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"csa": 4, "hca": 128}, "index_n_heads": 2, "index_head_dim": 128, "index_topk": 3, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "moe_intermediate_size": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "swiglu_limit": 2.5,
    "expert_dtype": "fp8",
}  # fmt: skip


def tables(positions: int = 512) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    angles = {ratio: torch.rand(positions, 32, generator=generator) * 6 for ratio in (0, 4, 128)}
    return {ratio: torch.cat([a.cos(), a.sin()], -1) for ratio, a in angles.items()}


def _expert_table(param, generator):
    scores = torch.rand(param.shape[0], CONFIG["n_routed_experts"], generator=generator)
    param.copy_(scores.topk(param.shape[1], dim=-1).indices.to(param.dtype))


def fill(made: DeepseekV4, *other: tuple) -> DeepseekV4:
    """By the recipe's rules; a projection that the engine holds in FP8 gets rows of variance 1 / fan-in. `other`: names
    of the recipe's rules, each with the rule to take instead."""
    recipe = load(RECIPE / "tiny" / "weights.py")
    instead = {recipe._fp8: recipe._normal_by_row(1.0), **{getattr(recipe, name): rule for name, rule in other}}
    recipe.RULES = [(pattern, instead.get(rule, rule)) for pattern, rule in recipe.RULES]
    recipe.fill(made)
    return made


def model() -> DeepseekV4:
    return fill(DeepseekV4(Shape.from_hf(CONFIG), kernels_dsv4.reference(), tables()), ("_expert_table", _expert_table))
