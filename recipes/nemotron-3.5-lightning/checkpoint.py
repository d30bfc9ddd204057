"""What the written tiny models share: every parameter by its checkpoint name, its values, and how a folder is saved.

Values are drawn on the CPU under the rules of tiny/weights.py, seeded by the checkpoint's names. They are not those of
[tiny]: that model is filled on the engine's device, by the engine's names, with q, k and v in one tensor and the
experts of a layer in another; each of these makes other numbers. Names and shapes are what vLLM 0.33.0's loader asks
for (model_executor/models/nemotron_h.py).
"""
import json
import pathlib
import re
import zlib

import torch

from prove.scripts import load

RULES = load(pathlib.Path(__file__).parent / "tiny" / "weights.py")
NAMES = ((r"backbone\.embeddings", "embed_tokens"), (r"[qkv]_proj", "qkv_proj"), (r"A_log", "A"))  # those of the rules
FP32 = re.compile(r"(A_log|e_score_correction_bias)$")


def sizes(source: str) -> dict:
    """What is in `source`/config.json."""
    return json.loads(pathlib.Path(source, "config.json").read_text())


def layers(config: dict) -> list[tuple[str, str]]:
    """(prefix, kind) of every layer."""
    return [(f"backbone.layers.{i}", kind) for i, kind in enumerate(config["hybrid_override_pattern"])]


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape of every parameter before quantisation."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    groups = config["n_groups"] * config["ssm_state_size"]
    heads, query = config["mamba_num_heads"], config["num_attention_heads"] * config["head_dim"]
    key, experts = config["num_key_value_heads"] * config["head_dim"], config["n_routed_experts"]

    def feed_forward(width: int) -> dict:
        return {"up_proj.weight": (width, hidden), "down_proj.weight": (hidden, width)}

    def under(prefix: str, entries: dict) -> dict:
        return {f"{prefix}.{name}": shape for name, shape in entries.items()}

    kinds = {
        "M": {"in_proj.weight": (2 * inner + 2 * groups + heads, hidden), "out_proj.weight": (hidden, inner),
              "conv1d.weight": (inner + 2 * groups, 1, config["conv_kernel"]), "conv1d.bias": (inner + 2 * groups,),
              "A_log": (heads,), "D": (heads,), "dt_bias": (heads,), "norm.weight": (inner,)},
        "*": {"q_proj.weight": (query, hidden), "k_proj.weight": (key, hidden), "v_proj.weight": (key, hidden),
              "o_proj.weight": (hidden, query)},
        "-": feed_forward(config["intermediate_size"]),
        "E": {"gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,),
              **under("shared_experts", feed_forward(config["moe_shared_expert_intermediate_size"])),
              **{name: shape for expert in range(experts) for name, shape in
                 under(f"experts.{expert}", feed_forward(config["moe_intermediate_size"])).items()}},
    }
    found = {"backbone.embeddings.weight": (vocab, hidden), "backbone.norm_f.weight": (hidden,),
             "lm_head.weight": (vocab, hidden)}
    for prefix, kind in layers(config):
        found |= under(prefix, {"norm.weight": (hidden,)}) | under(f"{prefix}.mixer", kinds[kind])
    return found


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The parameter's fp32 values: seeded by its name, under the filled model's rule."""
    known = name
    for pattern, replacement in NAMES:
        known = re.sub(pattern, replacement, known)
    rule = next((rule for pattern, rule in RULES.RULES if re.search(pattern, known)), None)
    if rule is None:
        raise ValueError(f"no rule for {name}: add one to {RULES.__file__}")
    made = torch.empty(shape, dtype=torch.float32)
    rule(made, torch.Generator().manual_seed(RULES.SEED + zlib.crc32(name.encode())))
    return (-made).log() if name.endswith("A_log") else made


def unquantised(name: str, made: torch.Tensor) -> torch.Tensor:
    """The parameter in the dtype of a checkpoint that does not quantise it."""
    return made.float() if FP32.search(name) else made.bfloat16()


def save(config: dict, tensors: dict[str, torch.Tensor], folder: str) -> None:
    """The checkpoint in `folder`. The same bytes every time."""
    from safetensors.torch import save_file  # comes with vLLM; the values above need torch alone

    pathlib.Path(folder, "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, pathlib.Path(folder, "model.safetensors"), metadata={"format": "pt"})
