"""The CUDA Top-K against the PyTorch reference: on a GPU, else with its threads run one by one on the CPU."""
import ctypes
import functools
import sys
import types

import pytest
import torch
import topk_emulated as emulated
from topk_cases import DEVICE, INF, NAN, SCORES, as_lengths, assert_same_bits, normal

from vllm.zero_mismatch import topk, topk_cuda

ON_GPU = topk_cuda.supports(torch.device(DEVICE))
pytestmark = pytest.mark.skipif(not ON_GPU and (DEVICE == "cuda" or emulated.compiler() is None),
                                reason="needs a GPU with clusters (SM90), or no GPU and g++ or clang++")
cpu_only = pytest.mark.skipif(DEVICE == "cuda", reason="looks at what only the CPU's stand-ins show")

# Few threads and keys, so that short rows take the paths of long ones: several spans a part, several parts a row.
SMALL = {"THREADS": 64, "KEYS": 8, "PART": 512, "RESIDENT": 1, "LISTED": 128}


def on_gpu(logits, lengths, out, starts, next_n, cluster, settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_cuda, "SETTINGS", topk_cuda.SETTINGS | settings)
        patch.setattr(topk_cuda, "_kernels", kernels_of(tuple(sorted(settings.items()))))
        patch.setattr(topk_cuda, "_cluster", lambda rows, width, split: cluster)
        topk_cuda.top_k(logits, lengths, out, starts, next_n)


@functools.cache
def kernels_of(_settings):  # each with a cache of its own
    return functools.cache(topk_cuda._kernels.__wrapped__)


def run(logits, lengths, k, starts=None, next_n=1, cluster=1, seed=0, **settings):
    out = torch.full((logits.shape[0], k), -7, dtype=torch.int32, device=DEVICE)
    if ON_GPU:
        on_gpu(logits, lengths, out, starts, next_n, cluster, settings)
    else:
        emulated.top_k(logits, lengths, out, starts, next_n, cluster, seed, **settings)
    return out


def check(logits, lengths, k, what="", starts=None, next_n=1, clusters=topk_cuda.CLUSTERS, **settings):
    want = topk.top_k_reference(logits, lengths, k, starts, next_n)
    for cluster in clusters:
        got = run(logits, lengths, k, starts, next_n, cluster, seed=cluster, **(settings or SMALL))
        assert_same_bits(got, want, f"{what} {cluster} CTAs a row")
    return want


@cpu_only
def test_the_kernel_compiles_without_warnings():
    assert emulated.warnings(**topk_cuda.SETTINGS) == ""


@pytest.mark.parametrize("kind", SCORES)
def test_equals_the_sorted_composite_key(kind):
    for n, k in ((700, 512), (6000, 512), (9001, 2048)):
        chosen = check(SCORES[kind](n)[None], as_lengths(n), k, f"{kind} {n} {k}")
        assert bool((chosen[:, 1:] < chosen[:, :-1]).all()), "descending"


@pytest.mark.parametrize("n", [0, 1, 2, 31, 511, 512, 513, 514, 1023, 1024, 1025, 2047, 2049, 4097])
def test_every_length_around_the_edges(n):
    logits = normal(2, max(n, 1) + 3)
    logits[:, n:] = NAN
    for k in (512, 37):
        chosen = check(logits, as_lengths(n, max(n - 1, 0)), k, f"n={n}")
        assert int((chosen[0] >= 0).sum()) == min(n, k) and bool((chosen[0, min(n, k):] == -1).all()), "-1 last"


@pytest.mark.parametrize("kind", ["normal", "quantised to bf16", "all equal"])
def test_the_settings_it_ships_with(kind):
    for n, cluster in ((9000, 1), (8192, 2), (20000, 4)):
        check(SCORES[kind](n)[None], as_lengths(n), 512, kind, clusters=(cluster,), **topk_cuda.SETTINGS)


def test_longest_row():
    for kind in ("normal", "plateau at the threshold"):
        check(SCORES[kind](131072)[None], as_lengths(131072), 2048, kind, clusters=(8,))


def test_ties_go_to_the_larger_position():
    logits = torch.zeros(1, 1000, device=DEVICE)
    logits[0, 3] = 1.0
    assert check(logits, as_lengths(1000), 512)[0].tolist() == [*range(999, 488, -1), 3]


def test_nan_ranks_first_whatever_its_bits_and_minus_zero_equals_zero():
    logits = torch.full((1, 600), -1.0, device=DEVICE)
    bits = logits.view(torch.int32)
    bits[0, 10], bits[0, 20], bits[0, 30] = 0x7FC00001, -0x400000, 0x7F800001  # quiet, negative, signalling
    logits[0, 40], logits[0, 50], logits[0, 60] = INF, 0.0, -0.0
    want = {1: [30], 2: [30, 20], 4: [40, 30, 20, 10], 5: [60, 40, 30, 20, 10]}
    for k, positions in want.items():
        assert check(logits, as_lengths(600), k)[0].tolist() == positions


