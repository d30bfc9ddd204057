"""mHC (the mixing of S residual streams): vLLM's TileLang and DeepGEMM kernels forward, hand-written fp32 derivatives.

    pre    m = fn x * rsqrt(mean(x^2) + eps)          x: the S streams of a token as one vector; m: S + S + S*S numbers
           a = sigmoid(m_a s0 + b_a) + eps_a          b = sigmoid(m_b s1 + b_b) * 2        C = sinkhorn(m_c s2 + b_c)
           input = RMSNorm(sum_j a_j x_j) * w
    post   x'_o = b_o y + sum_i C[i, o] x_i           y: the sublayer's output
    head   sum_j a_j x_j                              with its own fn, scale and base

Sinkhorn: softmax over o, + eps, then columns (over i) and rows (over o) divided by their sums + eps in turn, columns
first and last, `iterations` times columns.

Invariant: values are the engine's. Under VLLM_BATCH_INVARIANT the engine runs post and the next pre as these two, at
every number of tokens, with K split in a fixed way (vllm/zero_mismatch/mhc.py), so calling them apart gives the bits of
`mhc_fused_post_pre_tilelang`. The first layer broadcasts one stream and projects it with fn summed over streams, as the
engine does (`pre_broadcast`); that sum is derived from fn at each call, never kept.

Backward: the formulas above in fp32 at the forward's inputs, block by block of tokens (the fp32 streams of all tokens
would take 64 KiB each), with the roundings to BF16 and TF32 as the identity. Gradients reach the streams, y, b, C, fn,
scale, base and w; kernels, settings and guard get None. Matmuls and sums over tokens run in fp32.

residual: [T, S, H] bf16; fn: [S * (S + 2), S * H] fp32; scale: [3]; base: [S * (S + 2)]; w: [H]; head: fn [S, S * H],
scale [1], base [S]. Upstream: vllm/model_executor/kernels/mhc/tilelang.py, tilelang_kernels.py.
"""
from typing import NamedTuple

import torch

from .batched import product
from .masters import Masters
from .packing import wide
from .rms import rms_grad

BLOCK = 4096  # tokens of one block of a backward; sums over tokens add whole blocks, forward bits are not touched


class Settings(NamedTuple):
    """hc_eps stands for three epsilons of the engine's call; post_scale is its hc_post_alpha."""

    rms_eps: float
    hc_eps: float
    norm_eps: float
    iterations: int
    post_scale: float = 2.0


def _sinkhorn(c: torch.Tensor, settings: Settings):
    """(softmax, [(dim, sum + eps, quotient) of each division]); c: [T, S, S], i then o. The last quotient is C."""
    soft = torch.softmax(c, -1)
    value, steps = soft + settings.hc_eps, []
    for step in range(2 * settings.iterations - 1):
        dim = -2 if step % 2 == 0 else -1
        total = value.sum(dim, keepdim=True) + settings.hc_eps
        value = value / total
        steps.append((dim, total, value))
    return soft, steps


def _sinkhorn_grad(soft: torch.Tensor, steps, grad: torch.Tensor) -> torch.Tensor:
    for dim, total, quotient in reversed(steps):
        grad = (grad - (grad * quotient).sum(dim, keepdim=True)) / total
    return soft * (grad - (grad * soft).sum(-1, keepdim=True))


def _mixes(x: torch.Tensor, fn: torch.Tensor, eps: float):
    """(m, r); x: [T, K]."""
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x @ fn.T * r, r


def _mixes_grad(x, fn, m, r, grad):
    """(dx, dfn)."""
    dy = grad * r
    along = (grad * m).sum(-1, keepdim=True) * r.square() / x.shape[-1]
    return dy @ fn - along * x, dy.T @ x


def _pre_grads(residual, fn, scale, base, weight, settings: Settings, grad_input, grad_post, grad_comb):
    """Gradients of one block of tokens: (dresidual, dfn, dscale, dbase, dweight). weight None: head, without a norm."""
    streams = residual.shape[1]
    x = residual.flatten(1)
    m, r = _mixes(x, fn, settings.rms_eps)
    head = weight is None
    parts = [m] if head else m.split([streams, streams, streams * streams], -1)
    bases = [base] if head else base.split([streams, streams, streams * streams])
    gate = torch.sigmoid(parts[0] * scale[0] + bases[0])
    collapse = gate + settings.hc_eps
    if head:
        du, dweight = grad_input, None
    else:
        mixed = product(collapse[:, None], residual)[:, 0]
        du, dweight = rms_grad(grad_input, mixed, weight, settings.norm_eps)
    logits = [product(residual, du[..., None])[..., 0] * gate * (1 - gate)]
    if not head:
        s = torch.sigmoid(parts[1] * scale[1] + bases[1])
        logits.append(grad_post * settings.post_scale * s * (1 - s))
        soft, steps = _sinkhorn((parts[2] * scale[2] + bases[2]).unflatten(-1, (streams, streams)), settings)
        logits.append(_sinkhorn_grad(soft, steps, grad_comb).flatten(1))
    dscale = torch.stack([(d * part).sum() for d, part in zip(logits, parts, strict=True)])
    dm = torch.cat([d * a for d, a in zip(logits, scale, strict=True)], -1)
    dx, dfn = _mixes_grad(x, fn, m, r, dm)
    dresidual = torch.addcmul(dx.view_as(residual), collapse[..., None], du[:, None])
    return dresidual, dfn, dscale, torch.cat(logits, -1).sum(0), dweight


