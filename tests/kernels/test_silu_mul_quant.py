"""The expert activation: one rounding, one arithmetic in both layouts, the clamp applied."""
import pytest
import torch
from silu_cases import FORMATS, HIDDENS, LIMIT, assert_same_bytes, data, expected, spread_contiguous, spread_masked

from vllm.zero_mismatch.silu_mul_quant import (
    FP8_MAX,
    GROUP,
    TOLERANCE,
    gated_silu_quant_contiguous,
    gated_silu_quant_masked,
    product_reference,
    quantise_reference,
)

@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_contiguous_has_the_bits_of_the_reference(scale_format, hidden, limit):
    rows = data(9, hidden)
    codes, scales = gated_silu_quant_contiguous(rows, scale_format=scale_format, limit=limit)
    want_codes, want_scales = expected(rows, scale_format, limit)
    assert_same_bytes(scales, want_scales, "scales")
    assert_same_bytes(codes, want_codes, "codes")


COUNTS = [3, 0, 7, 1, 9]


@pytest.mark.parametrize("scale_format", FORMATS)
def test_masked_and_contiguous_rows_have_the_same_bits(scale_format):
    rows = data(sum(COUNTS), 640)
    want_codes, want_scales = expected(rows, scale_format, LIMIT)
    packed, starts, ends = spread_contiguous(rows, COUNTS, alignment=8)
    codes, scales = gated_silu_quant_contiguous(
        packed, scale_format=scale_format, limit=LIMIT, expert_ends=ends, alignment=8
    )
    slab_codes, slab_scales = gated_silu_quant_masked(
        spread_masked(rows, COUNTS, 12), torch.tensor(COUNTS, dtype=torch.int32), scale_format=scale_format, limit=LIMIT
    )
    at = 0
    for expert, count in enumerate(COUNTS):
        one = slice(at, at + count)
        place = slice(starts[expert], starts[expert] + count)
        assert_same_bytes(codes[place], want_codes[one], f"contiguous codes of expert {expert}")
        assert_same_bytes(scales[place], want_scales[one], f"contiguous scales of expert {expert}")
        assert_same_bytes(slab_codes[expert, :count], want_codes[one], f"masked codes of expert {expert}")
        assert_same_bytes(slab_scales[expert, :count], want_scales[one], f"masked scales of expert {expert}")
        at += count


def test_row_keeps_its_bits_in_any_batch():
    rows = data(33, 512)
    codes, scales = gated_silu_quant_contiguous(rows, scale_format="FLOAT32", limit=LIMIT)
    for at in (0, 16, 32):
        one_code, one_scale = gated_silu_quant_contiguous(rows[at: at + 1], scale_format="FLOAT32", limit=LIMIT)
        assert_same_bytes(one_code, codes[at: at + 1], f"codes of row {at}")
        assert_same_bytes(one_scale, scales[at: at + 1], f"scale of row {at}")


def test_rows_outside_every_expert_are_not_written():
    rows = data(sum(COUNTS), 128)
    packed, _, ends = spread_contiguous(rows, COUNTS, alignment=8)
    codes = torch.full((len(packed), 128), 1.0).to(torch.float8_e4m3fn)
    gated_silu_quant_contiguous(packed, codes, scale_format="FLOAT32", expert_ends=ends, alignment=8)
    gap = packed.isnan().any(-1)
    assert gap.any() and (codes[gap].float() == 1.0).all()


@pytest.mark.parametrize("scale_format", ["FLOAT32", "FLOAT32_CEIL_UE8M0"])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_accuracy_against_fp64(scale_format, limit):
    rows = data(17, 512)
    codes, scales = gated_silu_quant_contiguous(rows, scale_format=scale_format, limit=limit)
    exact = product_reference(rows, limit).unflatten(-1, (-1, GROUP))
    got = codes.double().unflatten(-1, (-1, GROUP)) * scales.double()[..., None]
    error = (got - exact).abs() / exact.abs().amax(-1, keepdim=True)
    assert error.max() <= TOLERANCE


def test_scale_of_an_exact_power_of_two_is_itself():
    """log2 and ceil of an approximate logarithm may overshoot; the exponent carry may not."""
    y = torch.zeros(8, GROUP)
    y[:, 0] = FP8_MAX * torch.exp2(torch.arange(8.0) - 4)
    rows = torch.cat([torch.full_like(y, 88.0), y / 88.0], dim=-1).to(torch.bfloat16)
    want = quantise_reference(product_reference(rows).to(torch.bfloat16), "FLOAT32_CEIL_UE8M0")[1]
    _, scales = gated_silu_quant_contiguous(rows, scale_format="FLOAT32_CEIL_UE8M0")
    assert_same_bytes(scales, want, "scales")


