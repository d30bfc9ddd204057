"""Times bi_mm_fp32 against cuBLAS, its tiles against others, and mHC's projection by its number of splits, on one GPU.

    python tests/gpu/bench_mm_fp32.py [--tiles] [--json FILE]

Each time is the median of replays of a CUDA graph of 50 calls over rotating inputs, in microseconds a call. Every tile
is checked before it is timed: a row alone must have the bits of the row in the batch.
"""
import argparse
import functools
import json

import torch
from graph_timing import median_us

from vllm.zero_mismatch import mhc, mm_fp32

SHAPES = {"router gate": (256, 4096), "indexer compressor": (512, 4096), "ratio-128 compressor": (1024, 4096),
          "ratio-4 compressor": (2048, 4096), "lm_head": (129280, 4096)}
BATCHES = (1, 16, 64, 256, 1024, 8192)
# BLOCK_M, BLOCK_N, BLOCK_K, stages, warps
TILES = [(16, 16, 128, 6, 4), (16, 32, 128, 5, 4), (16, 32, 256, 3, 4), (16, 64, 128, 4, 4), (32, 32, 128, 4, 4),
         (64, 32, 64, 5, 4), (64, 32, 128, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 3, 4), (64, 128, 64, 4, 4),
         (128, 64, 64, 4, 4), (128, 128, 64, 4, 8)]
SPLITS = (1, 2, 4, 8, 16, 32, 64)
CALLS, REPLAYS = 50, 20


def microseconds(call, inputs) -> float:
    return round(median_us([functools.partial(call, value) for value in inputs], CALLS, REPLAYS), 2)


def check(x, weight) -> None:
    whole = mm_fp32.bi_mm_fp32(x, weight)
    for row in (0, x.shape[0] // 2, x.shape[0] - 1):
        alone = mm_fp32.bi_mm_fp32(x[row : row + 1], weight)[0]
        if not torch.equal(alone.view(torch.int32), whole[row].view(torch.int32)):
            raise SystemExit(f"row {row} of {tuple(x.shape)} x {tuple(weight.shape)} depends on the batch")


def products(all_tiles: bool) -> list[dict]:
    rows = []
    for name, (n, k) in SHAPES.items():
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for m in BATCHES:
            if m * n > 2**28:
                continue
            inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            row = {"what": name, "m": m, "n": n, "k": k}
            row["cublas"] = microseconds(lambda x, w=weight: torch.mm(x, w.T, out_dtype=torch.float32), inputs)
            check(inputs[0], weight)
            row["ours"] = microseconds(lambda x, w=weight: mm_fp32.bi_mm_fp32(x, w), inputs)
            row["ratio"] = round(row["ours"] / row["cublas"], 2)
            rows.append(row)
            if all_tiles:
                row["tiles"] = {str(tile): time_tile(tile, inputs, weight) for tile in TILES}
            print(json.dumps(row), flush=True)
    return rows


def time_tile(tile, inputs, weight) -> float:
    shipped = mm_fp32._TILES_16BIT
    mm_fp32._TILES_16BIT = ((2**31 - 1, *tile),)
    try:
        check(inputs[0], weight)
        return microseconds(lambda x: mm_fp32.bi_mm_fp32(x, weight), inputs)
    finally:
        mm_fp32._TILES_16BIT = shipped


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
    parser.add_argument("--json", metavar="FILE", help="write all rows there")
    options = parser.parse_args()
    rows = products(options.tiles) + projections()
    if options.json:
        with open(options.json, "w") as file:
            head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            json.dump({**head, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
