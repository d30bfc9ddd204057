"""Writes the tiny Nemotron-H as a quantised checkpoint in ModelOpt's MIXED_PRECISION layout, loaded like any other.

The BF16 values are those of ../tiny/weights.py, parameter by parameter. Projections of the Mamba layers, the MLP, the
shared experts and the first attention layer are FP8 E4M3 with one scale for the weight and a static one for its
input; routed experts are NVFP4 with BF16 activations (W4A16); the second attention layer, the router, the embedding and
the head stay BF16, so that both kinds of attention projection run. Keys and values of both layers get FP8 scales.
Names, shapes and dtypes are what vLLM 0.33.0's loader asks for (model_executor/layers/quantization/modelopt.py).
"""
import json
import pathlib
import re
import zlib

import torch

from prove.scripts import load

BF16 = load(pathlib.Path(__file__).parent.parent / "tiny" / "weights.py")
FP8, FP4 = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
FP8_MAX, FP4_MAX = 448.0, 6.0
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)  # E2M1 by code, no sign
UNQUANTISED_ATTENTION = 1   # which of the attention layers keeps BF16 projections
# The largest input each projection is calibrated for: relu(x)^2 reaches 20, attention averages, a norm gives about 1.
LARGEST_INPUT = {"down_proj": 22.0, "o_proj": 3.7}
LARGEST_OTHER = 5.3
LARGEST_KEY, LARGEST_VALUE = 4.7, 4.1
NAMES = ((r"backbone\.embeddings", "embed_tokens"), (r"[qkv]_proj", "qkv_proj"), (r"A_log", "A"))  # BF16.RULES' names


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


def quantised(config: dict) -> dict[str, dict]:
    """Module name -> its algorithm, as ModelOpt's `quantized_layers` lists them."""
    attention = [prefix for prefix, kind in layers(config) if kind == "*"]
    skipped = f"{attention[UNQUANTISED_ATTENTION]}."
    modules = [name.removesuffix(".weight") for name in shapes(config) if name.endswith("_proj.weight")]
    return {name: FP4 if ".experts." in name else FP8 for name in modules if not name.startswith(skipped)}


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The parameter's fp32 values: seeded by its name, under the rule of the BF16 model."""
    known = name
    for pattern, replacement in NAMES:
        known = re.sub(pattern, replacement, known)
    rule = next((rule for pattern, rule in BF16.RULES if re.search(pattern, known)), None)
    if rule is None:
        raise ValueError(f"no rule for {name}: add one to {BF16.__file__}")
    made = torch.empty(shape, dtype=torch.float32)
    rule(made, torch.Generator().manual_seed(BF16.SEED + zlib.crc32(name.encode())))
    return (-made).log() if name.endswith("A_log") else made


def to_fp8(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a tensor: (e4m3 values, fp32 scale)."""
    scale = (largest / FP8_MAX).float()
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def to_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4: (two codes a byte, the even column low; e4m3 scales of 16 columns; fp32 scale of the tensor)."""
    blocks = weight.unflatten(-1, (-1, FP4["group_size"]))
    overall = (weight.abs().amax() / (FP4_MAX * FP8_MAX)).float()
    scales = (blocks.abs().amax(-1) / FP4_MAX / overall).to(torch.float8_e4m3fn)
    codes = _codes(blocks / (scales.float() * overall).unsqueeze(-1)).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, overall


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    """E2M1 by rounding to the nearest value, ties to the even code."""
    middles = (FP4_VALUES[1:] + FP4_VALUES[:-1]) / 2
    size = scaled.abs().contiguous()
    below = torch.bucketize(size, middles)             # a tie stays below
    tied = torch.isin(size, middles) & (below % 2 == 1)
    return (below + tied).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3


def tensors(config: dict) -> dict[str, torch.Tensor]:
    """The whole checkpoint."""
    algorithms, found = quantised(config), {}
    values = {name: value(name, shape) for name, shape in shapes(config).items()}
    for name, made in values.items():
        module = name.removesuffix(".weight")
        if algorithms.get(module) is FP4:
            found[name], found[f"{module}.weight_scale"], found[f"{module}.weight_scale_2"] = to_fp4(made)
        elif module in algorithms:
            # q, k and v become one matrix, so ModelOpt gives them one scale.
            fused = [re.sub(r"[qkv]_proj", f"{part}_proj", name) for part in "qkv"]
            largest = max(values[other].abs().amax() for other in {*fused, name} & set(values))
            found[name], found[f"{module}.weight_scale"] = to_fp8(made, largest)
            most = LARGEST_INPUT.get(module.rpartition(".")[2], LARGEST_OTHER)
            found[f"{module}.input_scale"] = torch.tensor(most / FP8_MAX, dtype=torch.float32)
        else:
            found[name] = made.float() if re.search(r"(A_log|e_score_correction_bias)$", name) else made.bfloat16()
    for prefix, kind in layers(config):
        if kind == "*":
            found[f"{prefix}.mixer.k_proj.k_scale"] = torch.tensor(LARGEST_KEY / FP8_MAX, dtype=torch.float32)
            found[f"{prefix}.mixer.v_proj.v_scale"] = torch.tensor(LARGEST_VALUE / FP8_MAX, dtype=torch.float32)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write(source: str, folder: str) -> None:
    """A checkpoint in `folder`, of the sizes in `source`/config.json. The same bytes every time."""
    from safetensors.torch import save_file  # comes with vLLM; the values above need torch alone

    config = json.loads(pathlib.Path(source, "config.json").read_text())
    algorithms = quantised(config)
    modules = {name.removesuffix(".weight") for name in shapes(config) if name.endswith("_proj.weight")}
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms,
        "ignore": [*sorted(modules - set(algorithms)), "lm_head"],
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}
    pathlib.Path(folder, "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors(config), pathlib.Path(folder, "model.safetensors"), metadata={"format": "pt"})
