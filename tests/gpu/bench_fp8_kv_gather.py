"""Times decode attention through the gather on one GPU: bytes moved against the roofline, beside upstream's own decode.

    python tests/gpu/bench_fp8_kv_gather.py --out gather.json [--bandwidth 4.8e12]

Every time is the median of replays of a CUDA graph that calls one thing over fresh caches, in microseconds. The gather
reads one record and writes one BF16 row for each selected row; the roofline is those bytes at the memory's bandwidth.
"""
import argparse
import json
import pathlib
import sys

import torch

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "kernels"), str(TESTS / "gpu")]
import conftest  # noqa: E402, F401  tests/conftest.py makes the overlays importable without an installed engine
from flashmla_cases import attend, queries, stock_decode  # noqa: E402
from graph_timing import median_us  # noqa: E402
from kv_scene import HEAD_DIM, Scene  # noqa: E402

from vllm.zero_mismatch.fp8_kv_gather import RECORDS, gather  # noqa: E402

# name -> (kind of layer, top-k width): DeepSeek-V4's layers, at the tiny model's index_topk and at the largest
LAYERS = {"sliding": ("sliding", 0), "csa-512": ("csa", 512), "csa-2048": ("csa", 2048), "hca-128": ("hca", 128)}
TOKENS = (64, 256)
POSITION = 9000  # past the point where the 2048-row top-k is full


def microseconds(call) -> float:
    return median_us([call], count=4, replays=15)


def scene(name: str) -> Scene:
    kind, top_k = LAYERS[name]
    tokens = max(TOKENS)
    positions, owner = [POSITION + t for t in range(tokens)], [t % 64 for t in range(tokens)]
    return Scene(RECORDS[584], kind, positions, owner=owner, device="cuda", top_k=top_k)


def measure(name: str, case: Scene, bandwidth: float) -> dict:
    tokens = len(case.positions)
    q, sink = queries(tokens)
    rows = torch.empty(tokens, case.width, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    indices = torch.empty(tokens, case.width, dtype=torch.int32, device="cuda")
    lengths = torch.empty(tokens, dtype=torch.int32, device="cuda")
    step = case.step()
    gather_us = microseconds(lambda: gather(rows, indices, lengths, *step))
    moved = int(lengths.sum()) * (case.record.data_bytes + case.record.scale_bytes + 2 * HEAD_DIM) + indices.nbytes
    roofline_us = moved / bandwidth * 1e6
    return {
        "layer": name, "tokens": tokens, "rows": int(lengths.sum()), "bytes": moved,
        "gather_us": gather_us, "roofline_us": roofline_us, "of_roofline": roofline_us / gather_us,
        "attention_us": microseconds(lambda: attend(q, sink, rows, indices, lengths)),
        "stock_decode_us": microseconds(lambda: stock_decode(case, q, sink)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file for the results")
    parser.add_argument("--bandwidth", type=float, default=4.8e12,
                        help="bytes per second of the GPU's memory (H200: 4.8e12)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_fp8_kv_gather needs a CUDA GPU", file=sys.stderr)
        return 2
    results = []
    for name in LAYERS:
        whole = scene(name)
        for tokens in TOKENS:
            results.append(measure(name, whole.part(slice(0, tokens)), options.bandwidth))
            print("{layer:9} {tokens:4} tokens: gather {gather_us:7.1f} us ({of_roofline:4.0%} of roofline), attention "
                  "{attention_us:7.1f} us, upstream decode {stock_decode_us:7.1f} us".format(**results[-1]))
    options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
