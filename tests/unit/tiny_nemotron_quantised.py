"""The tiny quantised Nemotron-H: the recipe's own writer over a config that a CPU runs, and what an engine makes of it.

Experts lie as the reference kernels have them, not in Humming's layout: that one needs a GPU (tests/gpu).
"""
import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.models import nemotron_h_weights
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape
from tiny_nemotron import CONFIG as PLAIN
from tiny_nemotron import RECIPE

from prove.scripts import load

WRITER = load(RECIPE / "tiny-quantised" / "weights.py")
CONFIG = PLAIN | {
    "hybrid_override_pattern": "ME*M-E*", "mamba_num_heads": 16, "mamba_head_dim": 4, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
CONFIG["quantization_config"] = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": WRITER.quantised(CONFIG),
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
}  # fmt: skip


def _part(name: str, checkpoint: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of the engine by its name, as vLLM's loader and its process_weights_after_loading leave it."""
    theirs = name.replace("model.", "backbone.", 1).replace("embed_tokens", "embeddings")
    if name.endswith(".A"):
        return -checkpoint[f"{theirs}_log"].exp()
    if name.endswith("_q_scale"):
        return torch.tensor(1.0)
    if nemotron_h_weights.is_cache_scale(name):
        of = name[-len("k_scale")]
        return checkpoint[theirs.replace(f".attn._{of}_scale", f".{of}_proj.{of}_scale")]
    if ".routed_experts." in name:
        stem, _, leaf = theirs.partition(".routed_experts.")
        part, _, leaf = leaf.partition("_")
        proj = {"w13": "up_proj", "w2": "down_proj"}[part]
        return torch.stack([checkpoint[f"{stem}.{e}.{proj}.{leaf}"] for e in range(CONFIG["n_routed_experts"])])
    if ".qkv_proj." in name:
        parts = [checkpoint[theirs.replace("qkv_proj", f"{of}_proj")] for of in "qkv"]
        found = torch.cat(parts) if parts[0].ndim else parts[0]
    else:
        found = checkpoint[theirs]
    if name.endswith("gate.weight"):
        return found.float()
    return found.t() if found.dtype == torch.float8_e4m3fn else found


def engine_weights() -> dict[str, torch.Tensor]:
    """What an engine of this model would hold, by its names, in the reference kernels' layout."""
    checkpoint = WRITER.tensors(CONFIG)
    shape = NemotronH(Shape.from_hf(CONFIG), kernels.reference())
    names = [n for name, kind, _ in nemotron_h_weights._named(shape) for n in nemotron_h_weights._names(name, kind)]
    return {name: _part(name, checkpoint) for name in names}


def model(dtype: torch.dtype = torch.bfloat16, table: kernels.Kernels | None = None, recompute: bool = False,
          weights: dict[str, torch.Tensor] | None = None) -> NemotronH:
    made = NemotronH(Shape.from_hf(CONFIG), kernels.reference(), dtype, recompute)
    made.take(weights or engine_weights())
    made.kernels = table or made.kernels
    return made
