"""The way from states to logprobs that the ordinary models of `prove cost` share."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.zero_mismatch.packing import wide


def logprobs(model, tokens, packed):
    """The logprob of each token, 0 for a sequence's first: log_softmax over fp32 logits, of all tokens at once."""
    predicted = packed.positions > 0
    z = wide(F.linear(model.hidden(tokens, packed)[:-1][predicted[1:]], model.lm_head.weight))
    found = torch.log_softmax(z, -1).gather(1, tokens[predicted][:, None])[:, 0]
    return found.new_zeros(tokens.numel()).masked_scatter(predicted, found)
