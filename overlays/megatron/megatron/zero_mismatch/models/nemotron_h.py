"""Nemotron-H, BF16 or quantised by ModelOpt: the order of operators and of roundings of vLLM 0.33.0's nemotron_h.py.

The residual stream is BF16. A layer is norm(residual + last output), then its mixer; the sum is rounded to BF16 and is
what the next layer adds to. Mixers, by letter of the pattern:
  M  in_proj -> [gate | x B C | dt]; convolution and SiLU over x B C; scan; gated norm by groups; out_proj
  *  qkv_proj -> q, k, v without positional encoding; attention; o_proj
  -  up_proj, ReLU^2, down_proj
  E  shared expert (an MLP) + experts * routed_scaling_factor, each rounded to BF16 before and after

Quantised (a config.json with quantization_config), the projections it lists as FP8 run as linear_fp8_static, its NVFP4
experts as experts_nvfp4, and attention over the FP8 cache as attention_fp8. Their masters are BF16 all the same.

Parameters have vLLM's names and shapes but for what nemotron_h_weights says: A is trained as A_log, that of the
checkpoints (A = -exp(A_log)), the experts' weights lie one module up, and where the engine holds codes and scales a
master is BF16. Dtypes are the engine's under VLLM_BATCH_INVARIANT: BF16; A_log, the gate and its correction bias fp32
(fused_moe/router/gate_linear.py:93). The correction bias takes no gradient: it only takes part in a discrete choice;
nor do the scales of inputs and of the cache, which stay as they were calibrated.
"""
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import attention, attention_fp8, conv1d, experts, experts_nvfp4, linear, linear_fp8_static, logprob, mamba2
from .. import norm, relu2, router
from ..context_parallel import to_heads, to_tokens
from ..kernels import Kernels
from ..linear_fp8 import OperandCache
from ..packing import Packed
from . import nemotron_h_weights

_WANTED = {  # what the forward below assumes of a configuration
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu", "n_group": 1, "topk_group": 1, "tie_word_embeddings": False, "moe_latent_size": None,
    "sliding_window": None,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int
    pattern: str
    eps: float
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    conv: int
    mamba: mamba2.Sizes
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    renormalise: bool
    scaling: float
    formats: dict[str, str]  # quantised modules by their names here: "FP8" or "NVFP4"
    fp8_cache: bool

    @classmethod
    def from_hf(cls, config: dict) -> "Shape":
        """Of a checkpoint's config.json."""
        for name, wanted in _WANTED.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"Nemotron-H trainer: found {name} = {config[name]!r}, expected {wanted!r}; this "
                                 "model needs an operator that is not written: train it elsewhere")
        pattern, quantisation = config["hybrid_override_pattern"], config.get("quantization_config") or {}
        if unknown := set(pattern) - set("M*-E"):
            raise ValueError(f"Nemotron-H trainer: found layers {sorted(unknown)}, expected M, *, - and E")
        return cls(
            vocab=config["vocab_size"], hidden=config["hidden_size"], pattern=pattern,
            eps=config["layer_norm_epsilon"], mlp=config["intermediate_size"], heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"], conv=config["conv_kernel"],
            mamba=mamba2.Sizes(config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"],
                               config["ssm_state_size"], config["chunk_size"]),
            experts=config.get("n_routed_experts", 0), top_k=config.get("num_experts_per_tok", 0),
            expert_width=config.get("moe_intermediate_size", 0),
            shared_width=config.get("moe_shared_expert_intermediate_size", 0) * config.get("n_shared_experts", 0),
            renormalise=config.get("norm_topk_prob", True), scaling=config.get("routed_scaling_factor", 1.0),
            formats=_formats(quantisation), fp8_cache=_fp8_cache(quantisation),
        )  # fmt: skip


_ALGORITHMS = {"FP8": "FP8", "W4A16_NVFP4": "NVFP4"}
_FP8 = ("in_proj", "out_proj", "qkv_proj", "o_proj", "up_proj", "down_proj")  # what Run.linear multiplies
_MODULES = ((r"^backbone\.", "model."), (r"\.[qkv]_proj$", ".qkv_proj"), (r"\.experts\.\d+\..*$", ".experts"))


