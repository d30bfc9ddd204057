"""Times the deterministic Top-K against vLLM's own on one GPU, after checking every result bit for bit.

    python tests/gpu/bench_topk.py --out topk.json [--quick] [--variants all]

Each time is a CUDA graph of many calls that rotate over several inputs, replayed; the median per call, in microseconds.
Without vLLM's compiled kernels only our side is timed.
"""
import argparse
import functools
import importlib.util
import json
import multiprocessing
import pathlib
import statistics
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "overlays" / "vllm" / "vllm" / "zero_mismatch" / "topk.py"

# name: what to change in the module, and whether several CTAs share a row. "table" is what the module ships.
VARIANTS = {
    "table": ({}, True),
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
# phase, rows, length of each row, allocated width
SHAPES = [
    ("decode", 8, 8192, 8192), ("decode", 64, 32768, 32768), ("decode", 64, 131072, 131072),
    ("decode", 8, 8192, 131072), ("decode", 8, 131072, 131072), ("decode", 64, 800, 32768),
    ("decode", 256, 800, 32768), ("decode", 256, 8192, 32768), ("decode", 128, 32768, 32768),
    ("prefill", 2048, 8192, 8192), ("prefill", 512, 32768, 32768),
]
KS = (512, 1024, 2048)
USUAL = "table,one-cta,split2,split8,warps-,warps+,regs255"


def load_module():
    spec = importlib.util.spec_from_file_location("zero_mismatch_topk", SOURCE)
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


class Ours:
    def __init__(self, name, width=131072):
        constants, self.split = VARIANTS[name]
        self.module = load_module()
        for key, value in constants.items():
            setattr(self.module, key, value)
        self.scratch = torch.full(self.module.scratch_shape(width), -1, dtype=torch.int32, device="cuda")

    def __call__(self, logits, lengths, out):
        self.module.top_k(logits, lengths, out, self.scratch, split=self.split)

    def prefill(self, logits, lengths, out):
        self.module.top_k(logits, lengths, out, self.scratch, split=False)


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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(inputs[i % len(inputs)], lengths, out)
    times, spent = [], 0.0
    graph.replay()
    while len(times) < 5 or (spent < target_ms and len(times) < 50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
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
            for run in range(2):
                out = torch.full((rows, k), -7, dtype=torch.int32, device="cuda")
                call(x, lengths, out)
                wrong = out != reference(x, lengths, k)
                if wrong.any():
                    r, c = wrong.nonzero()[0].tolist()
                    failures.append(f"{name} {rows}x{width} k={k} {kind} run {run}: {int(wrong.sum())} differ, first "
                                    f"at ({r}, {c})")
    return failures


def compile_variant(name, k):
    """Fill Triton's disk cache from a process of its own, so that the variants compile side by side."""
    call = Ours(name)
    for width in (131072, 8192):
        x = torch.randn(3, width, device="cuda")
        for form in (call, call.prefill):
            form(x, lengths_of("decode", 3, width), torch.empty(3, k, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()


def stages(name, inputs, lengths, out, target_ms):
    """Time of the marking and of the selecting kernel alone (the other one is skipped; its scratch stays valid)."""

    class Skipped:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    times = {}
    for stage, skipped in (("mark", "_select_kernel"), ("select", "_mark_kernel")):
        call = Ours(name)
        call(inputs[0], lengths, out)
        setattr(call.module, skipped, Skipped())
        times[stage] = time_us(call, inputs[:1], lengths, out, target_ms)[0]
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--variants", default=USUAL, help="comma-separated names, or all: " + ", ".join(VARIANTS))
    parser.add_argument("--quick", action="store_true", help="K = 512 and 2048 only")
    parser.add_argument("--target-ms", type=float, default=15.0, help="GPU time spent on each cell")
    args = parser.parse_args()
    names = list(VARIANTS) if args.variants == "all" else args.variants.split(",")
    began = time.time()
    ks = KS if not args.quick else (KS[0], KS[-1])
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.starmap(compile_variant, [(name, k) for k in (KS[-1], KS[0]) for name in names], chunksize=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled in {time.time() - began:.0f} s")
    theirs = vllm_ops()
    reference = load_module().top_k_reference
    ours = {name: Ours(name) for name in names}
    failures = [f for name in names for f in check(ours[name], reference, name)]
    print("\n".join(failures) or f"{len(names)} variants equal the reference bit for bit")
    cells = []
    print(f"{'shape':32}{'vLLM':>8}" + "".join(f"{n:>10}" for n in names) + f"{'ratio':>8}{'mark':>7}{'select':>7}")
    for phase, rows, length, width in SHAPES:
        sets = max(2, min(16, (150 << 20) // (rows * width * 4)))
        inputs = [scores(rows, width, "normal", seed) for seed in range(sets)]
        lengths = lengths_of(phase, rows, length)
        for k in ks:
            out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
            cell = {"phase": phase, "rows": rows, "length": length, "width": width, "k": k}
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
            if names[0] == "table" and phase == "decode" and width > 8192:
                cell.update(stages("table", inputs, lengths, out, args.target_ms))
            best = min(cell[n] for n in names)
            cell["ratio"] = cell[names[0]] / cell["vllm_us"] if "vllm_us" in cell else None
            cell["best_ratio"] = best / cell["vllm_us"] if "vllm_us" in cell else None
            cells.append(cell)
            print(f"{phase:8}{rows:5}x{length:<7}w{width:<7}{k:4}{cell.get('vllm_us', 0):8.1f}"
                  + "".join(f"{cell[n]:10.1f}" for n in names) + f"{cell['ratio'] or 0:8.2f}"
                  + f"{cell.get('mark', 0):7.1f}{cell.get('select', 0):7.1f}", flush=True)
    args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                    "failures": failures, "cells": cells}, indent=1))
    print("\n".join(failures) or "no failures", f"{time.time() - began:.0f} s", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
