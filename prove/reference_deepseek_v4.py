"""DeepSeek-V4 written a second time, from its equations, in plain PyTorch at any precision: what gradients are held to.

Shares no code and no formula layout with the trainer: all tokens of all sequences see all keys, and a dense mask keeps
those that are theirs; every expert sees every token, and a one-hot matrix keeps what was chosen; pooling is by windows
of positions, Sinkhorn repeated division, derivatives are autograd's. Quantisers are left out: the trainer passes
gradients straight through them. Weights come by the trainer's names. The choices of experts and of compressed rows are
given from outside: they are discrete, and another choice is another function. In BF16 the same text is the usual BF16
model, whose error scales the bounds.

With `fp8` the same text rounds what the deployment rounds, activations and K rows to e4m3 with a power-of-two scale a
group, and passes the gradient straight through: what FP8 costs this model, whoever computes it. Masters hold FP8 values
before the first update, so weights round to themselves. `given` values replace those that are rounded.

With a loop over experts, sequences, heads and compressed rows, one gradient of the recipe's tiny-train was a million
calls of operators; it is 11,000, and the one loop left is over the groups of wo_a. All experts are one matrix, behind
each other; the share that a token gives to an expert multiplies what goes into the second product, not what comes out.

Softmax and means are written out and products are of two matrices each: an engine with batch invariance on replaces
PyTorch's softmax, mean and bmm in its process, by kernels that know no fp64 or have no derivative
(determinism/batch_invariant.py:1357-1380 of 0.33.0).
"""
from __future__ import annotations

import torch

FP32 = ("hc_", "attn_sink", ".ape", "correction_bias")  # what a usual BF16 model keeps in fp32