def _by_blocks(residual, fn, scale, base, weight, settings, grads):
    """`_pre_grads` over all tokens. `grads`: of input, post, comb; each given up to BLOCK rows at a time."""
    params = [None if p is None else wide(p) for p in (fn, scale, base, weight)]
    rows, totals = [], None
    for start in range(0, len(residual), BLOCK):
        part = slice(start, start + BLOCK)
        block = [None if g is None else wide(g[part]) for g in grads]
        dresidual, *sums = _pre_grads(wide(residual[part]), *params, settings, *block)
        rows.append(dresidual.to(residual.dtype))
        totals = sums if totals is None else [None if a is None else a + b for a, b in zip(totals, sums, strict=True)]
    typed = [None if t is None else t.to(p.dtype) for t, p in zip(totals, (fn, scale, base, weight), strict=True)]
    return torch.cat(rows), *typed


class _Pre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, residual, fn, scale, base, weight, settings, guard):
        ctx.masters = Masters(guard, fn=fn, scale=scale, base=base, norm=weight)
        ctx.save_for_backward(residual, fn, scale, base, weight)
        ctx.settings = settings
        return kernel(*(t.detach() for t in (residual, fn, scale, base, weight)), settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        ctx.masters.check()
        return None, *_by_blocks(*ctx.saved_tensors, ctx.settings, grads), None, None


class _PreBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, fn, scale, base, weight, settings, guard):
        ctx.masters = Masters(guard, fn=fn, scale=scale, base=base, norm=weight)
        ctx.save_for_backward(x, fn, scale, base, weight)
        ctx.settings = settings
        return kernel(*(t.detach() for t in (x, fn, scale, base, weight)), settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_residual, *grads):
        ctx.masters.check()
        x, fn, *params = ctx.saved_tensors
        streams = x[:, None].expand(-1, fn.shape[1] // x.shape[1], -1)
        dstreams, *sums = _by_blocks(streams, fn, *params, ctx.settings, grads)
        dx = wide(dstreams).sum(1) + wide(grad_residual).sum(1)
        return None, dx.to(x.dtype), *sums, None, None


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, x, residual, post, comb):
        ctx.save_for_backward(x, residual, post, comb)
        return kernel(x.detach(), residual.detach(), post.detach(), comb.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        saved, found = ctx.saved_tensors, []
        for start in range(0, len(grad), BLOCK):
            part = slice(start, start + BLOCK)
            g, (x, residual, post, comb) = wide(grad[part]), (t[part] for t in saved)
            mixing = wide(torch.cat([post[:, None], comb], 1))  # [T, 1 + S, S]: what y and each stream give to each
            streams = wide(torch.cat([x[:, None], residual], 1))  # [T, 1 + S, H]
            down, across = product(mixing, g), product(streams, g.mT)
            found.append((down[:, 0], down[:, 1:], across[:, 0], across[:, 1:]))
        return None, *(torch.cat(d).to(t.dtype) for d, t in zip(zip(*found, strict=True), saved, strict=True))


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, residual, fn, scale, base, settings, guard):
        ctx.masters = Masters(guard, fn=fn, scale=scale, base=base)
        ctx.save_for_backward(residual, fn, scale, base)
        ctx.settings = settings
        return kernel(*(t.detach() for t in (residual, fn, scale, base)), settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.masters.check()
        found = _by_blocks(*ctx.saved_tensors, None, ctx.settings, (grad, None, None))
        return None, *found[:4], None, None


def pre(kernel, residual, fn, scale, base, weight, settings: Settings, guard=None):
    """-> (input [T, H], post [T, S] fp32, comb [T, S, S] fp32)."""
    return _Pre.apply(kernel, residual, fn, scale, base, weight, settings, guard)


def pre_broadcast(kernel, x, fn, scale, base, weight, settings: Settings, guard=None):
    """x: [T, H], the embedding, for every stream -> (residual [T, S, H], input, post, comb)."""
    return _PreBroadcast.apply(kernel, x, fn, scale, base, weight, settings, guard)


def post(kernel, x, residual, post, comb):
    """x: [T, H], the sublayer's output -> [T, S, H]."""
    return _Post.apply(kernel, x, residual, post, comb)


def head(kernel, residual, fn, scale, base, settings: Settings, guard=None):
    """-> [T, H], before the final norm."""
    return _Head.apply(kernel, residual, fn, scale, base, settings, guard)
