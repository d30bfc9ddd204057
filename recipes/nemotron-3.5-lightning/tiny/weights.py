"""Fills the tiny Nemotron-H with values under which every operator has something to decide.

vLLM's dummy weights are uniform in +-1e-3: time steps all alike, decays that never forget, a flat router. Here each
parameter has a rule, so that activations stay near unit variance, heads forget at rates from a few tokens to a whole
chunk and beyond, experts are chosen with near-ties now and then and the logits spread over several nats. The same seed
gives the same bytes at every engine start; a parameter without a rule is an error, never left as it is.
"""
import math
import re
import zlib

import torch

SEED = 20261130
SLOWEST, FASTEST = 1e-3, 1e-1  # time steps at a zero input, as the model family initialises them


def _normal(param, generator):
    return torch.randn(param.shape, generator=generator, device=param.device, dtype=torch.float32)


def _uniform(param, generator):
    return torch.rand(param.shape, generator=generator, device=param.device, dtype=torch.float32)


def _normal_by_row(gain):
    """A projection: rows of variance gain^2 / fan-in, so that unit inputs give outputs of deviation `gain`."""
    def fill(param, generator):
        param.copy_(_normal(param, generator) * gain * param.shape[-1] ** -0.5)
    return fill


def _around(mean, deviation):
    def fill(param, generator):
        param.copy_(mean + deviation * _normal(param, generator))
    return fill


def _rates(param, generator):
    """A: decay rates from -1 to -16."""
    param.copy_(-(1 + 15 * _uniform(param, generator)))


def _step_bias(param, generator):
    """dt_bias: the inverse of softplus at steps spread evenly in the logarithm."""
    step = torch.exp(_uniform(param, generator) * math.log(FASTEST / SLOWEST) + math.log(SLOWEST))
    param.copy_(step + torch.log(-torch.expm1(-step)))


RULES = [  # the first match decides
    (r"embed_tokens\.weight$", _around(0.0, 1.0)),
    (r"lm_head\.weight$", _normal_by_row(2.5)),                   # logits of deviation 2.5
    (r"(norm|norm_f)\.weight$", _around(1.0, 0.1)),
    (r"\.A$", _rates),
    (r"\.D$", _around(1.0, 0.2)),
    (r"\.dt_bias$", _step_bias),
    (r"conv1d\.weight$", _around(0.0, 0.6)),
    (r"conv1d\.bias$", _around(0.0, 0.2)),
    (r"(in_proj|qkv_proj)\.weight$", _normal_by_row(1.0)),
    (r"(out_proj|o_proj)\.weight$", _normal_by_row(0.7)),
    (r"\.gate\.weight$", _normal_by_row(2.0)),
    (r"\.e_score_correction_bias$", _around(0.0, 0.1)),
    (r"(w13_weight|up_proj\.weight)$", _normal_by_row(1.0)),      # relu(x)^2 has mean 1/2
    (r"(w2_weight|down_proj\.weight)$", _normal_by_row(0.5)),
]


@torch.no_grad()
def fill(model) -> None:
    """Writes every parameter of a freshly built model, before vLLM processes the weights for its kernels."""
    for name, param in model.named_parameters():
        rule = next((r for pattern, r in RULES if re.search(pattern, name)), None)
        if rule is None or not param.is_floating_point():
            raise ValueError(f"no rule for {name} {tuple(param.shape)} {param.dtype}: add one to {__file__}")
        generator = torch.Generator(device=param.device).manual_seed(SEED + zlib.crc32(name.encode()))
        rule(param.data, generator)
