"""What the aligned trainer costs: Nemotron-H forward, and forward + backward, against the same model in ordinary BF16.

    VLLM_BATCH_INVARIANT=1 python tests/gpu/bench_trainer.py [--model deepseek-v4] [--out FILE] [--profile]

`ordinary` is the tiny recipe's model over the same parameters with PyTorch's own operators and autograd: cuBLAS, fused
scaled_dot_product_attention, F.rms_norm, and the same chunked scan. Megatron's ordinary path for this model needs
TransformerEngine and mamba_ssm, which are not here; where it fuses more than PyTorch does, the ratio flatters.
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
import torch.nn.functional as F
from megatron.zero_mismatch import kernels, mamba2
from megatron.zero_mismatch.models.nemotron_h import NemotronH, Shape
from megatron.zero_mismatch.packing import Packed

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]
from prove.scripts import load  # noqa: E402

RECIPE = ROOT / "recipes" / "nemotron-3.5-lightning"
DEEPSEEK = ROOT / "recipes" / "deepseek-v4" / "tiny-train" / "config.json"
BATCHES = {"nemotron": ((512,) * 16, (128,) * 32, (4096,)),
           "deepseek-v4": ((664, 577, 321), (664, 577, 575, 448, 364, 321, 319, 264, 193, 192, 128, 51))}
RUNS = 5


class Ordinary(NemotronH):
    """The same parameters; every operator PyTorch's."""

    def forward(self, tokens, packed):
        hidden = self.hidden(tokens, packed)
        predicted = packed.positions[1:] > 0
        z = F.linear(hidden[:-1][predicted], self.lm_head.weight).float()
        return torch.log_softmax(z, -1).gather(1, tokens[1:][predicted][:, None])[:, 0]

    def hidden(self, tokens, packed):
        h = F.embedding(tokens, self.model.embed_tokens.weight)
        for layer, kind in zip(self.model.layers, self.shape.pattern, strict=True):
            x = F.rms_norm(h, h.shape[-1:], layer.norm.weight, self.shape.eps)
            h = h + {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._moe}[kind](layer.mixer, x,
                                                                                                   packed)
        return F.rms_norm(h, h.shape[-1:], self.model.norm_f.weight, self.shape.eps)

    def _mlp(self, mixer, x, packed):
        return F.linear(F.relu(F.linear(x, mixer.up_proj.weight)).square(), mixer.down_proj.weight)

    def _attention(self, mixer, x, packed):
        qkv = F.linear(x, mixer.qkv_proj.weight).split(mixer.widths, -1)
        q, k, v = (t.unflatten(-1, (-1, self.shape.head_dim)).transpose(0, 1)[None] for t in qkv)
        outs = [F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True,
                                               enable_gqa=True) for a, b in packed.bounds]
        return F.linear(torch.cat(outs, 2)[0].transpose(0, 1).flatten(1), mixer.o_proj.weight)

    def _moe(self, mixer, x, packed):
        scores = torch.sigmoid(F.linear(x.float(), mixer.gate.weight))
        ids = torch.topk(scores + mixer.gate.e_score_correction_bias, self.shape.top_k, -1).indices
        weights = scores.gather(1, ids)
        weights = (weights / weights.sum(-1, keepdim=True) * self.shape.scaling).to(x.dtype).flatten()
        flat = ids.flatten()
        order = flat.argsort()
        out = torch.zeros_like(x)
        for e, own in enumerate(order.split(flat.bincount(minlength=self.shape.experts).tolist())):
            token = own // self.shape.top_k
            up = F.relu(F.linear(x[token], mixer.experts["w13_weight"][e])).square()
            out = out.index_add(0, token, F.linear(up, mixer.experts["w2_weight"][e]) * weights[own][:, None])
        return out + self._mlp(mixer.shared_experts, x, packed)

    def _mamba(self, mixer, x, packed):
        m = self.shape.mamba
        gate, xbc, dt = F.linear(x, mixer.in_proj.weight).split([m.x_width, mixer.conv_width, m.heads], -1)
        taps = self.shape.conv - 1
        parts = [F.conv1d(xbc[a:b].T[None], mixer.conv1d.weight, mixer.conv1d.bias, padding=taps,
                          groups=mixer.conv_width)[0, :, :b - a] for a, b in packed.bounds]
        xbc = F.silu(torch.cat(parts, 1).T)
        y = mamba2.reference(xbc, dt, -mixer.A_log.exp(), mixer.D, mixer.dt_bias, packed, m)
        y = (y * F.silu(gate)).unflatten(-1, (m.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], None, self.shape.eps).flatten(1) * mixer.norm.weight
        return F.linear(y, mixer.out_proj.weight)


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
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()
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
    events = sorted(events, key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in events)
    print(f"backward: wall {wall / 1e3:.1f} ms, kernels {busy / 1e3:.1f} ms in {sum(e.count for e in events)} launches")
    for e in events[:15]:
        print(f"  {e.self_device_time_total / 1e3:8.2f} ms  {e.count:6d}  {e.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(BATCHES), default="nemotron")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.model == "nemotron":
        arms = {"ordinary": model(Ordinary), "aligned": model(NemotronH), "aligned, recompute": model(NemotronH, True)}
    else:
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
