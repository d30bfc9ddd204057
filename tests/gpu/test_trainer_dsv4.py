"""On the GPU: each DeepSeek-V4 operator of the trainer has the bits of the engine's own call, and its gradient.

    python -m pytest tests/gpu/test_trainer_dsv4.py -q -s

Prints one line an operator: differing words of the forward (0 wanted), and for each gradient the distance to autograd
through the plain formula in fp64, relative to its norm. Needs the patched engine and one SM90 GPU; under a minute with
warm JIT caches. The bound on a BF16 gradient is its own rounding (2**-9) plus that of the BF16 products and operands in
front of it (2**-8 each, a few in a row); fp32 gradients take BF16 inputs exactly.
"""
import dsv4_engine as engine
import pytest
import torch
from mm_cases import differing_words

from megatron.zero_mismatch import (
    attention_inputs,
    attention_sparse,
    compressor,
    grouped_fp8,
    indexer,
    linear_fp8,
    mhc,
    mhc_kernels,
    o_proj_fp8,
    quant_fp8,
    router_dsv4,
    swiglu,
)
from megatron.zero_mismatch.packing import Packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
EPS = 1e-6
BF16_BOUND, FP32_BOUND = 2e-2, 2e-3


@pytest.fixture(scope="module", autouse=True)
def engine_config():
    """Custom operators on, as in the engine: breakable CUDA graphs set the mode to NONE (vllm/config/vllm.py:869)."""
    config = pytest.importorskip("vllm.config", reason="needs the patched engine")
    compilation = config.CompilationConfig(mode=config.CompilationMode.NONE)
    with config.set_current_vllm_config(config.VllmConfig(compilation_config=compilation)):
        yield


def normal(*shape, spread=1.0, shift=0.0, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * spread + shift).to(dtype).cuda()


def table(positions=4096, turned=64):
    angle = torch.rand(positions, turned // 2, generator=torch.Generator().manual_seed(9)) * 6.28
    return torch.cat([angle.cos(), angle.sin()], -1).cuda()


def words(got: torch.Tensor, want: torch.Tensor) -> int:
    if got.dtype == torch.int64:
        got, want = got.int(), want.int()
    return differing_words(got, want)


def forward_equals(name: str, got, want) -> None:
    got, want = (part if isinstance(part, tuple) else (part,) for part in (got, want))
    counts = [words(g.detach(), w) for g, w in zip(got, want, strict=True)]
    print(f"\n{name:28} forward: {counts} of {[g.numel() for g in got]} words differ", end="")
    assert not any(counts), f"{name}: differing words {counts}"


def gradient_is_near(name: str, inputs: dict, run, plain) -> None:
    """`run` with the engine's kernels against autograd through `plain` in fp64, for one random incoming gradient."""
    leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
    out = run(*leaves.values())
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator("cuda").manual_seed(3)
    grads = [torch.randn(o.shape, generator=generator, device="cuda").to(o.dtype) for o in out]
    got = torch.autograd.grad(out, tuple(leaves.values()), grads)
    exact = [v.detach().double().requires_grad_() for v in inputs.values()]
    reference = plain(*exact)
    reference = reference if isinstance(reference, tuple) else (reference,)
    want = torch.autograd.grad(reference, exact, [g.double() for g in grads])
    for label, g, w in zip(inputs, got, want, strict=True):
        error = ((g.double() - w).norm() / w.norm()).item()
        print(f"   d{label} {error:.1e}", end="")
        assert g.dtype == inputs[label].dtype
        assert error < (BF16_BOUND if g.dtype == torch.bfloat16 else FP32_BOUND), f"{name}: d{label} is {error} off"


def test_weight_cast_is_the_plain_one():
    master = normal(512, 1024, spread=0.03)
    codes, scales = linear_fp8.vllm_cast(master)
    want_codes, want_scales = quant_fp8.quantise_weight(master.cpu())
    assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8)) and scales.cpu().equal(want_scales)


@pytest.mark.parametrize("tokens", [33, 257])
def test_linear(tokens):
    x, master = normal(tokens, 4096), normal(1536, 4096, spread=4096**-0.5)
    run = linear_fp8.linear_fp8
    want = engine.linear(*quant_fp8.quantise_weight(master.cpu()), x)
    forward_equals(f"linear_fp8, {tokens} rows", run(linear_fp8.VLLM, x, master), want)
    gradient_is_near("linear_fp8", {"x": x, "w": master}, lambda x, w: run(linear_fp8.VLLM, x, w), lambda x, w: x @ w.T)


