"""Times a Mamba-2 layer's chunk replay against upstream's selective_state_update on one GPU, at decode.

    python tests/gpu/bench_mamba2.py [--out FILE]

Sizes of Nemotron-3.5-Lightning: 64 heads x 64, 8 groups, state 128. A time is the median over replays of a CUDA graph
of calls that rotate over enough slots to leave the L2 cache cold, in microseconds a call. `replay` has all requests at
the same position, for each of a chunk's, the worst included, in which a group's chunks end; `mixed` has each at
another, as in serving. `prefill` is a layer's part of 8,192 tokens.
"""
import argparse
import json

import torch
from graph_timing import median_us

from vllm.zero_mismatch import mamba2_pieces, mamba2_replay, mamba2_scan

CHUNK = mamba2_replay.CHUNK
SIZES = (64, 64, 8, 128, CHUNK)
BATCHES = (32, 128, 256)
BEFORE = 2 * CHUNK  # tokens before those that are timed: every group is past its short first chunk
PREFILLS = ((8192,), (1024,) * 8)
COLD = 2  # copies of the batch's slots to rotate over: 32 requests' states alone would fit the L2 cache
CALLS, REPLAYS = 8, 15


def microseconds(calls) -> float:
    return round(median_us(calls, CALLS, REPLAYS), 2)


def spread(batch: int) -> list[int]:
    """Every request at another position of its chunk, as in serving."""
    return [(37 * i) % CHUNK for i in range(batch)]


class Batch:
    def __init__(self, batch: int):
        self.batch = batch
        self.copies = max(COLD, -(-128 // batch))
        self.step = mamba2_replay.random_step(batch, SIZES, torch.device("cuda"))
        self.cache = mamba2_replay.new_cache(batch * self.copies + 1, SIZES, torch.bfloat16, "cuda", 0.01)
        self.slots = [torch.arange(1, batch + 1, dtype=torch.int32, device="cuda") + copy * batch
                      for copy in range(self.copies)]
        self.out = torch.empty_like(self.step.x)

    def pieces(self, rows) -> mamba2_pieces.Pieces:
        lengths = torch.as_tensor(rows, dtype=torch.int32, device="cuda") + BEFORE + 1
        return mamba2_pieces.DecodeTable(self.batch, CHUNK, "cuda").fill(lengths)

    def replay(self, rows) -> float:
        pieces = self.pieces(rows)
        return microseconds([lambda s=s: mamba2_replay.decode(self.step, self.cache, pieces, s, self.out)
                             for s in self.slots])

    def update(self) -> float:
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        heads, head_dim, groups, state, _ = SIZES
        step = self.step
        x = step.x.reshape(self.batch, heads, head_dim)
        dt = step.dt[:, :, None].expand(-1, -1, head_dim)
        a = step.a[:, None, None].expand(-1, head_dim, state)
        d, bias = (t[:, None].expand(-1, head_dim) for t in (step.d, step.dt_bias))
        b, c = (t.reshape(self.batch, groups, state) for t in (step.b, step.c))
        out = self.out.view(self.batch, heads, head_dim)
        return microseconds([lambda s=s: selective_state_update(
            self.cache.ssm, x, dt, a, b, c, d, dt_bias=bias, dt_softplus=True, state_batch_indices=s[:, None],
            dst_state_batch_indices=s[:, None], out=out) for s in self.slots])


def decode_times(batch: int) -> dict:
    bench = Batch(batch)
    before = bench.update()
    rows = [bench.replay([row] * batch) for row in range(CHUNK)]
    mixed = bench.replay(spread(batch))
    update = (before + bench.update()) / 2
    return {"batch": batch, "selective_state_update": round(update, 2), "replay": rows, "mixed": mixed,
            "worst_ratio": round(max(rows) / update, 3), "average_ratio": round(sum(rows) / len(rows) / update, 3),
            "mixed_ratio": round(mixed / update, 3)}


def prefill_time(lengths: tuple[int, ...]) -> dict:
    device = torch.device("cuda")
    step = mamba2_replay.random_step(sum(lengths), SIZES, device)
    cache = mamba2_replay.new_cache(len(lengths) + 1, SIZES, torch.bfloat16, device, 0.01)
    slots = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device)
    pieces = mamba2_pieces.prefill([0] * len(lengths), list(lengths), CHUNK, mamba2_scan.TILE,
                                   lambda rows: torch.tensor(rows, dtype=torch.int32, device=device))
    out = torch.empty_like(step.x)
    return {"prefill": list(lengths),
            "us": microseconds([lambda: mamba2_replay.prefill(step, cache, pieces, slots, out)])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    args = parser.parse_args()
    result = {"gpu": torch.cuda.get_device_name(0), "sizes": SIZES, "decode": []}
    for batch in BATCHES:
        result["decode"].append(decode_times(batch))
        print(json.dumps(result["decode"][-1]), flush=True)
        torch.cuda.empty_cache()
    result["prefill"] = [prefill_time(lengths) for lengths in PREFILLS]
    print(json.dumps(result["prefill"]), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