def test_zero_group_quantises_to_zero():
    codes, scales = gated_silu_quant_contiguous(
        torch.zeros(4, 256, dtype=torch.bfloat16), scale_format="FLOAT32_CEIL_UE8M0"
    )
    assert (codes.float() == 0).all() and (scales > 0).all()


def test_clamp_gates_from_above_and_up_on_both_sides():
    rows = torch.zeros(1, 256, dtype=torch.bfloat16)
    rows[0, :4] = torch.tensor([20.0, -20.0, 9.0, 20.0])
    rows[0, 128:132] = torch.tensor([20.0, 20.0, -20.0, 2.0])
    codes, scales = gated_silu_quant_contiguous(rows, scale_format="FLOAT32_CEIL_UE8M0", limit=LIMIT)
    got = codes.float()[0, :4] * scales[0, 0]
    assert got.tolist() == pytest.approx([99.995, 0.0, -89.99, 19.999], rel=2.0**-4, abs=1e-3)


def two_roundings(rows: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """Upstream's SM90 contiguous product (fp8_utils.py:437): silu to BF16, then the product to BF16."""
    gate, up = rows.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (1 + torch.exp(-gate))).to(torch.bfloat16) * up.to(torch.bfloat16)


def masked_bf16(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's masked kernel (activation_kernels.cu:511-531): everything in BF16, no clamp, a reciprocal."""
    y = two_roundings(rows).unflatten(-1, (-1, GROUP))
    scale = (y.abs().amax(-1, keepdim=True).float() * (1 / FP8_MAX)).to(torch.bfloat16)
    inverse = (1 / scale.float()).to(torch.bfloat16)
    codes = (y.float() * inverse.float()).to(torch.bfloat16).float().clamp(-FP8_MAX, FP8_MAX)
    return codes.to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1).float()


def codes_that_differ(got: torch.Tensor, other: torch.Tensor) -> int:
    return int((got.view(torch.uint8) != other.view(torch.uint8)).sum())


def test_stock_two_roundings_differ():
    """Counter-test: rounding silu to BF16 first moves codes."""
    rows = data(64, 512, spread=2.0)
    codes, _ = gated_silu_quant_contiguous(rows, scale_format="FLOAT32_CEIL_UE8M0")
    stock, _ = quantise_reference(two_roundings(rows), "FLOAT32_CEIL_UE8M0")
    assert codes_that_differ(codes, stock) > 0


def test_stock_masked_arithmetic_differs_from_stock_contiguous():
    """Counter-test: upstream's two layouts disagree with each other, so a rollout cannot match a trainer."""
    rows = data(64, 512, spread=2.0)
    stock_contiguous, _ = quantise_reference(two_roundings(rows), "FLOAT32")
    assert codes_that_differ(masked_bf16(rows)[0], stock_contiguous) > 0


def test_stock_masked_path_forgets_the_clamp():
    """Counter-test: entries beyond the limit are quantised as they are."""
    rows = torch.full((1, 256), 20.0, dtype=torch.bfloat16)
    stock_codes, stock_scale = masked_bf16(rows)
    codes, scales = gated_silu_quant_contiguous(rows, scale_format="FLOAT32", limit=LIMIT)
    assert float(stock_codes.float()[0, 0] * stock_scale[0, 0]) > 300
    assert float(codes.float()[0, 0] * scales[0, 0]) == pytest.approx(100, rel=2.0**-4)


@pytest.mark.parametrize(
    ("rows", "match"),
    [(torch.zeros(4, 256), "BF16"), (torch.zeros(4, 200, dtype=torch.bfloat16), "multiples of 256")],
)
def test_unsupported_rows_are_refused(rows, match):
    with pytest.raises(ValueError, match=match):
        gated_silu_quant_contiguous(rows, scale_format="FLOAT32")


def test_unknown_scale_format_is_refused():
    with pytest.raises(ValueError, match="FLOAT32_CEIL_UE8M0"):
        gated_silu_quant_contiguous(torch.zeros(4, 256, dtype=torch.bfloat16), scale_format="E8M0")