def product_passing_at_the_bound(gate_up, limit: float):
    """swiglu.product with the gradient that the trainer means: a value at the bound itself still gets it. torch.clamp's
    own derivative there was 1 up to 2.13 and is 0 since 2.14."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, up.sign() * limit, up)
    return gate * torch.sigmoid(gate) * up


def test_swiglu():
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    x = normal(257, 1024, spread=6.0)
    forward_equals("swiglu", swiglu.swiglu(swiglu.vllm, x, 10.0), SiluAndMulWithClamp(10.0)(x))
    gradient_is_near("swiglu", {"x": x}, lambda x: swiglu.swiglu(swiglu.vllm, x, 10.0),
                     lambda x: product_passing_at_the_bound(x, 10.0))


def test_experts():
    tokens, count, slots, hidden, inner, limit = 129, 16, 6, 1024, 512, 2.0
    x, w13 = normal(tokens, hidden), normal(count, 2 * inner, hidden, spread=hidden**-0.5)
    w2 = normal(count, hidden, inner, spread=inner**-0.5)
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(count - 1, generator=generator)[:slots] for _ in range(tokens)]).int().cuda()
    weights = normal(tokens, slots, dtype=torch.float32).sigmoid()

    def run(x, w13, w2, weights, kernels=grouped_fp8.VLLM):
        return grouped_fp8.grouped_fp8(kernels, x, w13, w2, weights, ids, limit)

    loaded = [quant_fp8.quantise_weight(w.cpu()) for w in (w13, w2)]
    forward_equals("grouped_fp8", run(x, w13, w2, weights), engine.experts(x, *loaded, weights, ids, limit))
    parts = grouped_fp8.VLLM.experts(x, *(grouped_fp8.VLLM.operand(w) for w in (w13, w2)), ids, weights, limit)
    exact_hidden = torch.einsum("th,tsih->tsi", x.float(), w13.float()[ids.long()])
    fp8_noise = ((parts.hidden[parts.place.long()].float() - exact_hidden).norm() / exact_hidden.norm()).item()

    def plain(x, w13, w2, weights):
        """At the kernel's own hidden values, which FP8 moved: the value is `hidden`, the gradient that of x @ w13.T."""
        out = 0
        for s in range(slots):
            e = ids[:, s].long()
            exact = torch.einsum("th,tih->ti", x, w13[e])
            at = exact + (parts.hidden[parts.place[:, s].long()].double() - exact).detach()
            acted = product_passing_at_the_bound(at, limit)
            rows = torch.einsum("ti,thi->th", acted, w2[e])
            rows = rows + (parts.rows[parts.place[:, s].long()].double() - rows).detach()
            out = out + weights[:, s, None] * rows
        return out

    print(f"   hidden: {fp8_noise:.1e} off fp32", end="")
    gradient_is_near("grouped_fp8", {"x": x, "w13": w13, "w2": w2, "weights": weights}, run, plain)


STREAMS, HIDDEN = 4, 4096
MIX = STREAMS * (STREAMS + 2)
SETTINGS = mhc.Settings(1e-6, 1e-6, 1e-6, 20)


def mhc_weights():
    fp32 = {"dtype": torch.float32}
    return {
        "fn": normal(MIX, STREAMS * HIDDEN, spread=(STREAMS * HIDDEN) ** -0.5, **fp32),
        "scale": normal(3, spread=0.1, shift=0.75, **fp32), "base": normal(MIX, spread=0.5, **fp32),
        "norm": normal(HIDDEN, spread=0.1, shift=1.0),
    }  # fmt: skip


