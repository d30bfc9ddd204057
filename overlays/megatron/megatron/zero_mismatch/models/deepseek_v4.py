"""DeepSeek-V4 with block-FP8 experts: the order of operators, and of roundings, of vLLM 0.33.0's models/deepseek_v4.

S residual streams in BF16. A layer is mHC pre -> attention -> mHC post, mHC pre -> experts -> mHC post; the post of one
sublayer runs with the pre of the next, as in the engine (nvidia/model.py:614). The first pre broadcasts the embedding.

Attention by layer: sliding window (ratio 0), window + the indexer's choice of rows that pool 4 tokens (ratio 4), or
window + every row that pools 128 (ratio 128). Experts: the first layers route by token id, the others by score; a
shared expert is added to the routed ones in BF16.

Parameters have vLLM's names and shapes without its `_scale_inv` tensors: a master is BF16 where the engine holds FP8
codes and scales (deepseek_v4_weights makes and reads those). The indexer is frozen; hash tables and correction biases
take no gradient.
"""
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import attention_inputs, attention_sparse, compressor, grouped_fp8, indexer, logprob, mhc, norm, o_proj_fp8
from .. import router, router_dsv4, swiglu
from ..context_parallel import collect
from ..kernels_dsv4 import Kernels
from ..linear_fp8 import OperandCache, linear_fp8
from ..packing import Packed
from . import deepseek_v4_weights

_WANTED = {  # what the forward below assumes of a configuration
    "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "expert_dtype": "fp8",
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "vision_n_layers": 0,
    "n_shared_experts": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    vocab: int
    hidden: int
    ratios: tuple[int, ...]  # by layer: 0, 4 or 128
    hashed: int  # layers, from the first, that route by token id
    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    groups: int
    window: int
    index_heads: int
    index_dim: int
    index_top_k: int
    streams: int
    mhc: mhc.Settings
    experts: int
    top_k: int
    width: int
    factor: float
    limit: float
    eps: float

    @property
    def pattern(self) -> str:
        """One letter a layer: sliding, compressed, heavily compressed."""
        return "".join({0: "S", 4: "C", 128: "H"}[ratio] for ratio in self.ratios)

    @classmethod
    def from_hf(cls, config: dict) -> "Shape":
        """Of a checkpoint's config.json."""
        for name, wanted in _WANTED.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"DeepSeek-V4 trainer: found {name} = {config[name]!r}, expected {wanted!r}; this "
                                 "model needs an operator that is not written: train it elsewhere")
        rates, eps, hc_eps = config["compress_rates"], config["rms_norm_eps"], config["hc_eps"]
        ratios = tuple(rates.get(kind, 0) for kind in config["layer_types"])
        if not set(ratios) <= {0, 4, 128}:
            raise ValueError(f"DeepSeek-V4 trainer: found compression ratios {sorted(set(ratios))}, expected 0, 4, 128")
        kinds = config["mlp_layer_types"]
        hashed = kinds.count("hash_moe")
        if any(kind != "hash_moe" for kind in kinds[:hashed]):
            raise ValueError("DeepSeek-V4 trainer: found hash_moe behind moe, expected all hash_moe layers first")
        return cls(
            vocab=config["vocab_size"], hidden=config["hidden_size"], ratios=ratios, hashed=hashed,
            heads=config["num_attention_heads"], head_dim=config["head_dim"], q_rank=config["q_lora_rank"],
            o_rank=config["o_lora_rank"], groups=config["o_groups"], window=config["sliding_window"],
            index_heads=config["index_n_heads"], index_dim=config["index_head_dim"],
            index_top_k=config["index_topk"], streams=config["hc_mult"],
            mhc=mhc.Settings(eps, hc_eps, eps, config["hc_sinkhorn_iters"]), experts=config["n_routed_experts"],
            top_k=config["num_experts_per_tok"], width=config["moe_intermediate_size"],
            factor=config["routed_scaling_factor"], limit=config["swiglu_limit"], eps=eps,
        )  # fmt: skip


