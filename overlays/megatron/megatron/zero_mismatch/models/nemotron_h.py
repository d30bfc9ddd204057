"""Nemotron-H in BF16: the order of operators, and of roundings, of vLLM 0.33.0's models/nemotron_h.py.

The residual stream is BF16. A layer is norm(residual + last output), then its mixer; the sum is rounded to BF16 and is
what the next layer adds to. Mixers, by letter of the pattern:
  M  in_proj -> [gate | x B C | dt]; convolution and SiLU over x B C; scan; gated norm by groups; out_proj
  *  qkv_proj -> q, k, v without positional encoding; attention; o_proj
  -  up_proj, ReLU^2, down_proj
  E  shared expert (an MLP) + experts * routed_scaling_factor, each rounded to BF16 before and after

Parameters have vLLM's names and shapes, with two exceptions, which `exported` undoes: A is trained as A_log, that of
the checkpoints (A = -exp(A_log)), and the experts' weights lie one module up. Dtypes are the engine's under
VLLM_BATCH_INVARIANT: BF16; A_log, the gate and its correction bias fp32 (fused_moe/router/gate_linear.py:93). The
correction bias takes no gradient: it only takes part in a discrete choice.
"""
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import attention, conv1d, experts, linear, logprob, mamba2, norm, relu2, router
from ..kernels import Kernels
from ..packing import Packed

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

    @classmethod
    def from_hf(cls, config: dict) -> "Shape":
        """Of a checkpoint's config.json."""
        for name, wanted in _WANTED.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"Nemotron-H trainer: found {name} = {config[name]!r}, expected {wanted!r}; this "
                                 "model needs an operator that is not written: train it elsewhere")
        pattern = config["hybrid_override_pattern"]
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
        )  # fmt: skip


