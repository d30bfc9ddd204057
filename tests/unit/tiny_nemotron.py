"""A Nemotron-H of every kind of layer that a CPU runs in milliseconds, filled by the recipe's own rules."""
import pathlib
import types

import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape
from megatron.zero_mismatch.packing import Packed

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


def row_by_row(reference: kernels.Kernels) -> kernels.Kernels:
    """The reference kernels made invariant by force: no row shares a call with another (sequence)."""
    def rows(kernel, shared):
        def call(x, *rest):
            head, rest = rest[:len(rest) - shared], rest[len(rest) - shared:]
            found = [kernel(*(t[i:i + 1] for t in (x, *head)), *rest) for i in range(len(x))]
            return (tuple(map(torch.cat, zip(*found, strict=True))) if isinstance(found[0], tuple) else
                    torch.cat(found))
        return call

    def by_sequence(kernel, tensors, packed_at):
        def call(*a):
            packed, parts = a[packed_at], []
            for begin, end in packed.bounds:
                own = [t[begin:end] for t in a[:tensors]]
                rest = [Packed((end - begin,), packed.device) if r is packed else r for r in a[tensors:]]
                parts.append(kernel(*own, *rest))
            return torch.cat(parts)
        return call

    return kernels.Kernels(
        linear=rows(reference.linear, 1), rms_norm=rows(reference.rms_norm, 2),
        add_rms_norm=rows(reference.add_rms_norm, 2), gated_rms_norm=rows(reference.gated_rms_norm, 3),
        relu2=reference.relu2, conv1d=by_sequence(reference.conv1d, 1, 3), mamba2=by_sequence(reference.mamba2, 2, 5),
        attention=by_sequence(reference.attention, 3, 3), router_logits=rows(reference.router_logits, 1),
        router_top_k=rows(reference.router_top_k, 3),
        experts=lambda x, u, d, w, i: torch.cat([reference.experts(x[t:t + 1], u, d, w[t:t + 1], i[t:t + 1])
                                                 for t in range(len(x))]),
        logprob=rows(reference.logprob, 0),
    )  # fmt: skip