class Weight(nn.Module):
    """A module that holds `weight` and keeps vLLM's name for it. `fp8`: the engine holds codes and scales instead."""

    def __init__(self, *shape: int, dtype: torch.dtype, fp8: bool = False, trained: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=trained)
        self.fp8 = fp8


class Compressor(nn.Module):
    def __init__(self, s: Shape, ratio: int, dim: int, dtype, trained: bool = True):
        super().__init__()
        columns = (2 if ratio == 4 else 1) * dim
        self.ape = nn.Parameter(torch.empty(ratio, columns, dtype=_wide(dtype)), requires_grad=trained)
        self.fused_wkv_wgate = Weight(2 * columns, s.hidden, dtype=dtype, trained=trained)
        self.norm = Weight(dim, dtype=dtype, trained=trained)


class Indexer(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.wq_b = Weight(s.index_heads * s.index_dim, s.q_rank, dtype=dtype, fp8=True, trained=False)
        self.weights_proj = Weight(s.index_heads, s.hidden, dtype=dtype, trained=False)
        self.compressor = Compressor(s, indexer.RATIO, s.index_dim, dtype, trained=False)

    def weights(self) -> indexer.IndexerWeights:
        pool = self.compressor
        return indexer.IndexerWeights(self.wq_b.weight, self.weights_proj.weight, pool.fused_wkv_wgate.weight, pool.ape,
                                      pool.norm.weight)


class Attention(nn.Module):
    def __init__(self, s: Shape, ratio: int, dtype):
        super().__init__()
        self.s, self.ratio = s, ratio
        self.attn_sink = nn.Parameter(torch.empty(s.heads, dtype=_wide(dtype)))
        self.fused_wqa_wkv = Weight(s.q_rank + s.head_dim, s.hidden, dtype=dtype, fp8=True)
        self.q_norm, self.kv_norm = Weight(s.q_rank, dtype=dtype), Weight(s.head_dim, dtype=dtype)
        self.wq_b = Weight(s.heads * s.head_dim, s.q_rank, dtype=dtype, fp8=True)
        self.wo_a = Weight(s.groups * s.o_rank, s.heads // s.groups * s.head_dim, dtype=dtype, fp8=True)
        self.wo_b = Weight(s.hidden, s.groups * s.o_rank, dtype=dtype, fp8=True)
        self.indexer = Indexer(s, dtype) if ratio == indexer.RATIO else None
        self.compressor = Compressor(s, ratio, s.head_dim, dtype) if ratio else None

    def forward(self, x, packed: Packed, table, run: "Run"):
        """x: [own rows, hidden]. Under context parallelism every rank has all K rows, and looks for its own queries."""
        s, k, positions = self.s, run.kernels, packed.own(packed.positions)
        qr, kv = run.linear(x, self.fused_wqa_wkv).split([s.q_rank, s.head_dim], -1)
        qr, kv = attention_inputs.norms(k.inputs, qr, kv, self.q_norm.weight, self.kv_norm.weight, s.eps, run.guard)
        q = run.linear(qr, self.wq_b).unflatten(-1, (s.heads, s.head_dim))
        q, rows = attention_inputs.q_and_k(k.inputs, q, kv, positions, table, s.eps)
        rows = collect(rows, packed)
        chosen, top_k = None, packed.tokens
        if self.ratio:
            pool = self.compressor
            kv_score = collect(router.logits(k.shared.router_logits, x, pool.fused_wkv_wgate.weight), packed)
            pooled = compressor.compress(k.compress, kv_score, pool.ape, pool.norm.weight, packed, table, self.ratio,
                                         s.eps, run.guard)
            rows = torch.cat([pooled, rows])
        if self.indexer is not None:
            top_k = s.index_top_k
            seen = (collect(t.detach(), packed) for t in (x, qr))
            chosen = indexer.select(k.indexer, *seen, self.indexer.weights(), packed, table, top_k, s.eps, run.cache)
        lists = map(packed.own, attention_sparse.row_lists(packed, s.window, self.ratio, top_k, chosen))
        out = attention_sparse.attend(k.attend, q, rows, self.attn_sink, *lists, s.head_dim**-0.5, run.guard)
        z = o_proj_fp8.o_proj_fp8(k.o_proj, out, self.wo_a.weight, positions, table, s.groups, cache=run.cache,
                                  guard=run.guard)
        return run.linear(z.flatten(1), self.wo_b)


class SharedExpert(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.gate_up_proj = Weight(2 * s.width, s.hidden, dtype=dtype, fp8=True)
        self.down_proj = Weight(s.hidden, s.width, dtype=dtype, fp8=True)

    def forward(self, x, limit: float, run: "Run"):
        return run.linear(swiglu.swiglu(run.kernels.swiglu, run.linear(x, self.gate_up_proj), limit), self.down_proj)


class Gate(nn.Module):
    def __init__(self, s: Shape, hashed: bool, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(s.experts, s.hidden, dtype=dtype))
        if hashed:
            table = torch.zeros(s.vocab, s.top_k, dtype=torch.int32)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            bias = torch.empty(s.experts, dtype=_wide(dtype))
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)


class MoE(nn.Module):
    def __init__(self, s: Shape, hashed: bool, dtype):
        super().__init__()
        self.s, self.hashed = s, hashed
        self.gate = Gate(s, hashed, dtype)
        self.shared_experts = SharedExpert(s, dtype)
        self.experts = nn.ParameterDict({
            "w13_weight": nn.Parameter(torch.empty(s.experts, 2 * s.width, s.hidden, dtype=dtype)),
            "w2_weight": nn.Parameter(torch.empty(s.experts, s.hidden, s.width, dtype=dtype)),
        })  # fmt: skip

    def forward(self, x, tokens, run: "Run"):
        s, k = self.s, run.kernels
        logits = router.logits(k.shared.router_logits, x, self.gate.weight)
        if self.hashed:
            weights, ids = router_dsv4.route_hashed(k.router, logits, tokens, self.gate.tid2eid, s.factor)
        else:
            weights, ids = router_dsv4.route(k.router, logits, self.gate.e_score_correction_bias, s.top_k, s.factor)
        routed = grouped_fp8.grouped_fp8(k.experts, x, self.experts["w13_weight"], self.experts["w2_weight"], weights,
                                         ids, s.limit, cache=run.cache, guard=run.guard)
        return self.shared_experts(x, s.limit, run) + routed


class Layer(nn.Module):
    def __init__(self, s: Shape, index: int, dtype):
        super().__init__()
        self.s, self.ratio, wide = s, s.ratios[index], _wide(dtype)
        self.attn, self.ffn = Attention(s, self.ratio, dtype), MoE(s, index < s.hashed, dtype)
        self.attn_norm, self.ffn_norm = Weight(s.hidden, dtype=dtype), Weight(s.hidden, dtype=dtype)
        mix = s.streams * (s.streams + 2)
        for part in ("attn", "ffn"):
            for name, shape in (("fn", (mix, s.streams * s.hidden)), ("base", (mix,)), ("scale", (3,))):
                setattr(self, f"hc_{part}_{name}", nn.Parameter(torch.empty(*shape, dtype=wide)))

    def _mix(self, part: str):
        weight = getattr(self, f"{part}_norm").weight
        return *(getattr(self, f"hc_{part}_{name}") for name in ("fn", "scale", "base")), weight, self.s.mhc

    def forward(self, x, residual, post, comb, tokens, packed: Packed, table, run: "Run"):
        """residual, post, comb: None before the first layer -> (the sublayer's output, residual, post, comb)."""
        k = run.kernels.mhc
        if residual is None:
            residual, x, post, comb = mhc.pre_broadcast(k.pre_broadcast, x, *self._mix("attn"), run.guard)
        else:
            residual = mhc.post(k.post, x, residual, post, comb)
            x, post, comb = mhc.pre(k.pre, residual, *self._mix("attn"), run.guard)
        x = self.attn(x, packed, table, run)
        residual = mhc.post(k.post, x, residual, post, comb)
        x, post, comb = mhc.pre(k.pre, residual, *self._mix("ffn"), run.guard)
        return self.ffn(x, tokens, run), residual, post, comb


class Backbone(nn.Module):
    def __init__(self, s: Shape, dtype):
        super().__init__()
        self.embed_tokens = Weight(s.vocab, s.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Layer(s, i, dtype) for i in range(len(s.ratios)))
        self.norm = Weight(s.hidden, dtype=dtype)
        self.hc_head_fn = nn.Parameter(torch.empty(s.streams, s.streams * s.hidden, dtype=_wide(dtype)))
        self.hc_head_base = nn.Parameter(torch.empty(s.streams, dtype=_wide(dtype)))
        self.hc_head_scale = nn.Parameter(torch.empty(1, dtype=_wide(dtype)))


@dataclass
class Run:
    """What every operator of a forward is given besides its tensors. `guard` and `cache` are optional."""

    kernels: Kernels
    guard: object = None
    cache: OperandCache | None = None

    def linear(self, x, module: Weight):
        return linear_fp8(self.kernels.linear, x, module.weight, cache=self.cache, guard=self.guard)


class DeepseekV4(nn.Module):
    """tables: cosines and sines by ratio (kernels_dsv4.rotary_tables). `recompute`: keep a layer's inputs only and run
    it again for its backward; every operator is a function of its arguments, so no bit changes."""

    def __init__(self, shape: Shape, kernels: Kernels, tables: dict[int, torch.Tensor],
                 dtype: torch.dtype = torch.bfloat16, recompute: bool = False):
        super().__init__()
        self.shape, self.tables, self.recompute = shape, tables, recompute
        self.run = Run(kernels)
        self.model = Backbone(shape, dtype)
        self.lm_head = Weight(shape.vocab, shape.hidden, dtype=dtype)

    def forward(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The logprob of each token, fp32 [tokens]: logprob.of_packed."""
        k = self.run.kernels.shared
        return logprob.of_packed(k.linear, k.logprob, self.hidden, self.lm_head.weight, tokens, packed)

    def vocabulary(self, tokens: torch.Tensor, packed: Packed, places: torch.Tensor) -> torch.Tensor:
        """The logprob of every token of the vocabulary at `places`: logprob.of_vocabulary."""
        k = self.run.kernels.shared
        return logprob.of_vocabulary(k.linear, k.logprob, self.hidden, self.lm_head.weight, tokens, packed, places)

    def hidden(self, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
        """The states that lm_head sees: [own rows, hidden]."""
        b, k, s = self.model, self.run.kernels, self.shape
        tokens = packed.own(tokens)
        state = torch.nn.functional.embedding(tokens, b.embed_tokens.weight), None, None, None
        for layer in b.layers:
            arguments = *state, tokens, packed, self.tables[layer.ratio], self.run
            if self.recompute and torch.is_grad_enabled():
                state = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                state = layer(*arguments)
        streams = mhc.post(k.mhc.post, *state)
        x = mhc.head(k.mhc.head, streams, b.hc_head_fn, b.hc_head_scale, b.hc_head_base, s.mhc, self.run.guard)
        return norm.rms_norm(k.shared.rms_norm, x, b.norm.weight, s.eps)

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine holds, under its own names: FP8 codes and scales as its load leaves them."""
        return deepseek_v4_weights.exported(self)

    def take(self, engine: dict[str, torch.Tensor]) -> None:
        """Start from an engine's weights; see deepseek_v4_weights."""
        deepseek_v4_weights.take(self, engine)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The engine's fp32 parameters, or fp64 where a test asks for it."""
    return torch.promote_types(dtype, torch.float32)
