"""Times bi_mm_fp32 against cuBLAS, its tiles against others, and mHC's projection by its number of splits, on one GPU.

    python tests/gpu/bench_mm_fp32.py [--tiles] [--quick] [--json FILE]

Each time is the median of replays of a CUDA graph of calls over rotating inputs, in microseconds a call. Every tile
is checked before it is timed: a row alone must have the bits of the row in the batch. --quick times the products and
their alternatives only, at four batches, in seconds, so that one short run can choose the table.
"""
import argparse
import contextlib
import json
import statistics

import torch
import triton

from vllm.zero_mismatch import mhc, mm_fp32

SHAPES = {"indexer weights": (64, 4096), "router gate": (256, 4096), "indexer compressor": (512, 4096),
          "ratio-128 compressor": (1024, 4096), "ratio-4 compressor": (2048, 4096), "lm_head": (129280, 4096)}
QUICK_SHAPES = ("indexer compressor", "ratio-128 compressor", "ratio-4 compressor", "lm_head")
BATCHES = (1, 16, 64, 256, 1024, 8192)
QUICK_BATCHES = (1, 64, 256, 8192)
# Alternatives by the largest N they are for: BLOCK_M, BLOCK_N, BLOCK_K, slices, stages, warps.
TILES = ((512, [(128, 128, 64, 8, 4, 8), (128, 64, 64, 8, 4, 4), (64, 64, 64, 8, 4, 4), (64, 128, 64, 8, 4, 4)]),
         (8192, [(128, 128, 64, 4, 4, 8), (128, 128, 128, 8, 3, 8), (128, 64, 64, 8, 4, 4), (64, 128, 64, 8, 4, 4)]),
         (2**31 - 1, [(128, 128, 64, 1, 3, 8), (128, 256, 64, 1, 3, 8), (128, 64, 64, 1, 4, 4)]))
# Other settings of the shipped tile that leave the bits alone: slices together, slices apart, no early launch.
SETTINGS = {"together": {"_SPREAD": 0}, "apart": {"_SPREAD": 2**31 - 1},
            "no early launch": {"_early": lambda device: False}}
SPLITS = (1, 2, 4, 8, 16, 32, 64)
CALLS, REPLAYS = 50, 20


def microseconds(call, inputs) -> float:
    for value in inputs:
        call(value)
    calls = CALLS if inputs[0].shape[0] < 1024 else CALLS // 5
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(inputs[number % len(inputs)])
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return round(statistics.median(times), 2)


def check(x, weight) -> None:
    whole = mm_fp32.bi_mm_fp32(x, weight)
    for row in (0, x.shape[0] // 2, x.shape[0] - 1):
        alone = mm_fp32.bi_mm_fp32(x[row : row + 1], weight)[0]
        if not torch.equal(alone.view(torch.int32), whole[row].view(torch.int32)):
            raise SystemExit(f"row {row} of {tuple(x.shape)} x {tuple(weight.shape)} depends on the batch")


@contextlib.contextmanager
def settings(**values):
    shipped = {name: getattr(mm_fp32, name) for name in values}
    for name, value in values.items():
        setattr(mm_fp32, name, value)
    try:
        yield
    finally:
        for name, value in shipped.items():
            setattr(mm_fp32, name, value)


def products(all_tiles: bool, quick: bool) -> list[dict]:
    rows = []
    for name in QUICK_SHAPES if quick else SHAPES:
        n, k = SHAPES[name]
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for m in QUICK_BATCHES if quick else BATCHES:
            if m * n > 2**28:
                continue
            inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            row = {"what": name, "m": m, "n": n, "k": k}
            row["cublas"] = microseconds(lambda x, w=weight: torch.mm(x, w.T, out_dtype=torch.float32), inputs)
            check(inputs[0], weight)
            row["ours"] = microseconds(lambda x, w=weight: mm_fp32.bi_mm_fp32(x, w), inputs)
            row["ratio"] = round(row["ours"] / row["cublas"], 2)
            rows.append(row)
            if all_tiles or quick:
                row["other"] = alternatives(inputs, weight)
            print(json.dumps(row), flush=True)
    return rows


def alternatives(inputs, weight) -> dict:
    m, n = inputs[0].shape[0], weight.shape[0]
    found = {}
    for tile in next(tiles for bound, tiles in TILES if n <= bound):
        with settings(_TILES_16BIT=((2**31 - 1, mm_fp32.Tile(*tile)),)):
            found["x".join(map(str, tile))] = timed(inputs, weight)
    if mm_fp32._tile(n, weight.dtype, weight.dtype)[1].slices > 1 and m <= 1024:
        for name, values in SETTINGS.items():
            with settings(**values):
                found[name] = timed(inputs, weight)
    return found


def timed(inputs, weight) -> float | str:
    try:
        check(inputs[0], weight)
        return microseconds(lambda x: mm_fp32.bi_mm_fp32(x, weight), inputs)
    except triton.runtime.errors.OutOfResources as error:
        return str(error)


def projections() -> list[dict]:
    """DeepGEMM's mHC projection by the number of splits, without the epilogue that adds them up."""
    from vllm.utils.deep_gemm import tf32_hc_prenorm_gemm

    rows = []
    for k in (4096, 16384):
        fn = torch.randn(24, k, device="cuda")
        for tokens in BATCHES:
            inputs = [torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            row = {"what": "mHC projection", "tokens": tokens, "k": k, "shipped": mhc.fixed_split(k, 64), "splits": {}}
            for splits in SPLITS:
                out = torch.empty(splits, tokens, 24, device="cuda")
                square = torch.empty(splits, tokens, device="cuda")
                row["splits"][splits] = microseconds(
                    lambda x, f=fn, o=out, q=square, s=splits: tf32_hc_prenorm_gemm(x, f, o, q, s), inputs
                )
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="time every tile of TILES too")
    parser.add_argument("--quick", action="store_true", help="the products and their alternatives at four batches only")
    parser.add_argument("--json", metavar="FILE", help="write all rows there")
    options = parser.parse_args()
    rows = products(options.tiles, options.quick)
    if not options.quick:
        rows += projections()
    if options.json:
        with open(options.json, "w") as file:
            head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            json.dump({**head, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
