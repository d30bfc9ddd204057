"""Scores that are hard for a Top-K, the bitwise check, and vLLM's workspace manager where there is no vLLM; shared by
tests/kernels, tests/gpu and tests/upstream.
"""
import functools
import sys
import types

import torch

from vllm.zero_mismatch import topk, topk_cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")


def launchers():
    """What this machine can run: the kernel that `top_k` chooses, and Triton's where that is another."""
    return (topk.top_k, topk.triton_top_k) if topk_cuda.supports(torch.device(DEVICE)) else (topk.top_k,)


def select(logits, lengths, k, starts=None, next_n=1, split=False, slots=3, launch=topk.top_k):
    """Run the kernel with every buffer poisoned; returns [rows, k] int32."""
    rows, width = logits.shape
    out = torch.full((rows, k), -7, dtype=torch.int32, device=DEVICE)
    scratch = torch.full((slots, topk.scratch_shape(width)[1]), -1, dtype=torch.int32, device=DEVICE)
    return launch(logits, lengths, out, scratch, starts=starts, next_n=next_n, split=split)


def as_lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_same_bits(got, want, what=""):
    different = got != want
    if different.any():
        at = tuple(different.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(different.sum())} of {got.numel()} differ, first at {at}: "
                             f"{int(got[at])} instead of {int(want[at])}")


def check(logits, lengths, k, what="", **layout):
    want = topk.top_k_reference(logits, lengths, k, layout.get("starts"), layout.get("next_n", 1))
    for launch in launchers():
        for split in (False, True) if DEVICE == "cuda" or logits.shape[1] > topk._cap(k) else (False,):
            got = select(logits, lengths, k, split=split, launch=launch, **layout)
            assert_same_bits(got, want, f"{what} {launch.__name__} split={split}")
    return want


@functools.cache
def _generator():
    return torch.Generator().manual_seed(11)


def normal(*shape):
    return torch.randn(*shape, generator=_generator()).to(DEVICE)


def one_coarse_bin(n):  # vllm #51782: one bin of a half-precision histogram holds every score
    return 100 + normal(n) / 1000


def plateau(n):  # sglang PR 31115: the K-th score is one of thousands of equal ones
    return torch.where(normal(n) > 2.3, normal(n).abs() + 1, 0.5)


SCORES = {
    "normal": normal,
    "recent positions score higher": lambda n: normal(n) + torch.linspace(0, 6, n, device=DEVICE),
    "all equal": lambda n: torch.full((n,), 0.25, device=DEVICE),
    "one coarse bin": one_coarse_bin,
    "plateau at the threshold": plateau,
    "quantised to bf16": lambda n: normal(n).bfloat16().float(),
    "three values": lambda n: normal(n).round().clamp(-1, 1),
    "both zeros": lambda n: torch.where(normal(n) > 0, 0.0, -0.0),
    "subnormal": lambda n: normal(n) * 1e-41,
    "mostly -inf": lambda n: torch.where(normal(n) > 1.2, normal(n), -INF),
    "all -inf": lambda n: torch.full((n,), -INF, device=DEVICE),
    "some +inf": lambda n: torch.where(normal(n) > 2, INF, normal(n)),
    "some NaN": lambda n: torch.where(normal(n) > 1.5, NAN, normal(n)),
    "all NaN": lambda n: torch.full((n,), NAN, device=DEVICE),
    "outlier": lambda n: normal(n) + 1e30 * (torch.arange(n, device=DEVICE) == n // 3),
    "wide range": lambda n: torch.exp(6 * normal(n)) * normal(n).sign(),
    "sorted ascending": lambda n: normal(n).sort().values,
    "sorted descending": lambda n: normal(n).sort(descending=True).values,
}


def sampled_columns(n):
    """The columns that `_sampled_score` looks at in a row of n scores."""
    size = topk._sample_size(n)
    index = torch.arange(size, device=DEVICE)
    return (index * 1024 + ((index * 40503 >> 4) & 1023)) * n // (size * 1024)


def misleading(n, high):
    """Scores whose sample holds all the best (high) or none of the good ones: the list runs short or overflows."""
    scores = normal(n) - 100 if high else normal(n).abs() + 100
    scores[sampled_columns(n)] = normal(topk._sample_size(n)).abs() * (1 if high else -1)
    return scores


class _Workspaces:
    """vLLM's workspace manager: named objects that stay, and views of one buffer."""

    def __init__(self):
        self.resources = {}

    def get_persistent_resource(self, key, factory):
        return self.resources.setdefault(key, factory())

    def get_simultaneous(self, *specs):
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in specs]


def stub_workspaces(monkeypatch, slots):
    """Put a manager where `indexer_topk` looks for vLLM's, with `slots` rows in flight. Returns it."""
    manager = _Workspaces()
    module = types.ModuleType("vllm.v1.worker.workspace")
    module.current_workspace_manager = lambda: manager
    for name in ("vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.workspace", module)
    monkeypatch.setattr(topk, "SLOTS", slots)
    return manager
