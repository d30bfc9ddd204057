"""Writes the tiny Nemotron-H as a quantised checkpoint in ModelOpt's MIXED_PRECISION layout, loaded like any other.

What is quantised are the values of ../tiny-checkpoint, parameter by parameter (../checkpoint.py). Projections of the
Mamba layers, the MLP, the shared experts and the first attention layer are FP8 E4M3 with one scale for the weight and a
static one for its input; routed experts are NVFP4 with BF16 activations (W4A16); the second attention layer, the
router, the embedding and the head stay BF16, so that both kinds of attention projection run. Keys and values of both
layers get FP8 scales. Names, shapes and dtypes are what vLLM 0.33.0's loader asks for
(model_executor/layers/quantization/modelopt.py).
"""
import pathlib
import re

import torch

from prove.scripts import load

CHECKPOINT = load(pathlib.Path(__file__).parent.parent / "checkpoint.py")
FP8, FP4 = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
FP8_MAX, FP4_MAX = 448.0, 6.0
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)  # E2M1 by code, no sign
UNQUANTISED_ATTENTION = 1   # which of the attention layers keeps BF16 projections
# The largest input each projection is calibrated for: relu(x)^2 reaches 20, attention averages, a norm gives about 1.
LARGEST_INPUT = {"down_proj": 22.0, "o_proj": 3.7}
LARGEST_OTHER = 5.3
LARGEST_KEY, LARGEST_VALUE = 4.7, 4.1


def quantised(config: dict) -> dict[str, dict]:
    """Module name -> its algorithm, as ModelOpt's `quantized_layers` lists them."""
    attention = [prefix for prefix, kind in CHECKPOINT.layers(config) if kind == "*"]
    skipped = f"{attention[UNQUANTISED_ATTENTION]}."
    modules = [name.removesuffix(".weight") for name in CHECKPOINT.shapes(config) if name.endswith("_proj.weight")]
    return {name: FP4 if ".experts." in name else FP8 for name in modules if not name.startswith(skipped)}


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
    values = {name: CHECKPOINT.value(name, shape) for name, shape in CHECKPOINT.shapes(config).items()}
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
            found[name] = CHECKPOINT.unquantised(name, made)
    for prefix, kind in CHECKPOINT.layers(config):
        if kind == "*":
            found[f"{prefix}.mixer.k_proj.k_scale"] = torch.tensor(LARGEST_KEY / FP8_MAX, dtype=torch.float32)
            found[f"{prefix}.mixer.v_proj.v_scale"] = torch.tensor(LARGEST_VALUE / FP8_MAX, dtype=torch.float32)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write(source: str, folder: str) -> None:
    """A checkpoint in `folder`, of the sizes in `source`/config.json. The same bytes every time."""
    config = CHECKPOINT.sizes(source)
    algorithms = quantised(config)
    modules = {name.removesuffix(".weight") for name in CHECKPOINT.shapes(config) if name.endswith("_proj.weight")}
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms,
        "ignore": [*sorted(modules - set(algorithms)), "lm_head"],
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}
    CHECKPOINT.save(config, tensors(config), folder)
