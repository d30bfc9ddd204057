"""Nemotron-H as PyTorch runs it in BF16: what `prove cost` measures the aligned actor against.

The aligned model's parameters and Megatron's buffers around them; every operator is PyTorch's own with its own
derivative: cuBLAS, fused scaled_dot_product_attention, F.rms_norm, F.conv1d, grouped GEMMs over the experts' rows, and
log_softmax over fp32 logits. Megatron's own mixer is not to be had here: megatron/core/ssm/mamba_mixer.py:202 of 0.19.2
refuses to start without mamba_ssm, whose fused scan has no wheel for this stack. The scan is the chunked one in PyTorch
that the aligned backward differentiates, so a ratio flatters the aligned forward by what mamba_ssm would win there.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.zero_mismatch import mamba2
from megatron.zero_mismatch.models.nemotron_h import NemotronH
from megatron.zero_mismatch.packing import wide
from torch.utils.checkpoint import checkpoint

from prove.ordinary import logprobs


class Ordinary(NemotronH):
    forward = logprobs

    def hidden(self, tokens, packed):
        h = F.embedding(tokens, self.model.embed_tokens.weight)
        for layer, kind in zip(self.model.layers, self.shape.pattern, strict=True):
            mixer = {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._moe}[kind]

            def run(h, layer=layer, mixer=mixer):
                return h + mixer(layer.mixer, self._norm(h, layer.norm.weight), packed)
            keep = not (self.recompute and torch.is_grad_enabled())
            h = run(h) if keep else checkpoint(run, h, use_reentrant=False)
        return self._norm(h, self.model.norm_f.weight)

    def _norm(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, self.shape.eps)

    def _mlp(self, mixer, x, packed):
        return F.linear(F.relu(F.linear(x, mixer.up_proj.weight)).square(), mixer.down_proj.weight)

    def _attention(self, mixer, x, packed):
        qkv = _padded(F.linear(x, mixer.qkv_proj.weight), packed).split(mixer.widths, -1)
        q, k, v = (t.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for t in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(_packed(out.transpose(1, 2).flatten(2), packed), mixer.o_proj.weight)

    def _moe(self, mixer, x, packed):
        scores = torch.sigmoid(F.linear(wide(x), mixer.gate.weight))
        ids = torch.topk(scores + mixer.gate.e_score_correction_bias, self.shape.top_k, -1).indices
        weights = scores.gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True) * self.shape.scaling).to(x.dtype).flatten()
        order = ids.flatten().argsort()
        ends = ids.flatten().bincount(minlength=self.shape.experts).cumsum(0).int()
        token = order // self.shape.top_k
        up = F.grouped_mm(x[token], mixer.experts.w13_weight.mT, offs=ends)
        down = F.grouped_mm(F.relu(up).square(), mixer.experts.w2_weight.mT, offs=ends)
        routed = torch.zeros_like(x).index_add(0, token, down * weights[order][:, None])
        return routed + self._mlp(mixer.shared_experts, x, packed)

    def _mamba(self, mixer, x, packed):
        m = self.shape.mamba
        gate, xbc, dt = F.linear(x, mixer.in_proj.weight).split([m.x_width, mixer.conv_width, m.heads], -1)
        rows = _padded(xbc, packed)
        mixed = F.conv1d(rows.transpose(1, 2), mixer.conv1d.weight, mixer.conv1d.bias, padding=self.shape.conv - 1,
                         groups=mixer.conv_width)[..., :rows.shape[1]]
        xbc = _packed(F.silu(mixed).transpose(1, 2), packed)
        y = mamba2.reference(xbc, dt, -mixer.A_log.exp(), mixer.D, mixer.dt_bias, packed, m)
        y = (y * F.silu(gate)).unflatten(-1, (m.groups, -1))
        return F.linear(self._norm(y, None).flatten(1) * mixer.norm.weight, mixer.out_proj.weight)


def _rows(packed) -> torch.Tensor:
    """[tokens]: the row of each token where sequences lie padded to the longest."""
    lengths = torch.tensor(packed.lengths, device=packed.device)
    return torch.arange(len(lengths), device=packed.device).repeat_interleave(lengths) * max(packed.lengths) \
        + packed.positions


def _padded(x, packed):
    """[tokens, width] -> [sequences, longest, width]; sequences of one length are only viewed so."""
    shape = len(packed.lengths), max(packed.lengths)
    if packed.tokens == shape[0] * shape[1]:
        return x.unflatten(0, shape)
    return x.new_zeros(shape[0] * shape[1], x.shape[1]).index_copy(0, _rows(packed), x).unflatten(0, shape)


def _packed(x, packed):
    flat = x.flatten(0, 1)
    return flat if len(flat) == packed.tokens else flat.index_select(0, _rows(packed))