class Reference:
    """config: config.json; weights: {trainer's name: tensor}, cast to `dtype` as leaves with gradient; tables: cosines
    and sines by compression ratio."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], tables: dict[int, torch.Tensor],
                 dtype: torch.dtype):
        self.c, self.dtype, self.tables = config, dtype, tables
        self.w = {name: self._leaf(name, w) for name, w in weights.items()}

    def _leaf(self, name: str, w: torch.Tensor) -> torch.Tensor:
        if not w.is_floating_point():
            return w
        narrow = self.dtype == torch.bfloat16 and any(part in name for part in FP32)
        return w.detach().to(torch.float32 if narrow else self.dtype).requires_grad_()

    def logprobs(self, sequences: list[torch.Tensor], experts: list[torch.Tensor], rows: dict[int, torch.Tensor], *,
                 fp8: bool = False, given: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """sequences: token ids of each; the rest is of all n tokens, end to end. experts: [n, k] a layer; rows:
        {layer: [n, K], counted in the token's sequence, -1 where none}; given: {a projection's weight, or a layer's
        "attn.kv": [n, ...]}, the values that it quantises -> one logprob a predicted token."""
        self.fp8, self.given = fp8, given or {}
        tokens = torch.cat(sequences)
        self.places = torch.cat([torch.arange(len(s), device=tokens.device) for s in sequences])
        self.owner = (self.places == 0).cumsum(0)
        streams = torch.stack([self.w["model.embed_tokens.weight"][tokens]] * self.c["hc_mult"], 1)
        for i, kind in enumerate(self.c["layer_types"]):
            at, ratio = f"model.layers.{i}.", self.c["compress_rates"].get(kind, 0)
            streams = self._sublayer(streams, at, "attn", lambda x, at=at, ratio=ratio, i=i: self._attention(
                x, at + "attn.", ratio, rows.get(i)))
            streams = self._sublayer(streams, at, "ffn", lambda x, at=at, i=i: self._moe(
                x, at + "ffn.", experts[i].long()))
        flat = streams.flatten(1)
        gate = self._mix(flat, "model.hc_head_", slice(None), 0)
        x = (((torch.sigmoid(gate) + self.c["hc_eps"])[:, :, None] * self._up(streams)).sum(1)).to(self.dtype)
        z = self._up(self._rms(x, self.w["model.norm.weight"]) @ self.w["lm_head.weight"].T)
        predicted = self.places[1:] > 0
        z, next_token = z[:-1][predicted], tokens[1:][predicted]
        z = z - z.detach().amax(-1, keepdim=True)
        return z.gather(1, next_token[:, None])[:, 0] - z.exp().sum(-1).log()

    @staticmethod
    def _up(x):
        return x if x.dtype == torch.float64 else x.float()

    def _coarse(self, x, group=128, floor=1e-10, columns=None):
        """x as the deployment stores it: e4m3 by groups of `columns` leading columns; gradient straight through."""
        if not self.fp8:
            return x
        head = x[..., :columns].detach().float().unflatten(-1, (-1, group))
        scale = 2.0 ** torch.ceil(torch.log2(head.abs().amax(-1, keepdim=True).clamp(min=floor) / 448))
        stored = ((head / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
        stored = stored if columns is None else torch.cat([stored, x[..., columns:].detach()], -1)
        return x + (stored - x.detach())

    def _given(self, x, name):
        """x with the value that is given for `name`; the gradient passes as it is."""
        return x if name not in self.given else x + (self.given[name].view_as(x).to(x.dtype) - x.detach())

    def _project(self, x, weight, share=None):
        """The value is of the rounded x, the derivative is taken at x itself, as the trainer takes it. `share`
        multiplies x behind the rounding; its own derivative is taken at the rounded x."""
        def product(x, share, weight):
            return (x if share is None else (x * share).to(x.dtype)).flatten(1) @ weight.T

        if not self.fp8:
            return product(x, share, weight)
        exact = product(x, None if share is None else share.detach(), weight)
        return exact + (product(self._coarse(x.detach()), share, weight.detach()) - exact.detach())

    def _stored(self, rows):
        """K rows: what is not rotated goes through FP8, 64 columns a scale."""
        return self._coarse(rows, 64, 1e-4, rows.shape[-1] - self.c["qk_rope_head_dim"])

    def _rms(self, x, weight=None):
        wide = self._up(x)
        y = (wide * (wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.c["rms_norm_eps"]) ** -0.5).to(self.dtype)
        return y if weight is None else y * weight

    def _mix(self, flat, name, part, scale):
        wide = self._up(flat)
        size = (wide.pow(2).sum(-1, keepdim=True) / flat.shape[1] + self.c["rms_norm_eps"]) ** 0.5
        fn, base = self.w[name + "fn"][part], self.w[name + "base"][part]
        return wide @ self._up(fn).T / size * self.w[name + "scale"][scale] + base

    def _sublayer(self, streams, at, part, function):
        n, s = streams.shape[:2]
        flat, name, eps = streams.flatten(1), f"{at}hc_{part}_", self.c["hc_eps"]
        collapse = torch.sigmoid(self._mix(flat, name, slice(0, s), 0)) + eps
        spread = 2 * torch.sigmoid(self._mix(flat, name, slice(s, 2 * s), 1))
        mixing = self._mix(flat, name, slice(2 * s, None), 2).view(n, s, s)
        mixing = torch.exp(mixing - mixing.detach().amax(2, keepdim=True))
        mixing = mixing / mixing.sum(2, keepdim=True) + eps
        for step in range(self.c["hc_sinkhorn_iters"]):
            if step:
                mixing = mixing / (mixing.sum(2, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(1, keepdim=True) + eps)
        x = (collapse[:, :, None] * self._up(streams)).sum(1).to(self.dtype)
        y = function(self._rms(x, self.w[f"{at}{part}_norm.weight"]))
        mixed = (mixing[..., None] * self._up(streams)[:, :, None]).sum(1)
        return (mixed + spread[:, :, None] * self._up(y)[:, None]).to(self.dtype)

    def _turn(self, x, positions, ratio, back=False):
        """Rotates the last columns by complex multiplication; x: [n, ..., D]."""
        cos, sin = self.tables[ratio][positions].to(self._up(x).dtype).chunk(2, -1)
        rotor = torch.complex(cos, -sin if back else sin)
        rotor = rotor.view(len(x), *[1] * (x.ndim - 2), -1)
        head, tail = self._up(x).split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
        pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous()) * rotor
        return torch.cat([head, torch.view_as_real(pairs).flatten(-2)], -1).to(self.dtype)

    def _attention(self, x, at, ratio, chosen):
        n, heads, d, r = len(x), self.c["num_attention_heads"], self.c["head_dim"], self.c["q_lora_rank"]
        places, owner = self.places, self.owner
        x = self._given(x, at + "fused_wqa_wkv.weight")
        low = self._project(x, self.w[at + "fused_wqa_wkv.weight"])
        qr = self._given(self._rms(low[:, :r], self.w[at + "q_norm.weight"]), at + "wq_b.weight")
        kv = self._given(self._rms(low[:, r:], self.w[at + "kv_norm.weight"]), at + "kv")
        q = self._turn(self._rms(self._project(qr, self.w[at + "wq_b.weight"]).view(n, heads, d)), places, ratio)
        keys = self._stored(self._turn(kv, places, ratio))
        age = places[:, None] - places
        seen = (owner[:, None] == owner) & (age >= 0) & (age < self.c["sliding_window"])
        if ratio and len(ends := self._ends(ratio)):
            keys = torch.cat([self._stored(self._pooled(x, at + "compressor.", ratio, d, ends)), keys])
            rows = places[ends] // ratio
            visible = (owner[:, None] == owner[ends]) & (rows < ((places + 1) // ratio)[:, None])
            if chosen is not None:
                visible = visible & (chosen[:, :, None] == rows).any(1)
            seen = torch.cat([visible, seen], 1)
        scores = (self._up(q).flatten(0, 1) @ self._up(keys).T).view(n, heads, -1) * d**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        sink = self._up(self.w[at + "attn_sink"])
        top = torch.maximum(scores.detach().amax(-1), sink.detach())
        e = torch.exp(scores - top[..., None])
        p = e / (e.sum(-1) + torch.exp(sink - top))[..., None]
        out = (p.flatten(0, 1) @ self._up(keys)).view(n, heads, d).to(self.dtype)
        out = self._turn(self._given(out, at + "wo_a.weight"), places, ratio, back=True)
        groups, rank = self.c["o_groups"], self.c["o_lora_rank"]
        wo_a = self.w[at + "wo_a.weight"].view(groups, rank, -1)
        z = torch.stack([self._project(out.view(n, groups, -1)[:, g], wo_a[g]) for g in range(groups)], 1)
        return self._project(self._given(z.flatten(1), at + "wo_b.weight"), self.w[at + "wo_b.weight"])

    def _ends(self, ratio):
        """The last token of every whole group of `ratio` tokens."""
        return (self.places % ratio == ratio - 1).nonzero()[:, 0]

    def _pooled(self, x, at, ratio, d, ends):
        """One row a group: a softmax a column over its own tokens' last d columns and, where there are more than d, the
        first d of the group before it in the sequence."""
        both = self._up(x) @ self._up(self.w[at + "fused_wkv_wgate.weight"]).T
        kv, score = both.chunk(2, -1)
        ape = self._up(self.w[at + "ape"])
        own = ends[:, None] + torch.arange(1 - ratio, 1, device=x.device)  # [groups, ratio]
        v, s = kv[own][..., -d:], score[own][..., -d:] + ape[:, -d:]
        if kv.shape[1] > d:
            before, none = (own - ratio).clamp(min=0), self.places[ends] < ratio
            earlier = (score[before][..., :d] + ape[:, :d]).masked_fill(none[:, None, None], float("-inf"))
            v, s = torch.cat([v, kv[before][..., :d]], 1), torch.cat([s, earlier], 1)
        e = torch.exp(s - s.detach().amax(1, keepdim=True))
        rows = (e / e.sum(1, keepdim=True) * v).sum(1)
        rms = (rows.pow(2).sum(-1, keepdim=True) / d + self.c["rms_norm_eps"]) ** 0.5
        starts = self.places[ends] + 1 - ratio
        return self._turn(rows / rms * self._up(self.w[at + "norm.weight"]), starts, ratio)

    def _activated(self, gate_up):
        limit = self.c["swiglu_limit"]
        gate, up = self._up(gate_up).chunk(2, -1)
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up.abs() > limit, torch.sign(up.detach()) * limit, up)
        return (gate / (1 + torch.exp(-gate)) * up).to(self.dtype)

    def _moe(self, x, at, chosen):
        x = self._given(x, at + "shared_experts.gate_up_proj.weight")
        gate = self._up(x) @ self._up(self.w[at + "gate.weight"]).T
        p = torch.sqrt(torch.log(1 + torch.exp(gate)))
        keep = torch.zeros_like(p).scatter(1, chosen, 1.0)
        weight = p * keep
        weight = weight / weight.sum(-1, keepdim=True) * self.c["routed_scaling_factor"]
        w13, w2 = (self.w[f"{at}experts.{name}_weight"] for name in ("w13", "w2"))  # [E, 2 I, H], [E, H, I]
        inner = self._activated(self._project(x, w13.flatten(0, 1)).unflatten(1, w13.shape[:2]))
        routed = self._project(inner, w2.transpose(0, 1).flatten(1), weight[..., None])
        up, down = (f"{at}shared_experts.{name}.weight" for name in ("gate_up_proj", "down_proj"))
        inner = self._given(self._activated(self._project(x, self.w[up])), down)
        return self._project(inner, self.w[down]) + routed
