"""The quantised Nemotron-H trainer's operators on the GPU: the bits of vLLM's own layers, and gradients against fp64.

The layers are upstream's classes, called as its models call them.
"""
import types

import pytest
import torch
from humming_experts import Experts, routed
from mamba2_cases import assert_same_bits
from megatron.zero_mismatch import (
    attention,
    attention_fp8,
    experts,
    experts_nvfp4,
    linear_fp8_static,
    quant_nvfp4,
)
from megatron.zero_mismatch.batched import matmul
from megatron.zero_mismatch.packing import Packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PAGE, HEADS, KV_HEADS, DIM = 1408, 8, 2, 128
# A product of BF16 operands, accumulated in fp32 and rounded once, is off by 2**-9; a gradient has up to five such
# roundings behind each other (mamba2_replay.TOLERANCE).
TOLERANCE = 5 * 2**-9
LENGTHS = (129, 300, 1, 128, 5)


def normal(*shape, seed=0, size=1.0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * size).bfloat16()


def near(found, want, what):
    error = float((found.double() - want).norm() / want.norm())
    assert error <= TOLERANCE, f"{what}: off by {error:.5f} of its norm, allowed {TOLERANCE:.5f}"


def no_compilation():
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    return set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE)))


# ---- FP8 projections

def fp8_layer(master, input_scale):
    """Upstream's Cutlass layer, its parameters as ModelOpt's method leaves them."""
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    settings = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticTensorSym, activation_quant_key=kFp8StaticTensorSym, weight_shape=master.shape,
        input_dtype=torch.bfloat16, out_dtype=torch.bfloat16)
    kernel = CutlassFP8ScaledMMLinearKernel(settings, ("weight", "weight_scale", "input_scale", "input_scale_ub"))
    codes, scale = linear_fp8_static.cast(master)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = torch.nn.Parameter(codes.t(), requires_grad=False), scale
    layer.input_scale, layer._input_quant_key = input_scale, kernel.input_quant_key()
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x), layer


def test_cast_has_the_same_bits_on_either_device():
    """The checkpoint is written on a CPU, the trainer casts on the GPU."""
    master = normal(3, 512, 512, size=1 / 20)
    for cast in (quant_nvfp4.quantise, linear_fp8_static.cast):
        for own, host in zip(cast(master), cast(master.cpu()), strict=True):
            own, host = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (own, host))
            assert torch.equal(own, host), cast.__module__


@pytest.mark.parametrize("n, k", [(4112, 512), (512, 1024), (10304, 2688)])
def test_projection_has_the_engines_bits(n, k):
    x, master, scale = normal(563, k, size=2), normal(n, k, size=k**-0.5), torch.tensor(5.3 / 448, device="cuda")
    with no_compilation():
        apply, _ = fp8_layer(master, scale)
        want = apply(x)
    own = linear_fp8_static.linear_fp8_static(linear_fp8_static.VLLM, x, master, scale.reshape(1))
    assert_same_bits(own, want, "all rows")
    assert_same_bits(linear_fp8_static.linear_fp8_static(linear_fp8_static.VLLM, x[7:60], master, scale), own[7:60],
                     "rows from the middle")


def test_projection_behind_relu_squared_has_the_engines_bits():
    from vllm.model_executor.layers.activation import ReLUSquaredActivation
    from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

    x, master, scale = normal(563, 1024, size=2), normal(512, 1024, size=1 / 32), torch.tensor(22 / 448, device="cuda")
    with no_compilation():
        apply, layer = fp8_layer(master, scale)
        squared = maybe_fused_act_quant(ReLUSquaredActivation(), x, layer)
        assert isinstance(squared, QuantizedActivation), "the engine squares and quantises in one kernel"
        want = apply(squared)
    own = linear_fp8_static.linear_fp8_static(linear_fp8_static.VLLM, x, master, scale.reshape(1), squared=True)
    assert_same_bits(own, want, "all rows")


@pytest.mark.parametrize("squared", [False, True])
def test_projection_gradient_is_that_of_what_was_multiplied(squared):
    x, master = normal(300, 512).requires_grad_(), normal(256, 512, size=1 / 32).requires_grad_()
    scale, grad = torch.tensor([(22 if squared else 5.3) / 448], device="cuda"), normal(300, 256, seed=1)
    linear_fp8_static.linear_fp8_static(linear_fp8_static.VLLM, x, master, scale, squared=squared).backward(grad)
    k, weight = linear_fp8_static.VLLM, linear_fp8_static.cast(master.detach())
    codes = (k.square if squared else k.quantise)(x.detach(), scale)
    rows, wide = codes.double() * scale.double(), weight.codes.double() * weight.scale.double()
    to_rows = grad.double() @ wide
    near(x.grad, to_rows * (2 * x.detach().double().clamp(min=0) if squared else 1), "x")
    near(master.grad, grad.double().T @ rows, "master")


# ---- attention over the FP8 cache

def scales():
    made = torch.tensor([1.0, 4.7 / 448, 4.1 / 448], device="cuda")
    return attention_fp8.Scales(*made.split(1))