def test_mhc_post_and_next_pre():
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_tilelang

    tokens, w = 65, mhc_weights()
    x, residual = normal(tokens, HIDDEN), normal(tokens, STREAMS, HIDDEN)
    out = normal(tokens, STREAMS, dtype=torch.float32).sigmoid() * 2
    comb = normal(tokens, STREAMS, STREAMS, dtype=torch.float32).softmax(-1)
    want = mhc_fused_post_pre_tilelang(
        x, residual, out.unsqueeze(-1), comb, w["fn"], w["scale"], w["base"], 1e-6, 1e-6, 1e-6, 2.0, 20,
        norm_weight=w["norm"], norm_eps=1e-6,
    )
    streams = mhc.post(mhc_kernels.VLLM.post, x, residual, out, comb)
    layer_input, new_out, new_comb = mhc.pre(mhc_kernels.VLLM.pre, streams, *w.values(), SETTINGS)
    forward_equals("mhc post, pre", (streams, new_out.unsqueeze(-1), new_comb, layer_input), want)
    gradient_is_near("mhc post", {"x": x, "residual": residual, "post": out, "comb": comb},
                     lambda *t: mhc.post(mhc_kernels.VLLM.post, *t), mhc_kernels.REFERENCE.post)
    gradient_is_near("mhc pre", {"residual": residual, **w},
                     lambda *t: mhc.pre(mhc_kernels.VLLM.pre, *t, SETTINGS),
                     lambda *t: mhc_kernels.REFERENCE.pre(*t, SETTINGS))


def test_mhc_broadcast():
    from vllm.model_executor.kernels.mhc.tilelang import mhc_pre_broadcast_tilelang

    w, x = mhc_weights(), normal(65, HIDDEN)
    summed = w["fn"].view(-1, STREAMS, HIDDEN).sum(dim=1)
    want = mhc_pre_broadcast_tilelang(
        x, w["fn"], w["scale"], w["base"], 1e-6, 1e-6, 1e-6, 2.0, 20, norm_weight=w["norm"], norm_eps=1e-6,
        fn_broadcast=summed,
    )
    residual, layer_input, out, comb = mhc.pre_broadcast(mhc_kernels.VLLM.pre_broadcast, x, *w.values(), SETTINGS)
    forward_equals("mhc broadcast", (residual, out.unsqueeze(-1), comb, layer_input), want)
    gradient_is_near("mhc broadcast", {"x": x, **w},
                     lambda *t: mhc.pre_broadcast(mhc_kernels.VLLM.pre_broadcast, *t, SETTINGS),
                     lambda *t: mhc_kernels.REFERENCE.pre_broadcast(*t, SETTINGS))


def test_mhc_head():
    from vllm.model_executor.kernels.mhc.tilelang import hc_head_fused_kernel_tilelang

    residual = normal(65, STREAMS, HIDDEN)
    fn = normal(STREAMS, STREAMS * HIDDEN, spread=(STREAMS * HIDDEN) ** -0.5, dtype=torch.float32)
    scale, base = normal(1, shift=0.75, dtype=torch.float32), normal(STREAMS, dtype=torch.float32)
    forward_equals("mhc head", mhc.head(mhc_kernels.VLLM.head, residual, fn, scale, base, SETTINGS),
                   hc_head_fused_kernel_tilelang(residual, fn, scale, base, 1e-6, 1e-6))
    gradient_is_near("mhc head", {"residual": residual, "fn": fn, "scale": scale, "base": base},
                     lambda *t: mhc.head(mhc_kernels.VLLM.head, *t, SETTINGS),
                     lambda *t: mhc_kernels.REFERENCE.head(*t, SETTINGS))


def test_norms_of_the_low_rank_projections():
    from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm

    both = normal(257, 1536, spread=3.0)
    qr, kv = both.split([1024, 512], -1)
    w_q, w_kv = normal(1024, spread=0.1, shift=1.0), normal(512, spread=0.1, shift=1.0)
    forward_equals("norms", attention_inputs.norms(attention_inputs.VLLM, qr, kv, w_q, w_kv, EPS),
                   tuple(fused_q_kv_rmsnorm(qr, kv, w_q, w_kv, EPS)))
    gradient_is_near("norms", {"qr": qr, "kv": kv, "w_q": w_q, "w_kv": w_kv},
                     lambda *t: attention_inputs.norms(attention_inputs.VLLM, *t, EPS),
                     lambda *t: attention_inputs.REFERENCE.norms(*t, EPS))


LENGTHS = {0: (300, 77, 1), 4: (300, 77, 3), 128: (300, 130, 5)}


