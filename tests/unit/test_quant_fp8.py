"""Block FP8 of weights and rows against rationals, number by number, and the claim about the engine's second pass."""
import plain_fp8
import pytest
import torch

from megatron.zero_mismatch import quant_fp8


def master(n=128, k=256, seed=0, spread=1.0):
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * spread).bfloat16()


@pytest.mark.parametrize("spread", [1.0, 2.0**-9, 3e4])
def test_weight_codes_and_scales_are_those_of_exact_arithmetic(spread):
    weight = master(spread=spread)
    weight[5, :128] = 0  # zeros and subnormal codes are in
    weight[:, 130] *= 1e-3
    codes, scales = quant_fp8.quantise_weight(weight)
    for i, j, block in plain_fp8.blocks_of(weight):
        want, scale = plain_fp8.quantise(block.flatten().tolist(), quant_fp8.WEIGHT_FLOOR)
        got = codes[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].float().flatten()
        assert got.tolist() == want and scales[i, j].item() == scale


@pytest.mark.parametrize("group", [64, 128])
def test_row_codes_and_scales_are_those_of_exact_arithmetic(group):
    rows = master(6, 256, seed=1)
    rows[2] = 0
    rows[3] *= 2.0**-30
    codes, scales = quant_fp8.quantise_rows(rows, group)
    for r, row in enumerate(rows):
        for g in range(256 // group):
            want, scale = plain_fp8.quantise(row[g * group : (g + 1) * group].tolist(), quant_fp8.TOKEN_FLOOR)
            assert codes[r, g * group : (g + 1) * group].float().tolist() == want and scales[r, g].item() == scale


def test_every_bf16_significand_gets_the_scale_of_exact_arithmetic():
    """ceil(log2(x / 448)) is where a rounded logarithm could slip: all 128 significands, at several exponents."""
    largest = torch.cat([(128 + torch.arange(128)) * 2.0**e for e in (-30, -8, -7, 0, 40)]).bfloat16()
    _, scales = quant_fp8.quantise_rows(largest[:, None].expand(-1, 128))
    for x, scale in zip(largest.tolist(), scales.flatten().tolist(), strict=True):
        assert scale == plain_fp8.scale_of(plain_fp8.Fraction(x), plain_fp8.Fraction(quant_fp8.TOKEN_FLOOR))


@pytest.mark.parametrize("seed", range(4))
def test_the_engines_second_pass_changes_no_value(seed):
    """`requant_weight_ue8m0_inplace`: dequantise, cast again. The exported codes are a fixed point in value."""
    weight = master(512, 512, seed)
    for i, j, block in plain_fp8.blocks_of(weight):  # some blocks whose largest code is 224, where the scale halves
        if (i + j) % 2:
            block[0, 0] = 225 * 2.0**-6
            block.clamp_(-225 * 2.0**-6, 225 * 2.0**-6)
    codes, scales = quant_fp8.quantise_weight(weight)
    once = quant_fp8.dequantise_weight(codes, scales)
    again, scales_again = quant_fp8.quantise_weight(once.bfloat16())
    assert torch.equal(once, once.bfloat16().float()), "a code times a power of two is a BF16 number"
    assert torch.equal(quant_fp8.dequantise_weight(again, scales_again), once)
    assert (scales_again != scales).any(), "no block reached the case that the claim is about"


def test_error_is_within_the_stated_tolerance():
    rows = master(64, 1024, seed=3)
    error = (quant_fp8.dequantise_rows(*quant_fp8.quantise_rows(rows)) - rows.float()).unflatten(-1, (-1, 128)).abs()
    bound = rows.float().unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True) * quant_fp8.TOLERANCE
    assert (error <= bound).all() and error.max() > 0


def test_stacked_experts_quantise_as_each_alone():
    experts = torch.stack([master(seed=s) for s in range(3)])
    codes, scales = quant_fp8.quantise_weight(experts)
    for e, weight in enumerate(experts):
        alone = quant_fp8.quantise_weight(weight)
        assert torch.equal(codes[e].float(), alone[0].float()) and torch.equal(scales[e], alone[1])


def test_partial_blocks_are_refused():
    with pytest.raises(ValueError, match="multiples of 128"):
        quant_fp8.quantise_weight(master(100, 256))