def qkv(tokens):
    whole = normal(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    parts = whole.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
    return [part.unflatten(1, (-1, DIM)) for part in parts]


def engine_attention(q, k, v, packed: Packed, new: list[int]):
    """Upstream's layer: keys and values of every token stored, the last new[i] queries of each sequence asked."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    scale = scales()
    layer = types.SimpleNamespace(**{f"_{of}_scale": getattr(scale, of).reshape(()) for of in "qkv"})
    impl = TritonAttentionImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "fp8")
    assert impl.supports_quant_query_input, "the engine quantises queries before this layer"
    query, _ = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)(q.flatten(1), layer._q_scale)
    pages = attention.Pages.of(packed, PAGE)
    cache = torch.zeros(pages.count, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8, device="cuda")
    impl.do_kv_cache_update(layer, k, v, cache, pages.rows)
    asked = torch.cat([torch.arange(end - n, end) for (_, end), n in zip(packed.bounds, new, strict=True)]).cuda()
    starts = torch.tensor([0, *new]).cumsum(0).to("cuda", torch.int32)
    metadata = types.SimpleNamespace(
        num_actual_tokens=len(asked), query_start_loc=starts, seq_lens=packed.starts.diff(), max_query_len=max(new),
        max_seq_len=max(packed.lengths), block_table=pages.table, causal=True, seq_threshold_3D=None,
        num_par_softmax_segments=None, softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None,
        mm_prefix_range_tensor=None, rswa_prefix_lens=None, rswa_window=None)
    out = torch.empty(len(asked), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    impl.forward(layer, query.view(-1, HEADS, DIM)[asked], k, v, cache, metadata, out)
    return out, asked


@pytest.mark.parametrize("new", [LENGTHS, (1,) * len(LENGTHS), (40, 1, 1, 128, 3)], ids=["prefill", "decode", "mixed"])
def test_attention_has_the_engines_bits(new):
    packed = Packed(LENGTHS, torch.device("cuda"))
    q, k, v = qkv(packed.tokens)
    with no_compilation():
        want, asked = engine_attention(q, k, v, packed, list(new))
    own = attention_fp8.attention_fp8(attention_fp8.vllm(PAGE), q, k, v, packed, DIM**-0.5, scales())
    assert_same_bits(own[asked], want, str(new))


def test_attention_gradient_is_that_of_what_was_read():
    packed = Packed(LENGTHS, torch.device("cuda"))
    parts = [t.contiguous().detach().requires_grad_() for t in qkv(packed.tokens)]
    grad = normal(packed.tokens, HEADS, DIM, seed=2)
    kernels = attention_fp8.vllm(PAGE)
    attention_fp8.attention_fp8(kernels, *parts, packed, DIM**-0.5, scales()).backward(grad)
    codes, _ = kernels.quantise(*(p.detach() for p in parts), scales(), packed)
    read = [(c.double() * s.double()).requires_grad_() for c, s in zip(codes, scales(), strict=True)]
    outs = []
    for a, b in packed.bounds:
        keys, values = (t[a:b].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for t in read[1:])
        scores = matmul(read[0][a:b].transpose(0, 1), keys.mT) * DIM**-0.5
        scores = scores.masked_fill(torch.ones(b - a, b - a, device="cuda").triu(1).bool(), float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        outs.append(matmul(weights, values).transpose(0, 1))
    torch.cat(outs).backward(grad.double())
    for name, own, want in zip("qkv", parts, read, strict=True):
        near(own.grad, want.grad, name)


# ---- experts

@pytest.fixture(scope="module")
def engine():
    return Experts("tiny")


def test_conversion_has_the_engines_bits_and_reads_back(engine):
    for part, master in zip(("w13", "w2"), engine.masters, strict=True):
        operand = experts_nvfp4.VLLM.operand(master)
        for name, tensor in operand.resident.items():
            assert torch.equal(tensor, getattr(engine.layer, f"{part}_{name}")), f"{part}_{name}"
        values = operand.values(torch.bfloat16)
        assert torch.equal(values.float(), getattr(engine, part).bfloat16().float()), "as that test dequantises"
        read = experts_nvfp4.VLLM.read(operand.resident, *master.shape)
        # A zero's sign does not reach the sum it is the only term of.
        assert torch.equal(read.float(), values.float()), f"{part}: {int((read != values).sum())} values differ"


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_experts_have_the_engines_bits(engine, tokens):
    x, ids, weights = routed(engine, tokens)
    own = experts_nvfp4.experts_nvfp4(experts_nvfp4.VLLM, x, *engine.masters, weights, ids)
    assert_same_bits(own, engine(x, ids, weights), f"{tokens} tokens")


def test_experts_gradient_is_that_of_what_was_multiplied(engine):
    x, ids, weights = routed(engine, 300)
    inputs = [t.detach().clone().requires_grad_() for t in (x, *engine.masters, weights)]
    grad = normal(*x.shape, seed=3)
    experts_nvfp4.experts_nvfp4(experts_nvfp4.VLLM, *inputs, ids).backward(grad)
    parts = [quant_nvfp4.dequantise(*quant_nvfp4.quantise(m), torch.float64) for m in engine.masters]
    exact = [t.detach().double().requires_grad_() for t in (x, *parts, weights)]
    experts.reference(*exact, ids).backward(grad.double())
    for name, own, want in zip(("x", "w13", "w2", "weights"), inputs, exact, strict=True):
        near(own.grad, want.grad, name)
