"""Nemotron-H written a second time, from its equations, in plain PyTorch at any precision: what gradients are held to.

Shares no code and no formula layout with the trainer: Mamba-2 is the recurrence over S, token by token; attention is
one masked softmax a head; every expert sees every token, and a one-hot matrix keeps what was chosen; derivatives are
autograd's. Weights come by the engine's names. The experts' choice is given from outside (`choices`): it is discrete,
and another choice is another function. In BF16 the same text is the usual BF16 model, whose error scales the bounds;
with `scales` it is the usual quantised one: inputs of FP8 projections, queries, keys, values and softmax weights pass
through e4m3, whose derivative is taken for 1. With `read` those inputs are what the actor's forward read back instead;
the softmax weights are then left alone, at which the trainer takes the derivative too. Weights are the dequantised ones
in every case.

Means, softmax and log-softmax are written out: an engine with batch invariance on replaces PyTorch's in its process, by
kernels that compute in fp32 and have no derivative (determinism/batch_invariant.py:1357-1371 of 0.33.0).
"""
from __future__ import annotations

import torch


class Reference:
    """config: the checkpoint's config.json; weights: {engine name: tensor}, cast to `dtype` as leaves with gradient;
    scales: {engine name: calibrated scale} of what passes through e4m3."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], dtype: torch.dtype,
                 scales: dict[str, torch.Tensor] | None = None):
        self.c, self.dtype, self.scales = config, dtype, scales or {}
        self.w = {name: w.detach().to(self._kept(name)).requires_grad_() for name, w in weights.items()}

    def _kept(self, name: str) -> torch.dtype:
        """A usual BF16 model keeps the router and the decay rates in fp32."""
        narrow = self.dtype == torch.bfloat16 and name.endswith((".A", ".gate.weight", "correction_bias"))
        return torch.float32 if narrow else self.dtype

    def logprobs(self, sequences: list[torch.Tensor], choices: list[torch.Tensor],
                 read: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """sequences: token ids of each; choices: [all tokens, k] a MoE layer, packed. One logprob a predicted token.
        read: {name of a scale: [all tokens, width]}, what is multiplied in the place of that input."""
        found, begin = [], 0
        for tokens in sequences:
            end = begin + len(tokens)
            self.read = {name: rows[begin:end] for name, rows in (read or {}).items()}
            found.append(self._sequence(tokens, [c[begin:end].long() for c in choices]))
            begin = end
        return torch.cat(found)

    def _sequence(self, tokens, choices):
        h = self.w["model.embed_tokens.weight"][tokens]
        choices = iter(choices)
        for i, kind in enumerate(self.c["hybrid_override_pattern"]):
            at = f"model.layers.{i}."
            x = self._rms(h, at + "norm.weight")
            mixer = {"M": self._mamba, "*": self._attention, "-": self._mlp}.get(kind)
            h = h + (self._moe(x, at + "mixer.", next(choices)) if kind == "E" else mixer(x, at + "mixer."))
        z = self._rms(h, "model.norm_f.weight") @ self.w["lm_head.weight"].T
        wide = z if z.dtype == torch.float64 else z.float()
        wide = wide[:-1] - wide[:-1].detach().amax(-1, keepdim=True)
        return wide.gather(1, tokens[1:, None])[:, 0] - wide.exp().sum(-1).log()

    def _rms(self, x, name, weight=None):
        wide = x if x.dtype == torch.float64 else x.float()
        scale = (wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.c["layer_norm_epsilon"]) ** -0.5
        return (wide * scale).to(self.dtype) * (self.w[name] if weight is None else weight)

    def _through(self, x, name):
        """x as it is read back from e4m3, where `name` has a scale; the gradient passes as it is."""
        if (given := self.read.get(name)) is not None:
            return x + (given.to(x.dtype) - x.detach())
        if (scale := self.scales.get(name)) is None:
            return x
        codes = (x.detach().float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return x + ((codes.float() * scale).to(x.dtype) - x.detach())

    def _linear(self, x, name):
        return self._through(x, name + ".input_scale") @ self.w[name + ".weight"].T

    def _mlp(self, x, at):
        return self._linear(torch.relu(self._linear(x, at + "up_proj")) ** 2, at + "down_proj")

    def _attention(self, x, at):
        heads, kv, d = (self.c[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        parts = self._linear(x, at + "qkv_proj").split([heads * d, kv * d, kv * d], -1)
        q, k, v = (self._through(part, f"{at}attn._{of}_scale") for of, part in zip("qkv", parts, strict=True))
        narrow = f"{at}attn._q_scale" in self.scales
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        outs = []
        for head in range(heads):
            own = head // (heads // kv)
            key, value = k[:, own * d:(own + 1) * d], v[:, own * d:(own + 1) * d]
            scores = q[:, head * d:(head + 1) * d] @ key.T / d**0.5
            outs.append(_softmax(scores.masked_fill(future, float("-inf")), narrow) @ value)
        return self._linear(torch.cat(outs, -1), at + "o_proj")

    def _moe(self, x, at, chosen):
        score = torch.sigmoid(x.to(self.w[at + "gate.weight"].dtype) @ self.w[at + "gate.weight"].T)
        keep = torch.zeros_like(score).scatter(1, chosen, 1.0)
        weight = score * keep
        if self.c["norm_topk_prob"]:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = (weight * self.c["routed_scaling_factor"]).to(self.dtype)
        routed = torch.zeros_like(x)
        # unbind, not an index: the gradient of an index is as large as all experts.
        each = zip(*(self.w[f"{at}experts.routed_experts.{n}_weight"].unbind() for n in ("w13", "w2")), strict=True)
        for e, (up, down) in enumerate(each):
            routed = routed + weight[:, e:e + 1] * (torch.relu(x @ up.T) ** 2 @ down.T)
        return routed + self._mlp(x, at + "shared_experts.")

    def _mamba(self, x, at):
        heads, p, groups, n = (self.c[k] for k in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"))
        widths = [heads * p, heads * p + 2 * groups * n, heads]
        gate, xbc, raw = self._linear(x, at + "in_proj").split(widths, -1)
        kernel = self.w[at + "conv1d.weight"]
        mixed = torch.conv1d(xbc.T[None], kernel, self.w[at + "conv1d.bias"], padding=kernel.shape[-1] - 1,
                             groups=kernel.shape[0])[0, :, :len(x)].T
        value, b, c = torch.nn.functional.silu(mixed).split([heads * p, groups * n, groups * n], -1)
        y = self._recurrence(value.view(-1, heads, p), b.view(-1, groups, n), c.view(-1, groups, n), raw, at)
        y = (y * torch.nn.functional.silu(gate)).view(len(x), groups, -1)
        weight = self.w[at + "norm.weight"].view(groups, -1)
        return self._linear(self._rms(y, None, weight).reshape(len(x), -1), at + "out_proj")

    def _recurrence(self, x, b, c, raw, at):
        rates, skip = self.w[at + "A"], self.w[at + "D"]
        b, c = (t.repeat_interleave(x.shape[1] // t.shape[1], 1).to(rates.dtype) for t in (b, c))
        step = torch.nn.functional.softplus((raw + self.w[at + "dt_bias"]).to(rates.dtype))
        state, rows = x.new_zeros(*x.shape[1:], b.shape[-1], dtype=rates.dtype), []
        for t in range(len(x)):
            state = state * (step[t] * rates).exp()[:, None, None]
            state = state + (step[t][:, None] * x[t])[..., None] * b[t][:, None]
            rows.append((state * c[t][:, None]).sum(-1))
        return (torch.stack(rows) + skip[:, None] * x).to(self.dtype).flatten(1)


def _softmax(scores, narrow=False):
    """narrow: weights are multiplied as e4m3 numbers of 1 / 256, and divided by their sum before that rounding."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    e = (wide - wide.detach().amax(-1, keepdim=True)).exp()
    total = e.sum(-1, keepdim=True)
    if narrow:
        e = e + ((e.detach() * 256).to(torch.float8_e4m3fn).to(e.dtype) / 256 - e.detach())
    return (e / total).to(scores.dtype)