def _formats(quantisation: dict) -> dict[str, str]:
    """ModelOpt's quantized_layers by module here; several of its modules may make one, in one format."""
    if quantisation and (quantisation.get("quant_method"), quantisation.get("quant_algo")) != (
            "modelopt", "MIXED_PRECISION"):
        raise ValueError(f"Nemotron-H trainer: found a checkpoint of {quantisation.get('quant_method')} "
                         f"{quantisation.get('quant_algo')}, expected modelopt MIXED_PRECISION or none")
    found: dict[str, str] = {}
    for name, layer in quantisation.get("quantized_layers", {}).items():
        algorithm = _ALGORITHMS.get(layer["quant_algo"])
        for pattern, ours in _MODULES:
            name = re.sub(pattern, ours, name)
        leaf = name.rpartition(".")[2]
        wanted = "NVFP4" if leaf == "experts" else "FP8" if leaf in _FP8 else "BF16"
        if algorithm != wanted:
            raise ValueError(f"Nemotron-H trainer: found {name} in {layer['quant_algo']}, expected W4A16_NVFP4 for "
                             f"experts, FP8 for {', '.join(_FP8)} and BF16 for the rest; other formats are not written")
        found[name] = wanted
    return found


def _fp8_cache(quantisation: dict) -> bool:
    scheme = quantisation.get("kv_cache_scheme")
    if scheme not in (None, {"type": "float", "num_bits": 8, "dynamic": False}):
        raise ValueError(f"Nemotron-H trainer: found kv_cache_scheme {scheme}, expected static FP8 or none")
    return scheme is not None


class Weight(nn.Module):
    """A module that holds `weight`, and more by name: keeps vLLM's names without its layers."""

    fp8 = False  # whether the engine holds codes and scales instead; then `input_scale` is there too

    def __init__(self, *shape: int, dtype: torch.dtype, **more: nn.Parameter):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype))
        for name, parameter in more.items():
            self.register_parameter(name, parameter)


def _scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(1), requires_grad=False)  # one dimension: a checkpoint's shards need one


@dataclass
class Run:
    """What every operator of a forward is given besides its tensors. `guard` and `cache` are optional, and only
    quantised masters are kept by them."""

    kernels: Kernels
    guard: object = None
    cache: OperandCache | None = None

    def linear(self, x, module: Weight):
        if module.fp8:
            return self._static(x, module, squared=False)
        return linear.linear(self.kernels.linear, x, module.weight)

    def linear_of_square(self, x, module: Weight):
        """module(relu(x)^2)"""
        if module.fp8:
            return self._static(x, module, squared=True)
        return linear.linear(self.kernels.linear, relu2.relu2(self.kernels.relu2, x), module.weight)

    def _static(self, x, module: Weight, squared: bool):
        return linear_fp8_static.linear_fp8_static(
            self.kernels.quantised.linear, x, module.weight, module.input_scale, squared=squared, cache=self.cache,
            guard=self.guard)

    def attention(self, q, key, value, packed: Packed, scales: attention_fp8.Scales | None):
        scale, k = q.shape[-1]**-0.5, self.kernels
        if scales is not None:
            return attention_fp8.attention_fp8(k.quantised.attention, q, key, value, packed, scale, scales)
        return attention.attention(k.attention, q, key, value, packed, scale)

    def experts(self, x, module: "Experts", weights, ids):
        k, w13, w2 = self.kernels, module.w13_weight, module.w2_weight
        if module.nvfp4:
            return experts_nvfp4.experts_nvfp4(k.quantised.experts, x, w13, w2, weights, ids, cache=self.cache,
                                               guard=self.guard)
        return experts.experts(k.experts, x, w13, w2, weights, ids)


