"""Logprobs of given tokens under lm_head, without keeping the logits.

    logprob[t] = z[token] - max z - log sum exp(z - max z),  z = h[t] W^T

Values: the head's GEMM is `linear_batch_invariant` (layers/vocab_parallel_embedding.py:79 of 0.33.0) with BF16 logits,
the logprob the sampler's own kernel over them (v1/worker/gpu/sample/logprob.py:17). Both are functions of one row, so
walking the tokens in blocks gives the bits of one call, and the [tokens, vocabulary] logits never exist at once, in
any dtype. Blocks change no forward bit. Of the other tokens only max and sum reach the result, so `logprob` asks the
kernel for one token a row; `of_vocabulary` asks for all and has the same bits.

Backward: logits are computed again by the same kernel, block by block; dz = g (onehot - softmax(z)) in fp32, rounded to
the logits' dtype, dh = dz W, dW accumulated in fp32 over the blocks. Gradients: h and W.

fp32 over the vocabulary: none in the forward, where the kernel widens 1,024 BF16 logits at a time in registers and
writes one number a token. In the backward dz of one block, [BLOCK, vocabulary], made in place of the softmax; dW, the
weight's size, because BF16 would round the sum once a block.
"""
import torch

from .context_parallel import collect
from .packing import Packed, wide

# Tokens of one block: 512 rows of a 131,072-word vocabulary are 128 MiB of BF16 logits.
BLOCK = 512


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, linear, kernel, hidden, weight, tokens):
        ctx.save_for_backward(hidden, weight, tokens)
        ctx.linear = linear
        hidden, weight = hidden.detach(), weight.detach()
        return torch.cat([
            kernel(linear(h, weight), t[:, None])[:, 0]
            for h, t in zip(hidden.split(BLOCK), tokens.split(BLOCK), strict=True)
        ])  # fmt: skip

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, tokens = ctx.saved_tensors
        dw = torch.zeros_like(weight, dtype=wide(weight).dtype)
        dh = []
        for h, t, g in zip(hidden.split(BLOCK), tokens.split(BLOCK), grad.split(BLOCK), strict=True):
            dz = wide(ctx.linear(h, weight))
            dz.sub_(dz.amax(-1, keepdim=True)).exp_()
            dz.div_(dz.sum(-1, keepdim=True)).mul_(-g[:, None])
            dz.scatter_add_(1, t[:, None], g[:, None].to(dz.dtype))  # one index a row: no two adds meet
            dz = dz.to(hidden.dtype)
            dh.append(dz @ weight)
            dw += dz.T @ h
        return None, None, torch.cat(dh), dw.to(weight.dtype), None


def logprob(linear, kernel, hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """hidden: [rows, K], weight: [vocabulary, K], tokens: [rows] int64 -> [rows] fp32."""
    return _LogProb.apply(linear, kernel, hidden, weight, tokens)


def of_packed(linear, kernel, states, weight: torch.Tensor, tokens: torch.Tensor, packed: Packed) -> torch.Tensor:
    """tokens: [tokens] int64 -> the logprob of each token under those before it in its sequence, fp32 [tokens]; 0 for a
    sequence's first token, which nothing predicts. states(tokens, packed): [own rows, K], what the head sees.
    Under context parallelism every rank is given all tokens and gets all logprobs, for a loss that is the same on each.
    """
    if packed.tokens != tokens.numel():
        raise ValueError(f"found {tokens.numel()} tokens for lengths that sum to {packed.tokens}, expected as many")
    if max(packed.lengths) < 2:
        raise ValueError("found sequences of one token only, expected a longer one; there is nothing to predict")
    # Each row predicts the next one's token; what the last row of a sequence says is of no use and dropped at the end.
    found = logprob(linear, kernel, states(tokens, packed), weight, packed.own(tokens.roll(-1)))
    return torch.where(packed.positions > 0, collect(found, packed, alike=True).roll(1), 0.0)


@torch.no_grad()
def of_vocabulary(linear, kernel, states, weight, tokens, packed: Packed, places: torch.Tensor) -> torch.Tensor:
    """The logprob of every token of the vocabulary at each of `places`, as `of_packed` has that of the token which is
    there: fp32 [places, vocabulary]. places: [n] int64, none a sequence's first. To compare, not to learn from."""
    if packed.ranks.size != 1:
        raise ValueError(f"of_vocabulary: found {packed.ranks.size} context-parallel ranks, expected 1: it reads the "
                         "states of rows that another rank has; compare on one")
    if bool((packed.positions[places] == 0).any()):
        raise ValueError("of_vocabulary: found the first place of a sequence, expected later ones: nothing predicts it")
    before = states(tokens, packed)[places - 1]
    every = torch.arange(weight.shape[0], device=tokens.device)
    return torch.cat([kernel(linear(h, weight), every.expand(len(h), -1)) for h in before.split(BLOCK)])


def reference(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """logits: [rows, vocabulary], tokens: [rows, n] int64 -> fp32 [rows, n]."""
    z = wide(logits)
    return z.gather(1, tokens) - torch.logsumexp(z, -1, keepdim=True)
