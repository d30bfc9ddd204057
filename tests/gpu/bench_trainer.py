"""Where the aligned trainer's time goes: forward, and forward + backward, operator by operator with --profile.

    VLLM_BATCH_INVARIANT=1 python tests/gpu/bench_trainer.py [--model deepseek-v4] [--out FILE] [--profile]

Nemotron-H stands beside the same model in ordinary BF16 (prove/ordinary_nemotron_h.py); `prove cost` makes a record of
that, with optimizers, and for DeepSeek-V4 too.
Times are medians of synchronised runs in milliseconds, memory the peak above the weights. --profile lists the operators
and the kernels of the aligned backward, and how much of the time is no kernel's.

DeepSeek-V4 has no ordinary arm: of its tiny-train model the aligned forward and backward are timed, with the masters
quantised once as in an actor, and torch's GEMMs set as an engine in the process sets them.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time
import types

import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape
from megatron.zero_mismatch.packing import Packed

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]
from prove.ordinary_nemotron_h import Ordinary  # noqa: E402
from prove.scripts import load  # noqa: E402
from prove.steps import on_device  # noqa: E402

RECIPE = ROOT / "recipes" / "nemotron-3.5-lightning"
DEEPSEEK = ROOT / "recipes" / "deepseek-v4" / "tiny-train" / "config.json"
BATCHES = {"nemotron": ((512,) * 16, (128,) * 32, (4096,)),
           "deepseek-v4": ((664, 577, 321), (664, 577, 575, 448, 364, 321, 319, 264, 193, 192, 128, 51))}
RUNS = 5


def model(kind, recompute=False):
    config = json.loads((RECIPE / "tiny" / "config.json").read_text())
    made = kind(Shape.from_hf(config), kernels.from_vllm(page=1152), recompute=recompute).cuda()
    weights = {n: torch.nn.Parameter(torch.empty_like(t), requires_grad=False) for n, t in made.exported()}
    load(RECIPE / "tiny" / "weights.py").fill(types.SimpleNamespace(named_parameters=weights.items))
    made.take(weights)
    return made


def deepseek(recompute=False):
    import tiny_deepseek_v4
    from megatron.zero_mismatch import kernels_dsv4
    from megatron.zero_mismatch.linear_fp8 import OperandCache
    from megatron.zero_mismatch.models import deepseek_v4
    from megatron.zero_mismatch.version_guard import WeightGuard

    config = json.loads(DEEPSEEK.read_text())
    with torch.device("cuda"):
        made = deepseek_v4.DeepseekV4(deepseek_v4.Shape.from_hf(config), kernels_dsv4.from_vllm(),
                                      kernels_dsv4.rotary_tables(config), recompute=recompute)
    tiny_deepseek_v4.fill(made)
    made.run.guard = WeightGuard(made.named_parameters)
    made.run.cache = OperandCache(made.run.guard)
    return made


def median_ms(call) -> float:
    times = []
    for _ in range(RUNS + 2):  # the first two compile and warm up
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times[2:]), 2)


def measure(made, tokens, packed) -> dict:
    def both():
        made.zero_grad(set_to_none=True)
        made(tokens, packed).sum().backward()

    with torch.no_grad():
        forward = median_ms(lambda: made(tokens, packed))
    both()
    made.zero_grad(set_to_none=True)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total = median_ms(both)
    return {"forward_ms": forward, "both_ms": total,
            "peak_mib": round((torch.cuda.max_memory_allocated() - held) / 2**20)}


def _backward(made, tokens, packed, *activities):
    """(wall us, events) of one backward."""
    made.zero_grad(set_to_none=True)
    out = made(tokens, packed).sum()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as seen:
        started = time.perf_counter()
        out.backward()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - started)
    return wall, seen.key_averages()


def profile(made, tokens, packed) -> None:
    from torch.profiler import ProfilerActivity

    made(tokens, packed).sum().backward()  # compiles
    _, events = _backward(made, tokens, packed, ProfilerActivity.CPU, ProfilerActivity.CUDA)
    functions = [e for e in events if e.key.endswith("Backward") and not e.key.startswith("autograd::")]
    for e in sorted(functions, key=lambda e: -max(e.cpu_time_total, e.device_time_total))[:16]:
        print(f"  {e.key:<26} {e.count:5d} calls  host {e.cpu_time_total / 1e3:8.2f} ms  "
              f"kernels {e.device_time_total / 1e3:8.2f} ms")
    wall, events = _backward(made, tokens, packed, ProfilerActivity.CUDA)  # above, the host paid for the profiler
    ran = on_device(events)
    busy, launches = (sum(one[key] for one in ran) for key in ("us", "count"))
    print(f"backward: wall {wall / 1e3:.1f} ms, kernels {busy / 1e3:.1f} ms in {launches} launches")
    for one in ran[:15]:
        print(f"  {one['us'] / 1e3:8.2f} ms  {one['count']:6d}  {one['name'][:90]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(BATCHES), default="nemotron")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.model == "nemotron":
        arms = {"ordinary": model(Ordinary), "aligned": model(NemotronH), "aligned, recompute": model(NemotronH, True)}
    else:
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

        init_batch_invariance()
        arms = {"aligned": deepseek()}
    rows = []
    for lengths in BATCHES[args.model]:
        packed = Packed(lengths, torch.device("cuda"))
        tokens = torch.randint(0, arms["aligned"].shape.vocab, (packed.tokens,), device="cuda")
        if args.profile:
            profile(arms["aligned"], tokens, packed)
        for name, made in arms.items():
            batch = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else f"{packed.tokens} in {len(lengths)}"
            rows.append({"batch": batch, "arm": name, **measure(made, tokens, packed)})
            print("{batch:>10}  {arm:<18}  forward {forward_ms:8.2f} ms  both {both_ms:8.2f} ms  peak {peak_mib:6d} MiB"
                  .format(**rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
