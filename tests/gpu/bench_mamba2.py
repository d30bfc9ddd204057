"""Times a Mamba-2 layer's chunk replay against upstream's selective_state_update on one GPU, at decode.

    python tests/gpu/bench_mamba2.py [--out FILE] [--sweep [--only]]

Sizes of Nemotron-3.5-Lightning: 64 heads x 64, 8 groups, state 128. A time is the median over replays of a CUDA graph
of calls that rotate over enough slots to leave the L2 cache cold, in microseconds a call. `replay` has all requests at
the same position, for each of a chunk's, the worst included, in which a group's chunks end; `mixed` has each at
another, as in serving. `prefill` is a layer's part of 8,192 tokens. --sweep tries other launches of the scan: of each
it prints, a batch, the ratios at positions 0, 15, 30 and 31 and mixed, once prefill and decode have the default's bits
and are right by fp64. --only does nothing else.
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
LAUNCH = ("HEADS", "WARPS", "STAGES")
DEFAULT = tuple(getattr(mamba2_scan, name) for name in LAUNCH)
LAUNCHES = [DEFAULT, *(launch for launch in (
    (1, 4, 1), (2, 4, 1), (4, 4, 1), (1, 4, 2), (2, 4, 2), (4, 4, 2), (8, 4, 2), (2, 4, 3), (4, 4, 3), (2, 8, 2),
    (4, 8, 2),
) if launch != DEFAULT)]


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


def _words(device: torch.device, sizes) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(outputs, states) of two chunks and three tokens, by one prefill and by decode from the first token on, and the
    largest error of either against the fp64 recurrence, in units of the tolerance."""
    total = 2 * CHUNK + 3
    step = mamba2_replay.random_step(total, sizes, device, seed=3)
    cache = mamba2_replay.new_cache(3, sizes, torch.bfloat16, device, float("nan"))
    out = step.x.new_full((2, total, step.x.shape[1]), float("nan"))
    ints = lambda rows: torch.tensor(rows, dtype=torch.int32, device=device)  # noqa: E731
    for row, count in ((0, total), (1, 1)):
        pieces = mamba2_pieces.prefill([0], [count], CHUNK, mamba2_scan.TILE, ints)
        mamba2_replay.prefill(mamba2_replay.head(step, 0, count), cache, pieces, ints([row + 1]), out[row])
    table = mamba2_pieces.DecodeTable(1, CHUNK, device)
    for at in range(1, total):
        mamba2_replay.decode(mamba2_replay.head(step, at, at + 1), cache, table.fill(ints([at + 1])), ints([2]),
                             out[1, at:at + 1])
    zero = torch.zeros(cache.ssm.shape[1:], device=device)
    worst = [_error(step, 0, total, zero, slice(None), out)]
    phases, of_group = mamba2_pieces.phases(CHUNK), sizes[0] // sizes[2]
    for group in range(sizes[2]):  # S is that of the group's last full chunk
        phase, heads = phases[group % len(phases)], slice(group * of_group, (group + 1) * of_group)
        end = (total + phase) // CHUNK * CHUNK - phase
        worst.append(_error(step, 1, end, zero, heads, cache.ssm[1:, heads]))
    return out, cache.ssm[1:], max(worst)


def _error(step, part: int, end: int, zero: torch.Tensor, heads: slice, got: torch.Tensor) -> float:
    """The largest, in units of the tolerance. part: 0 for outputs, of all heads; 1 for the state after `end` tokens."""
    want, size = (mamba2_replay.recurrence(s, 0, end, zero)[part] for s in (step, mamba2_replay.absolute(step)))
    want, size = want[heads], size[heads]
    return float(((got.double().view(2, *want.shape) - want).abs() / size).max()) / mamba2_replay.TOLERANCE


def differing(found, wanted) -> int:
    """Words of (outputs, states) unlike `wanted`'s, or unlike between prefill and decode."""
    return sum(int((one != two).sum()) for got, want in zip(found, wanted, strict=True)
               for words in (got.view(torch.int16),)
               for one, two in ((words, want.view(torch.int16)), (words[0], words[1])))


def sweep() -> list[dict]:
    """A whole decode step under each launch, against selective_state_update at the same batch."""
    batches = {batch: Batch(batch) for batch in BATCHES}
    updates = {batch: bench.update() for batch, bench in batches.items()}
    found, wanted = [], None
    for launch in LAUNCHES:
        for name, value in zip(LAUNCH, launch, strict=True):
            setattr(mamba2_scan, name, value)
        entry = dict(zip(LAUNCH, launch, strict=True))
        try:
            *words, entry["error"] = _words(torch.device("cuda"), SIZES)
            wanted = wanted or words
            entry["differing"] = differing(words, wanted)
            entry["ratios"] = {
                batch: [round(bench.replay(rows) / updates[batch], 3)
                        for rows in ([0] * batch, [15] * batch, [30] * batch, [31] * batch, spread(batch))]
                for batch, bench in batches.items()}
        except Exception as error:  # noqa: BLE001 - a launch that does not fit the GPU is a line too
            entry["failed"] = str(error)[:100]
        found.append(entry)
        print(json.dumps(entry), flush=True)
    for name, value in zip(LAUNCH, DEFAULT, strict=True):
        setattr(mamba2_scan, name, value)
    return found


def table(found: list[dict]) -> str:
    lines = [f"{'heads warps stages':<20}{'batch':>6}{'0':>8}{'15':>8}{'30':>8}{'31':>8}{'mixed':>8}"]
    for entry in found:
        launch = " ".join(f"{entry[name]:>5}" for name in LAUNCH)
        if "failed" in entry or entry["differing"] or not entry["error"] <= 1:
            lines.append(f"{launch:<20}{entry}")
            continue
        lines += [f"{launch:<20}{batch:>6}" + "".join(f"{value:>8.3f}" for value in ratios)
                  for batch, ratios in entry["ratios"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", action="store_true")
    args = parser.parse_args()
    result = {"gpu": torch.cuda.get_device_name(0), "sizes": SIZES}
    if not args.only:
        result["decode"] = []
        for batch in BATCHES:
            result["decode"].append(decode_times(batch))
            print(json.dumps(result["decode"][-1]), flush=True)
            torch.cuda.empty_cache()
        result["prefill"] = [prefill_time(lengths) for lengths in PREFILLS]
        print(json.dumps(result["prefill"]), flush=True)
    if args.sweep:
        result["sweep"] = sweep()
        print(table(result["sweep"]))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