class Weight(nn.Module):
    """A module that holds `weight`, and more by name: keeps vLLM's names without its layers."""

    def __init__(self, *shape: int, dtype: torch.dtype, **more: nn.Parameter):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype))
        for name, parameter in more.items():
            self.register_parameter(name, parameter)


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

    def forward(self, x, packed: Packed, k: Kernels):
        m = self.s.mamba
        projected = linear.linear(k.linear, x, self.in_proj.weight)
        gate, xbc, dt = projected.split([m.x_width, self.conv_width, m.heads], dim=-1)
        xbc = conv1d.conv1d(k.conv1d, xbc, self.conv1d.weight[:, 0], self.conv1d.bias, packed)
        y = mamba2.mamba2(k.mamba2, xbc, dt, -self.A_log.exp(), self.D, self.dt_bias, packed, m)
        y = norm.gated_rms_norm(k.gated_rms_norm, y, gate, self.norm.weight, self.s.eps, m.x_width // m.groups)
        return linear.linear(k.linear, y, self.out_proj.weight)


class Attention(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.s = s
        self.widths = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
        self.qkv_proj = Weight(sum(self.widths), s.hidden, dtype=dtype)
        self.o_proj = Weight(s.hidden, self.widths[0], dtype=dtype)

    def forward(self, x, packed: Packed, k: Kernels):
        qkv = linear.linear(k.linear, x, self.qkv_proj.weight).split(self.widths, dim=-1)
        q, key, value = (t.unflatten(-1, (-1, self.s.head_dim)) for t in qkv)
        out = attention.attention(k.attention, q, key, value, packed, self.s.head_dim**-0.5)
        return linear.linear(k.linear, out.flatten(1), self.o_proj.weight)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int, dtype):
        super().__init__()
        self.up_proj = Weight(width, hidden, dtype=dtype)
        self.down_proj = Weight(hidden, width, dtype=dtype)

    def forward(self, x, packed: Packed, k: Kernels):
        return linear.linear(k.linear, relu2.relu2(k.relu2, linear.linear(k.linear, x, self.up_proj.weight)),
                             self.down_proj.weight)


class MoE(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.s = s
        wide = torch.promote_types(dtype, torch.float32)
        bias = nn.Parameter(torch.empty(s.experts, dtype=wide), requires_grad=False)
        self.gate = Weight(s.experts, s.hidden, dtype=wide, e_score_correction_bias=bias)
        self.experts = nn.ParameterDict({
            "w13_weight": nn.Parameter(torch.empty(s.experts, s.expert_width, s.hidden, dtype=dtype)),
            "w2_weight": nn.Parameter(torch.empty(s.experts, s.hidden, s.expert_width, dtype=dtype)),
        })  # fmt: skip
        self.shared_experts = MLP(s.hidden, s.shared_width, dtype) if s.shared_width else None

    def forward(self, x, packed: Packed, k: Kernels):
        logits = router.logits(k.router_logits, x, self.gate.weight)
        bias = self.gate.e_score_correction_bias
        weights, ids = router.top_k(k.router_top_k, logits, bias, self.s.top_k, self.s.renormalise)
        routed = experts.experts(k.experts, x, self.experts["w13_weight"], self.experts["w2_weight"], weights, ids)
        if self.s.scaling != 1.0:
            routed = routed * self.s.scaling
        return routed if self.shared_experts is None else self.shared_experts(x, packed, k) + routed


class Layer(nn.Module):
    def __init__(self, kind: str, s: Shape, dtype):
        super().__init__()
        self.eps = s.eps
        self.norm = Weight(s.hidden, dtype=dtype)
        self.mixer = {"M": lambda: Mamba(s, dtype), "*": lambda: Attention(s, dtype), "E": lambda: MoE(s, dtype),
                      "-": lambda: MLP(s.hidden, s.mlp, dtype)}[kind]()

    def forward(self, x, residual, packed: Packed, k: Kernels):
        if residual is None:
            x, residual = norm.rms_norm(k.rms_norm, x, self.norm.weight, self.eps), x
        else:
            x, residual = norm.add_rms_norm(k.add_rms_norm, x, residual, self.norm.weight, self.eps)
        return self.mixer(x, packed, k), residual


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
        self.model = Backbone(shape, dtype)
        self.lm_head = Weight(shape.vocab, shape.hidden, dtype=dtype)

    def forward(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The logprob of each token, fp32 [tokens]: logprob.of_packed."""
        k = self.kernels
        return logprob.of_packed(k.linear, k.logprob, self.hidden, self.lm_head.weight, tokens, packed)

    def hidden(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The states that lm_head sees: [tokens, hidden]."""
        x, residual = torch.nn.functional.embedding(tokens, self.model.embed_tokens.weight), None
        for layer in self.model.layers:
            if self.recompute and torch.is_grad_enabled():
                x, residual = checkpoint(layer, x, residual, packed, self.kernels, use_reentrant=False)
            else:
                x, residual = layer(x, residual, packed, self.kernels)
        k = self.kernels.add_rms_norm
        return norm.add_rms_norm(k, x, residual, self.model.norm_f.weight, self.shape.eps)[0]

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine holds, under its own names."""
        for name, parameter in self.named_parameters():
            value = parameter.detach()
            if name.endswith(".A_log"):
                name, value = name.removesuffix("_log"), -value.exp()
            yield name.replace(".experts.w", ".experts.routed_experts.w"), value

    @torch.no_grad()
    def take(self, engine: dict[str, torch.Tensor]) -> None:
        """Start from an engine's weights. A_log is the logarithm of its A, so A changes in its last bits: export
        before the first rollout."""
        wanted = dict(self.exported())
        if wanted.keys() != engine.keys():
            odd = sorted(wanted.keys() ^ engine.keys())
            raise ValueError(f"{len(odd)} names are on one side only, first {odd[0]!r}; is this the same model?")
        for name, parameter in self.named_parameters():
            theirs = name.replace(".experts.w", ".experts.routed_experts.w")
            if name.endswith(".A_log"):
                parameter.copy_((-engine[theirs.removesuffix("_log")]).log())
            else:
                parameter.copy_(engine[theirs])