class Mamba(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.s, m = s, s.mamba
        self.conv_width = m.x_width + 2 * m.bc_width
        self.in_proj = Weight(m.x_width + self.conv_width + m.heads, s.hidden, dtype=dtype)
        self.conv1d = Weight(self.conv_width, 1, s.conv, dtype=dtype,
                             bias=nn.Parameter(torch.empty(self.conv_width, dtype=dtype)))
        self.A_log = nn.Parameter(torch.empty(m.heads, dtype=torch.promote_types(dtype, torch.float32)))
        self.D = nn.Parameter(torch.empty(m.heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(m.heads, dtype=dtype))
        self.norm = Weight(m.x_width, dtype=dtype)
        self.out_proj = Weight(s.hidden, m.x_width, dtype=dtype)

    def forward(self, x, packed: Packed, run: Run):
        m, k, ranks = self.s.mamba, run.kernels, packed.ranks
        sections = [m.x_width, m.bc_width, m.bc_width]
        projected = run.linear(x, self.in_proj)
        gate, inner = projected.split([m.x_width, self.conv_width + m.heads], dim=-1)
        groups = ranks.share(m.groups, "Mamba groups")
        own = replace(m, heads=ranks.share(m.heads, "Mamba heads"), groups=groups, first_group=ranks.rank * groups)
        inner = to_heads(inner, [*sections, m.heads], packed)
        xbc, dt = inner.split([inner.shape[1] - own.heads, own.heads], dim=-1)
        weight, bias = (ranks.of_heads(t, sections) for t in (self.conv1d.weight[:, 0], self.conv1d.bias))
        xbc = conv1d.conv1d(k.conv1d, xbc, weight, bias, packed)
        a, d, dt_bias = (ranks.of_heads(t, [m.heads]) for t in (-self.A_log.exp(), self.D, self.dt_bias))
        y = to_tokens(mamba2.mamba2(k.mamba2, xbc, dt, a, d, dt_bias, packed, own), packed)
        y = norm.gated_rms_norm(k.gated_rms_norm, y, gate, self.norm.weight, self.s.eps, m.x_width // m.groups)
        return run.linear(y, self.out_proj)


class Attention(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.s = s
        self.widths = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
        self.qkv_proj = Weight(sum(self.widths), s.hidden, dtype=dtype)
        self.o_proj = Weight(s.hidden, self.widths[0], dtype=dtype)
        self.attn = nn.ParameterDict({f"_{of}_scale": _scale() for of in "qkv"}) if s.fp8_cache else None

    def forward(self, x, packed: Packed, run: Run):
        packed.ranks.share(self.s.kv_heads, "KV heads")
        qkv = to_heads(run.linear(x, self.qkv_proj), self.widths, packed)
        qkv = qkv.split([width // packed.ranks.size for width in self.widths], dim=-1)
        q, key, value = (t.unflatten(-1, (-1, self.s.head_dim)) for t in qkv)
        scales = self.attn and attention_fp8.Scales(*(self.attn[f"_{of}_scale"] for of in "qkv"))
        out = run.attention(q, key, value, packed, scales)
        return run.linear(to_tokens(out.flatten(1), packed), self.o_proj)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int, dtype):
        super().__init__()
        self.up_proj = Weight(width, hidden, dtype=dtype)
        self.down_proj = Weight(hidden, width, dtype=dtype)

    def forward(self, x, packed: Packed, run: Run):
        return run.linear_of_square(run.linear(x, self.up_proj), self.down_proj)


class Experts(nn.Module):
    nvfp4 = False  # whether the engine holds them in Humming's layout

    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(s.experts, s.expert_width, s.hidden, dtype=dtype))
        self.w2_weight = nn.Parameter(torch.empty(s.experts, s.hidden, s.expert_width, dtype=dtype))


class MoE(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.s = s
        wide = torch.promote_types(dtype, torch.float32)
        bias = nn.Parameter(torch.empty(s.experts, dtype=wide), requires_grad=False)
        self.gate = Weight(s.experts, s.hidden, dtype=wide, e_score_correction_bias=bias)
        self.experts = Experts(s, dtype)
        self.shared_experts = MLP(s.hidden, s.shared_width, dtype) if s.shared_width else None

    def forward(self, x, packed: Packed, run: Run):
        k = run.kernels
        logits = router.logits(k.router_logits, x, self.gate.weight)
        bias = self.gate.e_score_correction_bias
        weights, ids = router.top_k(k.router_top_k, logits, bias, self.s.top_k, self.s.renormalise)
        routed = run.experts(x, self.experts, weights, ids)
        if self.s.scaling != 1.0:
            routed = routed * self.s.scaling
        return routed if self.shared_experts is None else self.shared_experts(x, packed, run) + routed


class Layer(nn.Module):
    def __init__(self, kind: str, s: Shape, dtype):
        super().__init__()
        self.eps = s.eps
        self.norm = Weight(s.hidden, dtype=dtype)
        self.mixer = {"M": lambda: Mamba(s, dtype), "*": lambda: Attention(s, dtype), "E": lambda: MoE(s, dtype),
                      "-": lambda: MLP(s.hidden, s.mlp, dtype)}[kind]()

    def forward(self, x, residual, packed: Packed, run: Run):
        k = run.kernels
        if residual is None:
            x, residual = norm.rms_norm(k.rms_norm, x, self.norm.weight, self.eps), x
        else:
            x, residual = norm.add_rms_norm(k.add_rms_norm, x, residual, self.norm.weight, self.eps)
        return self.mixer(x, packed, run), residual


class Backbone(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.embed_tokens = Weight(s.vocab, s.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Layer(kind, s, dtype) for kind in s.pattern)
        self.norm_f = Weight(s.hidden, dtype=dtype)


class NemotronH(nn.Module):
    """`recompute`: keep a layer's inputs only and run it again for its backward. Changes no bit: every operator is a
    function of its arguments, and its kernel runs the same way each time."""

    def __init__(self, shape: Shape, kernels: Kernels, dtype: torch.dtype = torch.bfloat16, recompute: bool = False):
        super().__init__()
        self.shape, self.kernels, self.recompute = shape, kernels, recompute
        self.guard, self.cache = None, None  # see Run
        self.model = Backbone(shape, dtype)
        self.lm_head = Weight(shape.vocab, shape.hidden, dtype=dtype)
        modules = dict(self.named_modules())
        for name, kind in shape.formats.items():
            if (module := modules.get(name)) is None:
                raise ValueError(f"Nemotron-H trainer: found quantised weights of {name}, expected a module of these "
                                 f"{len(shape.pattern)} layers: is quantization_config another model's?")
            if kind == "NVFP4":
                module.nvfp4 = True
            else:
                module.fp8, module.input_scale = True, _scale()

    def forward(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The logprob of each token, fp32 [tokens]: logprob.of_packed."""
        k = self.kernels
        return logprob.of_packed(k.linear, k.logprob, self.hidden, self.lm_head.weight, tokens, packed)

    def vocabulary(self, tokens: torch.Tensor, packed: Packed, places: torch.Tensor) -> torch.Tensor:
        """The logprob of every token of the vocabulary at `places`: logprob.of_vocabulary."""
        k = self.kernels
        return logprob.of_vocabulary(k.linear, k.logprob, self.hidden, self.lm_head.weight, tokens, packed, places)

    def hidden(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The states that lm_head sees: [own rows, hidden]."""
        x, residual = torch.nn.functional.embedding(packed.own(tokens), self.model.embed_tokens.weight), None
        run = Run(self.kernels, self.guard, self.cache)
        for layer in self.model.layers:
            if self.recompute and torch.is_grad_enabled():
                x, residual = checkpoint(layer, x, residual, packed, run, use_reentrant=False)
            else:
                x, residual = layer(x, residual, packed, run)
        k = self.kernels.add_rms_norm
        return norm.add_rms_norm(k, x, residual, self.model.norm_f.weight, self.shape.eps)[0]

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine holds, under its own names."""
        return nemotron_h_weights.exported(self)

    def take(self, engine: dict[str, torch.Tensor]) -> None:
        """Start from an engine's weights; see nemotron_h_weights."""
        nemotron_h_weights.take(self, engine)
