"""Times the deterministic Top-K against vLLM's own on one GPU, after checking every result bit for bit.

    python tests/gpu/bench_topk.py --out topk.json [--quick] [--variants all]

Each time is a CUDA graph of many calls that rotate over several inputs, replayed; the median per call, in microseconds.
Without vLLM's compiled kernels only our side is timed. Each variant is first compiled and checked in a process of its
own, with a deadline: one that fails, crashes or hangs is reported and left out.
"""
import argparse
import functools
import importlib.util
import json
import multiprocessing
import pathlib
import queue
import statistics
import sys
import time

import torch
from graph_timing import capture, replay_us

OVERLAY = pathlib.Path(__file__).resolve().parents[2] / "overlays" / "vllm" / "vllm" / "zero_mismatch"
DEADLINE_S = 100

# The CUDA kernel. name: settings to change, and the CTAs of a row, else as `_cluster` decides. "cuda" is what ships.
CUDA_VARIANTS = {
    "cuda": ({}, None),
    "c1": ({}, 1),
    "c2": ({}, 2),
    "c4": ({}, 4),
    "c8": ({}, 8),
    "p2k": ({"PART": 2048}, None),
    "p4k": ({"PART": 4096}, None),
    "t1024": ({"THREADS": 1024, "KEYS": 8}, None),
    "t1024p4k": ({"THREADS": 1024, "KEYS": 8, "PART": 4096}, None),
    "t1024k16": ({"THREADS": 1024, "KEYS": 16, "RESIDENT": 1, "PART": 16384}, None),
    "t256": ({"THREADS": 256, "KEYS": 16, "RESIDENT": 4, "PART": 4096}, None),
    "t256k32": ({"THREADS": 256, "KEYS": 32, "RESIDENT": 2}, None),
    "t256k32r3": ({"THREADS": 256, "KEYS": 32, "RESIDENT": 3}, None),
    "k8": ({"THREADS": 512, "KEYS": 8, "RESIDENT": 3, "PART": 4096}, None),
    "r3": ({"RESIDENT": 3}, None),
    "l64": ({"LISTED": 64}, None),
}
# Triton's. name: what to change in the module, and whether several CTAs share a row. "triton" is what ships.
TRITON_VARIANTS = {
    "triton": ({}, True),
    "one-cta": ({}, False),
    "split2": ({"_split_size": lambda width: -(-width // 8192) * 4096}, True),
    "split8": ({"_split_size": lambda width: -(-width // 32768) * 4096}, True),
    "warps-": ({"_select_options": lambda cap: {"num_warps": cap // 1024}}, True),
    "warps+": ({"_select_options": lambda cap: {"num_warps": cap // 256}}, True),
    "regs255": ({"_select_options": lambda cap: {"num_warps": cap // 512}}, True),
    "regs80": ({"_select_options": lambda cap: {"num_warps": cap // 512, "maxnreg": 80}}, True),
    "tile8k": ({"TILE": 8192, "MARK_WARPS": 16}, True),
    "cap8k": ({"_cap": lambda k: 8192}, True),
}
VARIANTS = CUDA_VARIANTS | TRITON_VARIANTS
# phase, rows, length of each row, allocated width, scores
SHAPES = [
    ("decode", 8, 8192, 8192, "normal"), ("decode", 64, 32768, 32768, "normal"),
    ("decode", 64, 131072, 131072, "normal"), ("decode", 8, 8192, 131072, "normal"),
    ("decode", 8, 131072, 131072, "normal"), ("decode", 64, 800, 32768, "normal"),
    ("decode", 256, 800, 32768, "normal"), ("decode", 256, 8192, 32768, "normal"),
    ("decode", 128, 32768, 32768, "normal"), ("prefill", 2048, 8192, 8192, "normal"),
    ("prefill", 512, 32768, 32768, "normal"), ("decode", 64, 32768, 32768, "recent"),
    ("decode", 64, 32768, 32768, "bf16"), ("decode", 64, 32768, 32768, "narrow"),
]
KS = (512, 1024, 2048)
TARGETS = 3  # the first shapes, which with the smallest and the largest K have a bound on their time: 1.5 times vLLM's
USUAL = ",".join([*CUDA_VARIANTS, "triton"])


def load_module(name="topk"):
    spec = importlib.util.spec_from_file_location(f"zero_mismatch_{name}", OVERLAY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scores(rows, width, kind, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, width, device="cuda", generator=generator)
    if kind == "recent":  # newer positions score higher: candidates crowd in the last part of the row
        x += torch.linspace(0, 4, width, device="cuda")
    if kind == "bf16":  # many ties
        x = x.bfloat16().float()
    if kind == "narrow":  # one coarse bin of a half-precision histogram holds everything
        x = 100 + x / 1000
    return x


def lengths_of(phase, rows, length):
    if phase == "prefill":  # a causal chunk: the rows of one request, the last one longest
        return torch.arange(length - rows + 1, length + 1, dtype=torch.int32, device="cuda").clamp_(min=1)
    return torch.full((rows,), length, dtype=torch.int32, device="cuda")


class Triton:
    def __init__(self, name, width=131072):
        constants, self.split = TRITON_VARIANTS[name]
        self.module = load_module()
        for key, value in constants.items():
            setattr(self.module, key, value)
        self.scratch = torch.full(self.module.scratch_shape(width), -1, dtype=torch.int32, device="cuda")

    def __call__(self, logits, lengths, out):
        self.module.triton_top_k(logits, lengths, out, self.scratch, split=self.split)

    def prefill(self, logits, lengths, out):
        self.module.triton_top_k(logits, lengths, out, self.scratch, split=False)


class Cuda:
    def __init__(self, name):
        settings, cluster = CUDA_VARIANTS[name]
        self.module = load_module("topk_cuda")
        self.module.SETTINGS |= settings
        if cluster:
            self.module._cluster = lambda rows, width, split: cluster
        self.module.prepare(torch.device("cuda", 0))

    def __call__(self, logits, lengths, out):
        self.module.top_k(logits, lengths, out, split=True)

    def prefill(self, logits, lengths, out):
        self.module.top_k(logits, lengths, out, split=False)


def variant(name):
    return Cuda(name) if name in CUDA_VARIANTS else Triton(name)


def vllm_ops():
    """vLLM's own kernels, as its dispatcher picks them on SM90: {name: (accepts(phase, rows), call)}.

    The call's last argument is the longest row of the batch, which upstream knows on the host.
    """
    try:
        import vllm._custom_ops  # noqa: F401  loads the compiled kernels
    except ImportError as error:
        print(f"vLLM's kernels are missing ({error}): timing our side only")
        return {}
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    ops = torch.ops._C

    def prefill(x, n, out, longest):
        ops.top_k_per_row_prefill(x, torch.zeros_like(n), n, out, x.shape[0], x.stride(0), x.stride(1), out.shape[1])

    return {
        "cooperative": (lambda phase, rows: phase == "decode" and rows <= 64,
                        lambda x, n, out, longest: ops.cooperative_topk(x, n, out, workspace, out.shape[1], longest)),
        "persistent": (lambda phase, rows: phase == "decode" and rows > 64,
                       lambda x, n, out, longest: ops.persistent_topk(x, n, out, workspace, out.shape[1], longest)),
        "per_row_prefill": (lambda phase, rows: phase == "prefill", prefill),
    }


def time_us(call, inputs, lengths, out, target_ms):
    for x in inputs[:2]:
        call(x, lengths, out)
    torch.cuda.synchronize()
    calls = max(len(inputs), 20)
    graph = capture([functools.partial(call, x, lengths, out) for x in inputs], calls)
    times, spent = [], 0.0
    graph.replay()
    while len(times) < 5 or (spent < target_ms and len(times) < 50):
        times.append(replay_us(graph, calls))
        spent += times[-1] * calls / 1000
    return statistics.median(times), min(times)


def check(call, reference, name):
    """Bitwise against the sort, over scores that are hard for histograms and for samples. Returns the failures."""
    failures = []
    for rows, width, k in ((4, 800, 512), (5, 8192, 2048), (5, 8193, 512), (6, 40000, 1024), (3, 131072, 2048)):
        for kind in ("normal", "recent", "bf16", "narrow"):
            x = scores(rows, width, kind, seed=width + k)
            x[0] = 1.0  # one plateau
            x[1, ::3] = float("-inf")
            x[2, ::5] = float("nan")
            lengths = torch.tensor([width - 7 * r for r in range(rows)], dtype=torch.int32, device="cuda")
            x[torch.arange(width, device="cuda") >= lengths[:, None]] = float("nan")
            for form in (call, call.prefill):
                out = torch.full((rows, k), -7, dtype=torch.int32, device="cuda")
                form(x, lengths, out)
                wrong = out != reference(x, lengths, k)
                if wrong.any():
                    r, c = wrong.nonzero()[0].tolist()
                    failures.append(f"{name} {rows}x{width} k={k} {kind}: {int(wrong.sum())} differ, first at "
                                    f"({r}, {c}): {int(out[r, c])}")
    return failures


def vet(name, answers):
    """In a process of its own: compile, which leaves the result in a cache on the disk, and check."""
    try:
        failures = check(variant(name), load_module().top_k_reference, name)
    except Exception as error:  # any failure of a variant is this function's answer
        failures = [f"{name}: {type(error).__name__}: {error}"]
    answers.put((name, failures))


def vet_all(names):
    """Returns {name: failures}."""
    context = multiprocessing.get_context("spawn")
    answers, results = context.Queue(), {}
    workers = {name: context.Process(target=vet, args=(name, answers)) for name in names}
    for worker in workers.values():
        worker.start()
    deadline = time.time() + DEADLINE_S
    while len(results) < len(names) and time.time() < deadline:
        try:
            name, failures = answers.get(timeout=1)
            results[name] = failures
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers.values()):
                break
    for name, worker in workers.items():
        if name not in results:
            ended = "crashed" if worker.exitcode is not None else f"did not end within {DEADLINE_S} s"
            results[name] = [f"{name}: {ended}"]
            worker.kill()
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--variants", default=USUAL, help="comma-separated names, or all: " + ", ".join(VARIANTS))
    parser.add_argument("--quick", action="store_true", help="only the shapes and K that have a bound on their time")
    parser.add_argument("--target-ms", type=float, default=15.0, help="GPU time spent on each cell")
    args = parser.parse_args()
    names = list(VARIANTS) if args.variants == "all" else args.variants.split(",")
    began = time.time()
    vetted = vet_all(names)
    failures = [failure for name in names for failure in vetted[name][:3]]
    names = [name for name in names if not vetted[name]]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled and checked in "
          f"{time.time() - began:.0f} s", *failures, f"equal the reference bit for bit: {', '.join(names)}", sep="\n")
    theirs = vllm_ops()
    reference = load_module().top_k_reference
    ours = {name: variant(name) for name in names}
    cells = []
    print(f"{'shape':37}{'vLLM':>8}" + "".join(f"{n:>9}" for n in names) + f"{'ratio':>8}")
    for phase, rows, length, width, kind in SHAPES[:TARGETS] if args.quick else SHAPES:
        sets = max(2, min(16, (150 << 20) // (rows * width * 4)))
        inputs = [scores(rows, width, kind, seed) for seed in range(sets)]
        lengths = lengths_of(phase, rows, length)
        for k in KS if not args.quick else (KS[0], KS[-1]):
            out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
            cell = {"phase": phase, "rows": rows, "length": length, "width": width, "k": k, "scores": kind}
            wanted = reference(inputs[0][:64], lengths[:64], k)
            for op, (accepts, call) in theirs.items():
                if accepts(phase, rows):
                    call = functools.partial(call, longest=length)
                    cell["vllm_op"] = op
                    cell["vllm_us"], cell["vllm_min_us"] = time_us(call, inputs, lengths, out, args.target_ms)
                    call(inputs[0], lengths, out)
                    same = out[:64].sort(1, descending=True).values == wanted
                    cell["vllm_rows_with_another_set"] = int((~same.all(1)).sum())
            for name in names:
                call = ours[name] if phase == "decode" else ours[name].prefill
                out.fill_(-7)
                call(inputs[0], lengths, out)
                if not torch.equal(out[:64], wanted):
                    failures.append(f"{name} {cell}: {int((out[:64] != wanted).sum())} differ")
                cell[name], cell[name + "_min"] = time_us(call, inputs, lengths, out, args.target_ms)
            cell["ratio"] = cell[names[0]] / cell["vllm_us"] if "vllm_us" in cell else None
            cells.append(cell)
            print(f"{phase:8}{rows:5}x{length:<7}w{width:<7}{k:4} {kind[:4]}{cell.get('vllm_us', 0):8.1f}"
                  + "".join(f"{cell[n]:9.1f}" for n in names) + f"{cell['ratio'] or 0:8.2f}", flush=True)
            args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                            "failures": failures, "cells": cells}, indent=1))
    print("\n".join(failures) or "no failures", f"{time.time() - began:.0f} s", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