def test_any_number_of_equal_scores_at_the_threshold():
    """Around the size up to which pairs are compared with each other, and where they cross parts of a row."""
    for ties in (2, 63, 64, 65, 66, 700):
        for wanted in (1, ties // 2, ties - 1, ties):
            logits = -normal(1, 3000).abs() - 1
            logits[0, torch.randperm(3000, generator=torch.Generator().manual_seed(ties))[:ties]] = 0.5
            check(logits, as_lengths(3000), wanted, f"{wanted} of {ties} ties")


def test_nearly_equal_scores_differ_in_every_digit_of_the_key():
    for shift in (0, 7, 8, 9, 19, 20, 21):
        steps = torch.arange(3000).flip(0)[None] % 1500
        logits = (0x3F000000 + (steps << shift) % 0x40000000).int().view(torch.float32).to(DEVICE)
        check(logits, as_lengths(3000), 600, f"bit {shift}")


def test_row_does_not_see_its_neighbours_or_its_padding():
    n, k = 2001, 512
    row = normal(n)
    alone = topk.top_k_reference(row[None], as_lengths(n), k)[0]
    for poison in (NAN, INF, -INF, 3e38):
        crowd = torch.full((5, 3000), poison, device=DEVICE)
        crowd[3, :n] = row
        assert_same_bits(check(crowd, as_lengths(3000, 0, 400, n, 2000), k)[3], alone, f"poison {poison}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_need_no_alignment(dtype):
    """Vector loads begin at the aligned address before the row and may not leave the tensor."""
    for columns in (2001, 2002, 2003, 2004):
        logits = normal(4, columns).to(dtype)
        check(logits, as_lengths(columns, columns - 1, 1900, 600), 512, f"{columns} columns")
        check(logits[:, 1:], as_lengths(columns - 1, 1999, 7, 600), 512, f"{columns} columns from the second on")


def test_bounds_are_relative_to_the_request():
    logits = normal(4, 6000)
    check(logits, as_lengths(6000, 5, 5000, 5900), 512, starts=as_lengths(0, 5, 2345, 5001))


def test_draft_rows_share_one_length():
    check(normal(6, 2100), as_lengths(2050, 1), 512, next_n=3)


def test_the_order_of_threads_changes_nothing():
    """vllm PR #55122: stock vLLM's slots go to the threads that come first. BF16 scores tie at the K-th."""
    logits, lengths = normal(2, 5000).bfloat16().float(), as_lengths(5000, 4000)
    first = None
    for seed in range(8):
        out = run(logits, lengths, 600, cluster=4, seed=seed, **SMALL)
        first = out if first is None else first
        assert_same_bits(out, first, f"seed {seed}")


@pytest.mark.parametrize("settings", [
    {"THREADS": 64, "KEYS": 4, "PART": 256}, {"THREADS": 128, "KEYS": 4, "PART": 300},
    {"THREADS": 64, "KEYS": 32, "PART": 4096}, {"THREADS": 1024, "KEYS": 8, "PART": 2048},
])
def test_settings_change_nothing(settings):
    check(SCORES["quantised to bf16"](5003)[None], as_lengths(5003), 600, str(settings), clusters=(1, 4), **settings)


def test_more_ctas_for_long_rows_fewer_for_many():
    part = topk_cuda.SETTINGS["PART"]
    assert topk_cuda._cluster(8, part, True) == 1
    assert topk_cuda._cluster(8, part + 1, True) == 2
    assert topk_cuda._cluster(8, 131072, True) == 8
    assert topk_cuda._cluster(64, 131072, True) == 2
    assert topk_cuda._cluster(256, 131072, True) == 1
    assert topk_cuda._cluster(4096, 131072, True) == 1
    assert topk_cuda._cluster(4096, 131072, False) == 8


@pytest.mark.parametrize("kind,hip,capability,supported", [
    ("cuda", None, (9, 0), True), ("cuda", None, (10, 3), True), ("cuda", None, (8, 9), False),
    ("cuda", "6.4", (9, 4), False), ("cpu", None, None, False),
])
def test_the_gpu_alone_decides_who_runs_it(kind, hip, capability, supported, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert topk_cuda.supports.__wrapped__(torch.device(kind)) is supported


@cpu_only
def test_a_gpu_without_the_compiler_is_an_error_that_names_the_remedy(monkeypatch):
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    with pytest.raises(RuntimeError, match="pip install cuda-bindings"):
        topk_cuda.prepare(torch.device("cuda", 0))


class _Driver(types.ModuleType):
    """Stands for cuda.bindings.driver: takes the arguments of a launch as the driver would."""

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.launches = []

    def cuLaunchKernel(self, *args):
        *shape, parameters, extra = args
        argument = ctypes.c_void_p.from_address(parameters).value
        packed = ctypes.string_at(argument, topk_cuda.ARGUMENTS.size)
        self.launches.append((*shape, topk_cuda.ARGUMENTS.unpack(packed), extra))
        return (0,)


@cpu_only
def test_one_launch_with_the_arguments_of_the_kernel(monkeypatch):
    driver = _Driver()
    package = types.ModuleType("cuda.bindings")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setattr(topk_cuda, "_kernels", lambda index, bf16: {c: (c, bf16) for c in topk_cuda.CLUSTERS})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=77))
    logits, out = torch.empty(6, 20000)[:, :19000], torch.empty(6, 600, dtype=torch.int32)[:, :512]
    lengths = as_lengths(5, 6)
    topk_cuda.top_k(logits, lengths, out, None, 3, True)
    topk_cuda.top_k(logits[:0], lengths[:0], out[:0])
    (kernel, *shape, shared, stream, values, extra), = driver.launches
    assert kernel == (4, False) and shape == [24, 1, 1, topk_cuda.SETTINGS["THREADS"], 1, 1]
    assert (shared, stream, extra) == (0, 77, 0)
    assert values == (logits.data_ptr(), 0, lengths.data_ptr(), out.data_ptr(), 20000, 600, 19000, 512, 3)


def test_a_row_longer_than_two_digits_of_position_is_refused():
    with pytest.raises(ValueError, match="expected at most"):
        topk_cuda.top_k(torch.empty(1, 1).expand(1, topk_cuda.MAX_WIDTH + 1), torch.ones(1, dtype=torch.int32),
                        torch.empty(1, 8, dtype=torch.int32))
