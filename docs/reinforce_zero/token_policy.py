"""A token policy small enough for a CPU, with a kernel mismatch that comes from real arithmetic.

Contexts are (prompt, position, previous token), each with a fixed random feature vector h. A router sends h to one of
EXPERTS matrices, which give the logits; only the experts are trained. A response is LENGTH tokens; its reward is the
share of tokens a hidden teacher of the same form would have chosen.

The rollout's kernel adds products in BF16, one rounding an addition.
  aligned   one fixed order of additions; the learner takes its values from that same kernel (visible_with_grad) and its
            gradient from fp32.
  stock     the order of additions is drawn anew for each batch, as split and scheduling choices do in a real engine;
            the learner computes in fp32. No noise is put in by hand: where two router scores nearly tie, the last bit
            sends a token to another expert.
"""
import math

import torch

from megatron.zero_mismatch.mismatch_metrics import Split, split
from megatron.zero_mismatch.reinforce_zero import group_advantages, reinforce_zero_loss
from megatron.zero_mismatch.ste import visible_with_grad

PROMPTS, LENGTH, VOCABULARY, EXPERTS, WIDTH = 32, 8, 16, 4, 16
GROUPS, GROUP = 8, 8  # 64 responses an update
FIXED_ORDER = range(WIDTH)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def bf16_matvec(h: torch.Tensor, weight: torch.Tensor, order) -> torch.Tensor:
    """h: [n, WIDTH], weight: [n, WIDTH, m] -> [n, m]. Elementwise only: a row cannot depend on its neighbours."""
    total = torch.zeros(h.shape[0], weight.shape[2])
    h, weight = bf16(h), bf16(weight)
    for k in order:
        total = bf16(total + bf16(h[:, k : k + 1] * weight[:, k]))
    return total


class Task:
    def __init__(self, seed: int):
        g = torch.Generator().manual_seed(seed)
        features = torch.randn(PROMPTS, LENGTH, VOCABULARY, WIDTH, generator=g)
        self.features = features * (2 / math.sqrt(WIDTH))
        self.router = torch.randn(1, WIDTH, EXPERTS, generator=g)
        self.teacher = torch.randn(EXPERTS, WIDTH, VOCABULARY, generator=g)

    def exact(self, experts: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        chosen = torch.einsum("nd,de->ne", h, self.router[0]).argmax(1)
        return torch.einsum("nd,ndv->nv", h, experts[chosen])

    def kernel(self, experts: torch.Tensor, h: torch.Tensor, order=FIXED_ORDER) -> torch.Tensor:
        chosen = bf16_matvec(h, self.router.expand(len(h), -1, -1), order).argmax(1)
        return bf16_matvec(h, experts[chosen], order)

    def aligned(self, experts: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        chosen = bf16_matvec(h, self.router.expand(len(h), -1, -1), FIXED_ORDER).argmax(1)
        graph = torch.einsum("nd,ndv->nv", h, experts[chosen])
        return visible_with_grad(self.kernel(experts.detach(), h), graph)

    def rollout(self, experts: torch.Tensor, stock: bool, g: torch.Generator):
        """tokens, recorded logprobs: [B, LENGTH]; features of the contexts: [B * LENGTH, WIDTH]; prompts: [B]."""
        prompts = torch.randint(0, PROMPTS, (GROUPS,), generator=g).repeat_interleave(GROUP)
        previous = torch.zeros_like(prompts)
        tokens, logprobs, contexts = [], [], []
        for position in range(LENGTH):
            h = self.features[prompts, position, previous]
            order = torch.randperm(WIDTH, generator=g).tolist() if stock else FIXED_ORDER
            logprob = torch.log_softmax(self.kernel(experts, h, order), 1)
            previous = torch.multinomial(logprob.exp(), 1, generator=g)[:, 0]
            tokens.append(previous)
            logprobs.append(logprob.gather(1, previous[:, None])[:, 0])
            contexts.append(h)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(contexts, 1).flatten(0, 1)

    def logprob(self, experts: torch.Tensor, h: torch.Tensor, tokens: torch.Tensor, stock: bool) -> torch.Tensor:
        logits = self.exact(experts, h) if stock else self.aligned(experts, h)
        return torch.log_softmax(logits, 1).gather(1, tokens.reshape(-1, 1)).view_as(tokens)


def train(lag: int, stock: bool, updates: int, step: float, seed: int):
    """Yield (Split, mean reward, gradient norm) of each update; the rollout is `lag` versions behind the learner."""
    task, g = Task(seed), torch.Generator().manual_seed(seed + 1000)
    experts = torch.zeros(EXPERTS, WIDTH, VOCABULARY, requires_grad=True)
    versions = [experts.detach().clone()]
    for _ in range(updates):
        tokens, recorded, h = task.rollout(versions[0], stock, g)
        best = task.exact(task.teacher, h).argmax(1).view_as(tokens)
        rewards = (tokens == best).float().mean(1)
        advantage = group_advantages(rewards.tolist(), [i // GROUP for i in range(len(tokens))])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        logprob = task.logprob(experts, h, tokens, stock)
        with torch.no_grad():
            at_version = task.logprob(versions[0], h, tokens, stock)
        measured: Split = split(logprob, at_version, recorded, mask)
        (gradient,) = torch.autograd.grad(reinforce_zero_loss(logprob, recorded, mask, advantage).loss, experts)
        with torch.no_grad():
            experts -= step * gradient
        versions = (versions + [experts.detach().clone()])[-(lag + 1) :]
        yield measured, rewards.mean().item(), gradient.norm().item()
