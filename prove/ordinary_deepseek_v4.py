"""DeepSeek-V4 as PyTorch runs it in BF16: what `prove cost` measures the aligned actor against.

The aligned model's parameters and Megatron's buffers around them, no FP8 anywhere, every derivative PyTorch's own:
cuBLAS, grouped GEMMs over the experts' rows, F.rms_norm, log_softmax over fp32 logits. megatron-core 0.19.2 has no mHC
and none of this attention, so these are written here: mHC by the formulas in fp32; attention over gathered BF16 rows,
BLOCK queries at a time and computed again in the backward; the indexer, frozen as in the aligned model, by BF16 scores
and torch.topk. A fused sparse attention, which nobody has written for this model's training, would be faster.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.zero_mismatch import compressor, indexer, mhc_kernels, swiglu
from megatron.zero_mismatch.attention_sparse import row_lists
from megatron.zero_mismatch.models.deepseek_v4 import DeepseekV4
from megatron.zero_mismatch.packing import wide
from megatron.zero_mismatch.rotary import rotate
from torch.utils.checkpoint import checkpoint

from prove.ordinary import logprobs

BLOCK = 1024  # 1,024 queries of 640 rows of 512 columns gather 640 MiB
MHC = mhc_kernels.REFERENCE


class Ordinary(DeepseekV4):
    forward = logprobs

    def hidden(self, tokens, packed):
        b, s = self.model, self.shape
        streams = F.embedding(tokens, b.embed_tokens.weight)[:, None].repeat(1, s.streams, 1)
        for layer in b.layers:
            keep = not (self.recompute and torch.is_grad_enabled())
            arguments = layer, streams, tokens, packed
            streams = self._layer(*arguments) if keep else checkpoint(self._layer, *arguments, use_reentrant=False)
        x = MHC.head(streams, b.hc_head_fn, b.hc_head_scale, b.hc_head_base, s.mhc)
        return self._norm(x, b.norm.weight)

    def _norm(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, self.shape.eps)

    def _layer(self, layer, streams, tokens, packed):
        x, post, comb = MHC.pre(streams, *layer._mix("attn"))
        streams = MHC.post(self._attention(layer.attn, x, packed), streams, post, comb)
        x, post, comb = MHC.pre(streams, *layer._mix("ffn"))
        return MHC.post(self._moe(layer.ffn, x, tokens), streams, post, comb)

    def _attention(self, attn, x, packed):
        s, ratio, table = self.shape, attn.ratio, self.tables[attn.ratio]
        qr, kv = F.linear(x, attn.fused_wqa_wkv.weight).split([s.q_rank, s.head_dim], -1)
        qr, kv = self._norm(qr, attn.q_norm.weight), self._norm(kv, attn.kv_norm.weight)
        q = self._norm(F.linear(qr, attn.wq_b.weight).unflatten(-1, (s.heads, s.head_dim)), None)
        q, rows = (rotate(t, packed.positions, table).to(x.dtype) for t in (q, kv))
        chosen, top_k = None, packed.tokens
        if ratio and compressor.count(packed, ratio):
            rows = torch.cat([self._pooled(attn.compressor, x, packed, ratio), rows])
        if attn.indexer is not None:
            top_k = s.index_top_k
            chosen = self._chosen(attn.indexer, x, qr, packed)
        indices, lengths = row_lists(packed, s.window, ratio, top_k, chosen)
        out = torch.cat([checkpoint(_attend, q[at:at + BLOCK], rows, indices[at:at + BLOCK], lengths[at:at + BLOCK],
                                    attn.attn_sink, s.head_dim**-0.5, use_reentrant=False)
                         for at in range(0, len(q), BLOCK)])
        out = rotate(out, packed.positions, table, back=True).to(x.dtype).unflatten(1, (s.groups, -1)).flatten(2)
        z = torch.bmm(out.transpose(0, 1), attn.wo_a.weight.unflatten(0, (s.groups, -1)).mT).transpose(0, 1)
        return F.linear(z.flatten(1), attn.wo_b.weight)

    def _pooled(self, pool, x, packed, ratio):
        kv_score = F.linear(x, pool.fused_wkv_wgate.weight)
        return compressor.pooled(kv_score, pool.ape, pool.norm.weight, packed, self.tables[ratio], ratio,
                                 self.shape.eps).to(x.dtype)

    @torch.no_grad()
    def _chosen(self, index, x, qr, packed):
        """[tokens, K] int32: positions in the sequence's pooled rows, the live ones first, -1 behind them."""
        s, ratio = self.shape, indexer.RATIO
        found = torch.full((packed.tokens, s.index_top_k), -1, dtype=torch.int32, device=x.device)
        if not compressor.count(packed, ratio):
            return found
        keys = self._pooled(index.compressor, x, packed, ratio)
        q = F.linear(qr, index.wq_b.weight).unflatten(1, (s.index_heads, s.index_dim))
        q = rotate(q, packed.positions, self.tables[ratio]).to(x.dtype)
        weights, first = F.linear(x, index.weights_proj.weight), 0
        for begin, end in packed.bounds:
            rows = (end - begin) // ratio
            for start in range(begin, end if rows else begin, BLOCK):
                part = slice(start, min(start + BLOCK, end))
                score = F.relu(q[part] @ keys[first:first + rows].T)
                score = torch.bmm(weights[part, None], score)[:, 0].float()
                live = torch.arange(rows, device=x.device) < ((packed.positions[part] + 1) // ratio)[:, None]
                best = score.masked_fill(~live, float("-inf")).topk(min(rows, s.index_top_k))
                found[part, :best.indices.shape[1]] = torch.where(best.values.isfinite(), best.indices, -1).int()
            first += rows
        return found

    def _moe(self, ffn, x, tokens):
        s = self.shape
        p = F.softplus(F.linear(wide(x), wide(ffn.gate.weight))).sqrt()
        if ffn.hashed:
            ids = ffn.gate.tid2eid[tokens].long()
        else:
            ids = (p + ffn.gate.e_score_correction_bias).topk(s.top_k).indices
        weights = p.gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True) * s.factor).to(x.dtype).flatten()
        order = ids.flatten().argsort()
        ends = ids.flatten().bincount(minlength=s.experts).cumsum(0).int()
        token = order // s.top_k
        hidden = F.grouped_mm(x[token], ffn.experts["w13_weight"].mT, offs=ends)
        acted = swiglu.product(hidden, s.limit).to(x.dtype)
        down = F.grouped_mm(acted, ffn.experts["w2_weight"].mT, offs=ends)
        routed = torch.zeros_like(x).index_add(0, token, down * weights[order][:, None])
        shared = ffn.shared_experts
        acted = swiglu.product(F.linear(x, shared.gate_up_proj.weight), s.limit).to(x.dtype)
        return F.linear(acted, shared.down_proj.weight) + routed


def _attend(q, rows, indices, lengths, sink, scale):
    """q: [queries, heads, D]; the softmax in fp32, with the sink in its denominator; products in BF16."""
    live = (torch.arange(indices.shape[1], device=q.device) < lengths[:, None]) & (indices >= 0)
    k = rows.index_select(0, indices.clamp(min=0).flatten()).unflatten(0, indices.shape)
    logits = (wide(torch.bmm(q, k.mT)) * scale).masked_fill(~live[:, None], float("-inf"))
    logits = torch.cat([logits, sink.expand(len(q), -1)[..., None].to(logits.dtype)], -1)
    return torch.bmm(torch.softmax(logits, -1)[..., :-1].to(q.dtype), k)
