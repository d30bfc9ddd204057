"""A Nemotron-H of every kind of layer that a CPU runs in milliseconds, filled by the recipe's own rules."""
import pathlib
import types

import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape

from prove.scripts import load

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "nemotron-3.5-lightning"
CONFIG = {
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 64, "hidden_size": 32, "hybrid_override_pattern": "ME*M-E",
    "layer_norm_epsilon": 1e-5, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "conv_kernel": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "chunk_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "n_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def engine_weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Parameter]:
    """What an engine of this model would hold, by its names."""
    model = NemotronH(Shape.from_hf(CONFIG), kernels.reference(), dtype)
    weights = {name: torch.nn.Parameter(torch.empty_like(t), requires_grad=False) for name, t in model.exported()}
    load(RECIPE / "tiny" / "weights.py").fill(types.SimpleNamespace(named_parameters=weights.items))
    return weights


def model(dtype: torch.dtype = torch.bfloat16, table: kernels.Kernels | None = None, recompute: bool = False):
    made = NemotronH(Shape.from_hf(CONFIG), table or kernels.reference(), dtype, recompute)
    made.take(engine_weights(dtype))
    return made


def sequences(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, CONFIG["vocab_size"], (length,), generator=generator) for length in lengths]
