"""On the GPU: the whole DeepSeek-V4 trainer model on vLLM's kernels, without an engine. The recipe's tiny-train:
some 35 GiB with the reference in fp32, where tiny would take 100.

    python -m pytest tests/gpu/test_trainer_dsv4_model.py -q -s

Prints: seconds of a forward and of a step with and without the cache of quantised weights, peak memory, and the least
cosine of a parameter's gradient to autograd through the independent model in fp32 (prove/reference_deepseek_v4.py) at
the same experts and rows, and at the values that the model quantises: what separates the two is BF16. Without those
values it is FP8, by which a sink's gradient, a sum of few terms that nearly cancel, may point anywhere. The bound of
0.8 is for wiring: a term that is missing or transposed falls below it.
"""
import json
import pathlib
import time

import pytest
import tiny_deepseek_v4
import torch
from mm_cases import differing_words

from megatron.zero_mismatch import kernels_dsv4
from megatron.zero_mismatch.linear_fp8 import OperandCache
from megatron.zero_mismatch.models.deepseek_v4 import DeepseekV4, Shape
from megatron.zero_mismatch.packing import pack
from megatron.zero_mismatch.version_guard import WeightGuard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TINY = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "deepseek-v4" / "tiny-train"
LENGTHS = (2300, 131, 1, 260)  # 575 compressed rows against 512 that are kept; whole groups of 128; no row at all
SHORT = (150, 37)  # of the gradients: every expert sees every token in the reference
COSINE = 0.8


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("vllm.config", reason="needs the patched engine")
    config = json.loads((TINY / "config.json").read_text())
    with torch.device("cuda"):
        made = DeepseekV4(Shape.from_hf(config), kernels_dsv4.from_vllm(), kernels_dsv4.rotary_tables(config))
    tiny_deepseek_v4.fill(made)
    made.take({name: tensor.clone() for name, tensor in made.exported()})
    return made


def batch(lengths, vocab=8192):
    generator = torch.Generator().manual_seed(1)
    return pack([torch.randint(0, vocab, (n,), generator=generator).cuda() for n in lengths])


def seconds(function) -> float:
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def test_packing_recomputation_and_cache_change_no_bit(model):
    tokens, packed = batch(LENGTHS)
    with torch.no_grad():
        whole = model(tokens, packed)
        assert whole.isfinite().all() and whole[packed.positions > 0].std() > 0.1
        for (a, b), n in zip(packed.bounds, LENGTHS, strict=True):
            if n == 1:
                continue  # nothing to predict
            alone = model(*pack([tokens[a:b]]))
            assert not differing_words(alone, whole[a:b]), f"sequence of {n} tokens"
        flipped = model(*pack([tokens[a:b] for a, b in packed.bounds[::-1]]))
        (start, end), *_ = packed.bounds
        assert not differing_words(flipped[-LENGTHS[0]:], whole[start:end])
        plain = seconds(lambda: model(tokens, packed))
        model.run.guard = WeightGuard(model.named_parameters)
        model.run.cache = OperandCache(model.run.guard)
        assert not differing_words(model(tokens, packed), whole)
        cached = seconds(lambda: model(tokens, packed))
        model.run.cache = model.run.guard = None
    print(f"\nforward of {packed.tokens} tokens: {plain:.2f} s, {cached:.2f} s with the cache")


def test_every_gradient_is_near_the_independent_models(model):
    from prove.gradients_deepseek_v4 import noted
    from prove.reference_deepseek_v4 import Reference

    tokens, packed = batch(SHORT)
    torch.cuda.reset_peak_memory_stats()
    with noted(model) as (experts, rows, given):
        out = model(tokens, packed)
    signs = torch.randn(len(out), generator=torch.Generator().manual_seed(2)).cuda()
    torch.cuda.synchronize()
    start = time.perf_counter()
    (out * signs).sum().backward()
    torch.cuda.synchronize()
    print(f"\nbackward of {packed.tokens} tokens: {time.perf_counter() - start:.2f} s, "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", end="")
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    compressed = [i for i, ratio in enumerate(model.shape.ratios) if ratio == 4]
    config = json.loads((TINY / "config.json").read_text())
    reference = Reference(config, dict(model.named_parameters()), model.tables, torch.float32)
    logprobs = reference.logprobs([tokens[a:b] for a, b in packed.bounds], experts,
                                  dict(zip(compressed, rows, strict=True)), fp8=True, given=given)
    predicted = packed.positions > 0
    print(f"\n  logprobs: mean distance {(logprobs - out[predicted]).abs().mean().item():.3f}", end="")
    (logprobs * signs[predicted]).sum().backward()
    cosines = {name: torch.nn.functional.cosine_similarity(
        g.float().flatten(), reference.w[name].grad.flatten(), dim=0).item() for name, g in got.items()}
    worst = sorted(cosines.items(), key=lambda item: item[1])
    print("\n  least cosines:", *(f"\n    {c:.4f}  {name}" for name, c in worst[:12]))
    print(f"  median {sorted(cosines.values())[len(cosines) // 2]:.4f} of {len(cosines)} parameters")
    assert worst[0][1] > COSINE, worst[0]
