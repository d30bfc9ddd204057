"""A token policy of a few hundred parameters for the loop's tests: an engine for the workers and a learner.

Logits are a table over (prompt, previous token). A row of it is looked up and normalised on its own, so that both
sides compute the same bits whatever the batch. Reward: the share of even tokens.
"""
import os
import pathlib
import signal
import time
from dataclasses import dataclass, field

import torch
from megatron.zero_mismatch.mismatch_metrics import split
from megatron.zero_mismatch.reinforce_zero import group_advantages, reinforce_zero_loss
from megatron.zero_mismatch.version_guard import WeightGuard

PROMPTS, VOCABULARY, LONGEST, GROUP = 4, 8, 5, 4


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.table = torch.nn.Parameter(torch.randn(PROMPTS, VOCABULARY, VOCABULARY, generator=generator))

    def logprobs(self, prompt: int, tokens: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """Of each of `tokens` [T] after those before it."""
        table = self.table if table is None else table
        before = torch.cat([tokens.new_zeros(1), tokens[:-1]])
        return torch.log_softmax(table[prompt, before], 1).gather(1, tokens[:, None])[:, 0]


@dataclass(frozen=True)
class MakeRollout:
    """Called in the worker process. The faults are planted by task, and by a file that says they have happened."""

    folder: str = ""
    delay: float = 0.0
    die_on: tuple[int, ...] = ()  # kill -9 itself in the middle of the task, once
    always_die_on: int | None = None
    raise_on: int | None = None
    hold_on: int | None = None  # stay in the middle of the task, once, until the test kills the process
    off_by_one_ulp: bool = False

    def __call__(self):
        return TinyRollout(self)


class TinyRollout:
    def __init__(self, faults: MakeRollout):
        self.faults, self.policy = faults, Policy()

    def resident(self):
        return self.policy.named_parameters()

    def _suffer(self, task: int) -> None:
        marker = pathlib.Path(self.faults.folder, f"{task}")
        time.sleep(self.faults.delay)
        if task == self.faults.raise_on:
            raise ZeroDivisionError(f"planted in task {task}")
        if task == self.faults.always_die_on:
            os.kill(os.getpid(), signal.SIGKILL)
        if task in self.faults.die_on and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if task == self.faults.hold_on and not marker.exists():
            marker.write_text(str(os.getpid()))
            time.sleep(600)

    @torch.no_grad()
    def generate(self, task: int):
        generator = torch.Generator().manual_seed(task)  # a task is the same task wherever and whenever it runs
        tokens, logprobs, rewards = [], [], []
        for member in range(GROUP):
            response, previous = [], 0
            for _ in range(1 + torch.randint(LONGEST, (1,), generator=generator).item()):
                chance = torch.log_softmax(self.policy.table[task % PROMPTS, previous], 0).exp()
                previous = torch.multinomial(chance, 1, generator=generator).item()
                response.append(previous)
            tokens.append(torch.tensor(response))
            logprobs.append(self.policy.logprobs(task % PROMPTS, tokens[-1]))
            rewards.append(sum(token % 2 == 0 for token in response) / len(response))
            if member == 1:
                self._suffer(task)
        if self.faults.off_by_one_ulp:
            logprobs = [x.nextafter(torch.tensor(-100.0)) for x in logprobs]
        return tokens, logprobs, rewards


@dataclass
class TinyLearner:
    step_size: float = 0.5
    before_update: object = None  # called with the groups
    policy: Policy = field(default_factory=Policy)
    trained: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.guard = WeightGuard(self.policy.named_parameters)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.step_size, weight_decay=0.0)
        self.guard.watch(self.optimizer)
        self.tables = {0: self.policy.table.detach().clone()}  # for recomputing at a rollout's version

    def weights(self):
        return list(self.policy.named_parameters())

    def _padded(self, groups, one):
        rows = [one(group, tokens) for group in groups for tokens in group.tokens]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def update(self, groups):
        if self.before_update:
            self.before_update(groups)
        recorded = torch.nn.utils.rnn.pad_sequence([x for group in groups for x in group.logprobs], batch_first=True)
        mask = self._padded(groups, lambda g, t: torch.ones_like(t)).bool()
        logprob = self._padded(groups, lambda g, t: self.policy.logprobs(g.task % PROMPTS, t))
        with torch.no_grad():
            at_version = self._padded(
                groups, lambda g, t: self.policy.logprobs(g.task % PROMPTS, t, self.tables[g.tag.version])
            )
        rewards = [r for group in groups for r in group.rewards]
        advantage = group_advantages(rewards, [group.task for group in groups for _ in group.rewards])
        loss = reinforce_zero_loss(self.guard.seal(logprob), recorded, mask, advantage).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.tables[self.guard.version] = self.policy.table.detach().clone()
        self.trained += [group.task for group in groups]
        return {"split": split(logprob, at_version, recorded, mask), "reward": sum(rewards) / len(rewards)}

    def state(self):
        return {
            "policy": {k: v.clone() for k, v in self.policy.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "tables": dict(self.tables),
            "trained": list(self.trained),
        }

    def restore(self, state):
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.tables, self.trained = dict(state["tables"]), list(state["trained"])