def scene(ratio):
    packed = Packed(LENGTHS[ratio], torch.device("cuda"))
    q, kv = normal(packed.tokens, 64, 512, spread=2.0), normal(packed.tokens, 512)
    columns = 1024 if ratio == 4 else 512
    pooling = (normal(packed.tokens, 2 * columns, dtype=torch.float32),
               normal(ratio or 1, columns, spread=0.5, dtype=torch.float32), normal(512, spread=0.1, shift=1.0))
    return packed, q, kv, pooling, normal(64, dtype=torch.float32), table()


def engine_window(q, kv, packed, cos_sin):
    window = engine.Pages(list(packed.lengths), 64, 584)
    turned = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, kv, window.cache.view(len(window.cache), -1), engine.token_slots(window, packed.lengths), packed.positions,
        cos_sin, 64, EPS, 64,
    )
    return turned, window


@pytest.mark.parametrize("ratio", LENGTHS)
def test_attention_from_projections_to_output(ratio):
    """The whole way: norm and rotation, both caches over other pages than the engine's, lists, FlashMLA with a sink."""
    packed, q, kv, pooling, sink, cos_sin = scene(ratio)
    turned, window = engine_window(q, kv, packed, cos_sin)
    top_k = {0: 0, 4: 16, 128: 128}[ratio]
    keys = chosen = None
    parts = []
    if ratio:
        keys = engine.compress(*pooling, packed.lengths, packed.positions, cos_sin, ratio, EPS, 512)
        parts = [compressor.compress(compressor.vllm, *pooling, packed, cos_sin, ratio, EPS)]
        visible = ((packed.positions + 1) // ratio).tolist()
        chosen = torch.full((packed.tokens, top_k), -1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(1)
        for t, n in enumerate(visible):
            rows = torch.randperm(n, generator=generator)[:top_k].sort(descending=ratio == 4).values
            chosen[t, : len(rows)] = rows.int()
        chosen = chosen.cuda()
        want = torch.cat([_engine_rows(keys, i, n // ratio) for i, n in enumerate(packed.lengths)])
        forward_equals(f"compressor, ratio {ratio}", parts[0], want)
        gradient_is_near("compressor", dict(zip(("kv_score", "ape", "norm"), pooling, strict=True)),
                         lambda *t: compressor.compress(compressor.vllm, *t, packed, cos_sin, ratio, EPS),
                         lambda *t: compressor.pooled(*t, packed, cos_sin, ratio, EPS))
    q_out, rows = attention_inputs.q_and_k(attention_inputs.VLLM, q, kv, packed.positions, cos_sin, EPS)
    forward_equals(f"q and window, ratio {ratio}", (q_out, rows), (
        turned, torch.cat([_engine_rows(window, i, n) for i, n in enumerate(packed.lengths)])))
    lists = attention_sparse.row_lists(packed, 128, ratio, top_k, chosen if ratio == 4 else None)
    all_rows, scale = torch.cat([*parts, rows]), 512**-0.5
    listed = chosen if ratio else torch.zeros(packed.tokens, 1, dtype=torch.int32, device="cuda")
    want = engine.prefill(turned, window, keys, listed, packed.lengths, sink, max(ratio, 1), top_k)
    forward_equals(f"attention, ratio {ratio}",
                   attention_sparse.attend(attention_sparse.vllm, q_out, all_rows, sink, *lists, scale), want)
    gradient_is_near("attention", {"q": q_out, "rows": all_rows, "sink": sink},
                     lambda q, rows, sink: attention_sparse.attend(attention_sparse.vllm, q, rows, sink, *lists, scale),
                     lambda q, rows, sink: attention_sparse.reference(q, rows, *lists, sink, scale))


def _engine_rows(pages, request, count):
    out = torch.zeros(1, max(1, count), 512, dtype=torch.bfloat16, device="cuda")
    if count:
        engine.gather_rows(pages, request, count, out, 0)
    return out[0, :count]


def test_q_and_k_gradient():
    packed, q, kv, _, _, cos_sin = scene(0)
    gradient_is_near("q and k", {"q": q, "kv": kv},
                     lambda *t: attention_inputs.q_and_k(attention_inputs.VLLM, *t, packed.positions, cos_sin, EPS),
                     lambda *t: attention_inputs.REFERENCE.q_and_k(*t, packed.positions, cos_sin, EPS))


def test_indexer():
    lengths, heads, dim, hidden, rank = (900, 77, 2), 64, 128, 4096, 1024
    packed, cos_sin = Packed(lengths, torch.device("cuda")), table()
    weights = indexer.IndexerWeights(
        normal(heads * dim, rank, spread=rank**-0.5), normal(heads, hidden, spread=hidden**-0.5),
        normal(4 * dim, hidden, spread=hidden**-0.5), normal(4, 2 * dim, spread=0.5, dtype=torch.float32),
        normal(dim, spread=0.1, shift=1.0),
    )
    x, qr = normal(packed.tokens, hidden), normal(packed.tokens, rank)
    kernels = indexer.vllm_kernels(linear_fp8.VLLM)
    q = engine.linear(*quant_fp8.quantise_weight(weights.wq_b.cpu()), qr).view(-1, heads, dim)
    from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32

    kv_score = bi_mm_fp32(x, weights.wkv_wgate)
    keys = engine.compress(kv_score, weights.ape, weights.norm, lengths, packed.positions, cos_sin, 4, EPS, dim)
    head_weights = bi_mm_fp32(x, weights.weights_proj).to(x.dtype)
    want = engine.choose(q, head_weights, keys, lengths, packed.positions, cos_sin, 128)
    assert (want[890] >= 0).all(), "the Top-K must have to choose"
    forward_equals("indexer", indexer.select(kernels, x, qr, weights, packed, cos_sin, 128, EPS), want)


def test_output_projection():
    from types import SimpleNamespace

    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.models.deepseek_v4.nvidia.ops import o_proj
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    heads, wo_a, positions = normal(129, 64, 512), normal(8 * 1024, 4096, spread=1 / 64), torch.arange(129).cuda()
    codes, scales = (t.cuda() for t in quant_fp8.quantise_weight(wo_a.cpu()))
    loaded = deepgemm_post_process_fp8_weight_block(codes, scales, (128, 128), is_deep_gemm_e8m0_used(), True, 8)
    recipe, aligned = o_proj.compute_fp8_einsum_recipe()
    want = o_proj.deep_gemm_fp8_o_proj(
        heads, positions, table(), SimpleNamespace(weight=loaded[0], weight_scale_inv=loaded[1]), lambda z: z,
        n_groups=8, heads_per_group=8, nope_dim=448, rope_dim=64, o_lora_rank=1024, einsum_recipe=recipe,
        tma_aligned_scales=aligned,
    )
    run = o_proj_fp8.o_proj_fp8
    forward_equals("o_proj_fp8", run(o_proj_fp8.VLLM, heads, wo_a, positions, table(), 8).flatten(1), want)
    gradient_is_near("o_proj_fp8", {"heads": heads, "wo_a": wo_a},
                     lambda h, w: run(o_proj_fp8.VLLM, h, w, positions, table(), 8),
                     lambda h, w: o_proj_fp8.EXACT.project(h, positions, table(), w, 8))


@pytest.mark.parametrize("hashed", [False, True])
def test_router(hashed):
    from vllm.model_executor.layers.fused_moe.router import dsv4_topk, fused_topk_bias_router

    logits, bias = normal(257, 256, spread=3.0, dtype=torch.float32), normal(256, spread=0.1, dtype=torch.float32)
    tokens = torch.arange(257).cuda() % 64
    lookup = torch.stack([torch.randperm(256, generator=torch.Generator().manual_seed(i))[:6] for i in range(64)])
    lookup = lookup.int().cuda()
    if hashed:
        weights, ids = torch.empty(257, 6, device="cuda"), torch.empty(257, 6, dtype=torch.int32, device="cuda")
        want = fused_topk_bias_router.vllm_topk_softplus_sqrt(
            weights, ids, torch.empty_like(ids), logits, True, None, tokens.int(), lookup, 1.5)
    else:
        want = dsv4_topk.dsv4_topk(logits, bias, torch.int32, 1.5)

    def run(z, kernels=router_dsv4.VLLM):
        if hashed:
            return router_dsv4.route_hashed(kernels, z, tokens, lookup, 1.5)
        return router_dsv4.route(kernels, z, bias, 6, 1.5)

    forward_equals("router, hashed" if hashed else "router", run(logits), tuple(want))
    gradient_is_near("router", {"logits": logits}, lambda z: run(z)[0],
                     lambda z: router_dsv4._chosen_weights(z, run(logits)[1], 1.5))
