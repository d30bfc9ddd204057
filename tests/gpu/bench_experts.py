"""Times the routed experts on one SM90 GPU at every tile height, after checking that no row changes a bit.

    python tests/gpu/bench_experts.py --out experts.json

DeepSeek-V4's tiny model: 256 experts, top-6, hidden 4096, intermediate 512. Each time is the median replay of a CUDA
graph of four calls, in microseconds a call: at every height the whole chain (place, GEMM, activation, GEMM, combine)
and its GEMMs with the activation; beside them the masked layout's GEMMs, upstream's scatter padded to 128 rows
("stock"), and the Triton experts that VLLM_BATCH_INVARIANT=0 takes. DeepGEMM compiles a binary a height: the processes
of a pool do that before anything is timed.
"""
import argparse
import json
import multiprocessing
import pathlib
import sys
import time

import torch

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "kernels"), str(TESTS / "gpu")]
import conftest  # noqa: E402, F401  tests/conftest.py makes the overlays importable without an installed engine
from experts_chain import EXPERTS, HIDDEN, INTERMEDIATE, TILES, Experts  # noqa: E402
from graph_timing import median_us  # noqa: E402

from vllm.zero_mismatch.experts_deepgemm import TALLEST, TILE_HEIGHTS, tile_height  # noqa: E402

TOKENS = (1, 32, 128, 256, 2048, 8192)
TRITON_TOKENS = (32, 256, 8192)  # it compiles anew for most numbers of tokens
MASKED_MOST = 256  # slabs of every expert hold every token: 8192 tokens would take 8 GiB
SHAPES = {"up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}


def _compile(job: tuple[str, int]) -> float:
    """One GEMM at one height; 0 stands for the masked layout."""
    from vllm.utils import deep_gemm

    from vllm.zero_mismatch.experts_deepgemm import MASKED_EXPECTED_M

    started = time.monotonic()
    (n, k), tile = SHAPES[job[0]], job[1]
    weight = (torch.zeros(EXPERTS, n, k, device="cuda", dtype=torch.float8_e4m3fn),
              torch.ones(EXPERTS, n // 128, k // 128, device="cuda"))
    shape = (128,) if tile else (EXPERTS, 64)
    rows = (torch.zeros(*shape, k, device="cuda", dtype=torch.float8_e4m3fn),
            torch.ones(*shape, k // 128, device="cuda"))
    out = torch.empty(*shape, n, device="cuda", dtype=torch.bfloat16)
    none = torch.zeros(EXPERTS, device="cuda", dtype=torch.int32)
    if tile:
        with deep_gemm.mk_alignment_scope(tile):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                rows, weight, out, none, use_psum_layout=True, expected_m_for_psum_layout=tile)
    else:
        deep_gemm.fp8_m_grouped_gemm_nt_masked(rows, weight, out, none, MASKED_EXPECTED_M)
    torch.cuda.synchronize()
    return time.monotonic() - started


def compile_all(workers: int) -> None:
    jobs = [(name, tile) for name in SHAPES for tile in (*TILES, 0)]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        slowest = max(pool.imap_unordered(_compile, jobs))
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - started:.0f} s, each within {slowest:.0f} s")


def check(chain: Experts, tokens: int) -> int:
    """Words that differ between any two heights, and between the layouts, over all tokens."""
    _, quantised, ids, weights = chain.inputs(tokens)
    want = chain.run(quantised, ids, weights, tile=TALLEST).view(torch.int16)
    differing = sum(int((chain.run(quantised, ids, weights, tile=tile).view(torch.int16) != want).sum())
                    for tile in TILES)
    if tokens <= MASKED_MOST:
        rows, ends, place = chain.placed(quantised, ids, TALLEST)
        slabs, counts, inside = chain.slabs(quantised, ids, place, ends, TALLEST)
        one = chain.gemms(rows, ends, TALLEST, TALLEST)[place.flatten().long()].view(torch.int16)
        other = chain.masked(slabs, counts)[inside.flatten().long()].view(torch.int16)
        differing += int((one != other).sum())
    return differing


def measure(chain: Experts, tokens: int) -> dict[str, float | str]:
    rows, quantised, ids, weights = chain.inputs(tokens)

    def us(call) -> float:
        return median_us([call], count=4, replays=9)

    times: dict[str, float | str] = {}
    for tile in TILES:
        laid, ends, place = chain.placed(quantised, ids, tile)
        times[f"tile {tile}"] = us(lambda tile=tile: chain.run(quantised, ids, weights, tile=tile))
        times[f"tile {tile}, GEMMs"] = us(
            lambda laid=laid, ends=ends, tile=tile: chain.gemms(laid, ends, tile, tile))
    laid, ends, place = chain.placed(quantised, ids, TILES[0])
    if tokens <= MASKED_MOST:
        slabs, counts, _ = chain.slabs(quantised, ids, place, ends, TILES[0])
        times["masked, GEMMs"] = us(lambda: chain.masked(slabs, counts))
    times["place"] = us(lambda: chain.placed(quantised, ids, TILES[0]))
    out = chain.gemms(laid, ends, TILES[0], TILES[0])
    times["combine"] = us(lambda: chain.combine(out, ids, weights, place))
    if tokens > 1:  # at one token upstream takes a binary of its own, which nothing here compiles
        times["stock"] = us(lambda: chain.stock(quantised, ids, weights))
    if tokens in TRITON_TOKENS:
        try:
            times["triton"] = us(lambda: chain.triton(rows, ids, weights))
        except Exception as error:  # noqa: BLE001 - it needs more of the engine than our side does: say what failed
            times["triton"] = f"{type(error).__name__}: {error}"
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file for the results")
    parser.add_argument("--workers", type=int, default=10, help="processes that compile")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_experts needs an SM90 GPU", file=sys.stderr)
        return 2
    compile_all(options.workers)
    chain, results, wrong = Experts(), [], 0
    for tokens in TOKENS:
        differing = check(chain, tokens)
        wrong += differing
        times = measure(chain, tokens)
        results.append({"tokens": tokens, "differing_words": differing, "picked": tile_height(6 * tokens, EXPERTS),
                        "us": times})
        print(f"{tokens:5} tokens: {differing} differing words, picks {results[-1]['picked']}")
        for name, value in times.items():
            print(f"      {name:18} {value if isinstance(value, str) else f'{value:9.1f} us'}", flush=True)
        options.out.write_text(json.dumps({
            "gpu": torch.cuda.get_device_name(), "heights": [*TILE_HEIGHTS, TALLEST], "results": results}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
