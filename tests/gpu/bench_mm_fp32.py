"""Times bi_mm_fp32 against cuBLAS, its tiles against others, and mHC's projection by its number of splits, on one GPU.

    python tests/gpu/bench_mm_fp32.py [--tiles] [--quick] [--json FILE]

Each time is the median of replays of a CUDA graph of calls over rotating inputs, in microseconds a call. Every tile
is checked before it is timed: a row alone must have the bits of the row in the batch. --quick times the products and
their alternatives only, at four batches, in seconds, so that one short run can choose the table.
"""
import argparse
import contextlib
import functools
import json
import pathlib
import sys

import torch
import triton

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  tests/conftest.py makes the overlays importable without an installed engine
from graph_timing import median_us  # noqa: E402

from vllm.zero_mismatch import mhc, mm_fp32  # noqa: E402

SHAPES = {"indexer weights": (64, 4096), "router gate": (256, 4096), "indexer compressor": (512, 4096),
          "ratio-128 compressor": (1024, 4096), "ratio-4 compressor": (2048, 4096), "small lm_head": (8192, 4096),
          "lm_head": (129280, 4096)}
QUICK_SHAPES = ("router gate", "indexer compressor", "ratio-128 compressor", "ratio-4 compressor", "small lm_head")
BATCHES = (1, 16, 64, 256, 1024, 8192)
QUICK_BATCHES = (1, 64, 256, 8192)
# Alternatives by the largest N they are for: heights, BLOCK_N, BLOCK_K, slices, stages, rows of a warp.
TILES = ((1024, [((64, 128), 128, 64, 8, 4, 16), ((64, 128), 128, 64, 32, 4, 16), ((64, 128), 64, 64, 16, 4, 16),
                 ((64, 128), 64, 128, 16, 4, 16)]),
         (8192, [((64, 128), 128, 64, 4, 4, 16), ((64, 128), 128, 64, 16, 4, 16), ((64, 128), 128, 128, 4, 3, 16),
                 ((64, 128), 64, 64, 4, 4, 16)]),
         (2**31 - 1, [((64, 128), 128, 64, 1, 4, 16), ((128,), 128, 64, 1, 3, 16), ((64, 128), 256, 64, 1, 3, 16)]))
# Other settings of the shipped tile that leave the bits alone: slices together, slices apart, no early launch.
SETTINGS = {"together": {"_SPREAD": 0}, "apart": {"_SPREAD": 2**31 - 1},
            "no early launch": {"_early": lambda device: False}}
SPLITS = (1, 2, 4, 8, 16, 32, 64)
CALLS, REPLAYS = 50, 20


def microseconds(call, inputs) -> float:
    calls = CALLS if inputs[0].shape[0] < 1024 else CALLS // 5
    return round(median_us([functools.partial(call, value) for value in inputs], calls, REPLAYS), 2)


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
            other = "  ".join(f"{label} {us}" for label, us in row.get("other", {}).items())
            print(f"{name:21}{n:7}{m:6}  cuBLAS {row['cublas']:8.2f}  ours {row['ours']:8.2f}  "
                  f"ratio {row['ratio']:5.2f}  {other}", flush=True)
    return rows


def alternatives(inputs, weight) -> dict:
    m, n = inputs[0].shape[0], weight.shape[0]
    found = {}
    for tile in next(tiles for bound, tiles in TILES if n <= bound):
        with settings(_TILES_16BIT=((2**31 - 1, mm_fp32.Tile(*tile)),)):
            found["x".join(map(str, tile[1:]))] = timed(inputs, weight)
    if m <= 1024:
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
