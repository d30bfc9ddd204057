"""Fills the tiny DeepSeek-V4 with values under which every operator has something to decide.

vLLM's dummy weights are uniform in +-1e-3: the logits come out flat, the router and the indexer see near-ties, and two
runs could agree for the wrong reason. Here each parameter has a rule, so that activations stay near unit variance, the
logits spread over several nats, the SwiGLU clamp is hit now and then, and the FP8 block scales are no powers of two
(loading re-quantises them to UE8M0, which is part of what is to be proven). The same seed gives the same bytes at
every engine start; a parameter without a rule is an error, never left as it is.
"""
import re
import zlib

import torch

SEED = 20261130
FP8_SPREAD = 64.0  # standard deviation of the raw e4m3 values: 448, the largest, is 7 of them away
BLOCK = 128


def _normal(shape, scale, generator, device):
    # The dtype is named everywhere: vLLM loads with bfloat16 as torch's default.
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * scale


def _uniform(shape, generator, device):
    return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)


def _normal_by_row(gain):
    """A projection: rows of variance gain^2 / fan-in, so that unit inputs give outputs of deviation `gain`."""
    def fill(param, generator):
        param.copy_(_normal(param.shape, gain * param.shape[-1] ** -0.5, generator, param.device))
    return fill


def _around(mean, deviation):
    def fill(param, generator):
        param.copy_(mean + _normal(param.shape, deviation, generator, param.device))
    return fill


def _fp8(param, generator):
    """Raw e4m3 values, one expert (or the whole matrix) at a time: fp32 copies of all experts would not fit."""
    for part in param if param.dim() == 3 else [param]:
        part.copy_(_normal(part.shape, FP8_SPREAD, generator, part.device).clamp_(-448, 448).to(torch.float8_e4m3fn))


def _block_scale(gain):
    """Scales that turn `_fp8` rows into `_normal_by_row(gain)`, each block off by up to a quarter."""
    def fill(param, generator):
        jitter = 0.75 + 0.5 * _uniform(param.shape, generator, param.device)
        param.copy_(jitter * gain * (param.shape[-1] * BLOCK) ** -0.5 / FP8_SPREAD)
    return fill


def _expert_table(param, generator):
    """tid2eid: [vocab, top_k] int32, distinct experts for each token id."""
    scores = _uniform((param.shape[0], 256), generator, param.device)
    param.copy_(scores.topk(param.shape[1], dim=-1).indices.to(param.dtype))


RULES = [  # the first match decides
    (r"embed_tokens\.weight$", _around(0.0, 1.0)),
    (r"lm_head\.weight$", _normal_by_row(2.5)),                    # logits of deviation 2.5: logprobs near -6
    (r"norm\.weight$", _around(1.0, 0.1)),
    (r"hc_\w+_fn$", _normal_by_row(1.0)),
    (r"hc_\w+_scale$", _around(0.75, 0.1)),
    (r"hc_\w+_base$", _around(0.0, 0.5)),
    (r"attn_sink$", _around(0.0, 1.0)),
    (r"compressor\.ape$", _around(0.0, 0.5)),
    (r"\.gate\.tid2eid$", _expert_table),
    (r"\.gate\.e_score_correction_bias$", _around(0.0, 0.1)),
    (r"\.gate\.weight$", _normal_by_row(2.0)),
    (r"(fused_wkv_wgate|weights_proj)\.weight$", _normal_by_row(1.0)),
    (r"(w13_weight|gate_up_proj\.weight)_scale_inv$", _block_scale(4.0)),  # the clamp at 10 is 2.5 deviations away
    (r"(w2_weight|down_proj\.weight)_scale_inv$", _block_scale(0.25)),
    (r"\.weight_scale_inv$", _block_scale(1.0)),
    (r"(\.weight|w13_weight|w2_weight)$", _fp8),
]


def fill_masters(model) -> None:
    """A trainer's model: BF16 masters, rows of variance 1 / fan-in, where the engine's has e4m3 values and scales."""
    fill(model, [(pattern, _normal_by_row(1.0) if rule is _fp8 else rule) for pattern, rule in RULES])


@torch.no_grad()
def fill(model, rules=None) -> None:
    """Writes every parameter of a freshly built model, before vLLM processes the weights for its kernels."""
    for name, param in model.named_parameters():
        rule = next((r for pattern, r in rules or RULES if re.search(pattern, name)), None)
        if rule is None or (rule is _fp8) != (param.dtype == torch.float8_e4m3fn):
            raise ValueError(f"no rule for {name} {tuple(param.shape)} {param.dtype}: add one to {__file__}")
        generator = torch.Generator(device=param.device).manual_seed(SEED + zlib.crc32(name.encode()))
        rule(param.data, generator)
