"""On the GPU: FP8 projections with one scale a tensor (Cutlass) give a row the same bits at every M.

As released, its tile follows M (at 16, 64, 128 and 8192 rows); under VLLM_BATCH_INVARIANT=1 it follows N alone
(scaled_mm_sm90_fp8_dispatch.cuh).
"""
import pytest
import torch
from mm_cases import assert_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BATCHES = (1, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000, 4097, 8193)
# in_proj, out_proj, an MLP and qkv of a model 2,688 wide; in_proj and out_proj of the tiny one: [N, K]
SHAPES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712), (4608, 2688), (4112, 512), (512, 1024)]


def _operands(n, k, rows):
    generator = torch.Generator("cuda").manual_seed(n + k)
    x = torch.randn(rows, k, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(n, k, device="cuda", generator=generator)
    scale = weight.abs().amax() / 448.0
    return x, (weight / scale).to(torch.float8_e4m3fn).t(), torch.tensor(5.3 / 448.0, device="cuda"), scale


def _product(x, weight, scale_x, scale_w):
    from vllm import _custom_ops as ops

    codes, _ = ops.scaled_fp8_quant(x, scale_x)
    return ops.cutlass_scaled_mm(codes, weight, scale_x, scale_w, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("n,k", SHAPES)
def test_row_keeps_its_bits_at_every_m(n, k):
    x, *rest = _operands(n, k, max(BATCHES))
    whole = _product(x, *rest)
    for rows in BATCHES:
        assert_same_bits(_product(x[:rows], *rest), whole[:rows], f"{rows} rows")
    assert_same_bits(_product(x[1000:1300], *rest), whole[1000:1300], "rows from the middle")


@pytest.mark.parametrize("n,k", SHAPES)
def test_result_is_the_product_of_the_codes(n, k):
    x, weight, scale_x, scale_w = _operands(n, k, 33)
    codes = (x.float() / scale_x).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = codes.double() @ weight.double() * (scale_x * scale_w).double()
    error = (_product(x, weight, scale_x, scale_w).double() - expected).abs().max() / expected.abs().max()
    assert error < 2**-7, f"{float(error):.4f} of the largest value; BF16 rounds by up to 2**-8 of each"
