"""bi_mm_fp32 on the CPU, the same source under Triton's interpreter. tests/gpu asks the same of the hardware."""
import pytest
import torch
import torch.nn.functional as F
from mm_cases import assert_same_bits, operands

from vllm.zero_mismatch import mm_fp32
from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32, reference, tolerance

# Around the tile edges (16 and 64 rows) and the batch sizes at which upstream changes kernels.
BATCHES = (1, 2, 15, 16, 17, 31, 33, 64, 65, 70)
PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("x_dtype,w_dtype", PAIRS)
@pytest.mark.parametrize("n", [40, 513])  # a table row each: narrow and medium
def test_row_keeps_its_bits_in_any_batch(n, x_dtype, w_dtype):
    x, weight = operands(max(BATCHES), n, 160, x_dtype, w_dtype)
    whole = bi_mm_fp32(x, weight)
    for row in (0, 1, 15, 16, 17, 63, 64, 69):
        assert_same_bits(bi_mm_fp32(x[row : row + 1], weight), whole[row : row + 1], f"row {row} alone")
    for m in BATCHES:
        assert_same_bits(bi_mm_fp32(x[:m], weight), whole[:m], f"first {m} rows")
    assert_same_bits(bi_mm_fp32(x.flip(0), weight), whole.flip(0), "reversed batch")


def test_neighbouring_nan_and_infinity_stay_in_their_rows():
    x, weight = operands(33, 40, 160)
    clean = bi_mm_fp32(x, weight)
    x[5] = float("nan")
    x[20] = float("inf")
    keep = [i for i in range(33) if i not in (5, 20)]
    assert_same_bits(bi_mm_fp32(x, weight)[keep], clean[keep], "rows beside NaN and infinity")


@pytest.mark.parametrize("x_dtype,w_dtype", PAIRS)
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (3, 40, 31), (17, 65, 129), (65, 520, 257)])
def test_result_is_the_exact_product_within_fp32_accumulation(m, n, k, x_dtype, w_dtype):
    x, weight = operands(m, n, k, x_dtype, w_dtype)
    error = (bi_mm_fp32(x, weight).double() - reference(x, weight)).abs()
    assert (error <= tolerance(x, weight)).all(), f"max error {error.max().item()}"


def test_views_give_the_bits_of_their_contiguous_copies():
    x, weight = operands(20, 48, 96)
    wide = torch.cat([x, x], dim=1)
    want = bi_mm_fp32(x, weight)
    assert_same_bits(bi_mm_fp32(wide[:, :96], weight), want, "rows with a stride")
    assert_same_bits(bi_mm_fp32(x.T.contiguous().T, weight.T.contiguous().T), want, "transposed storage")


def test_empty_batch_gives_an_empty_result():
    x, weight = operands(0, 48, 96)
    assert bi_mm_fp32(x, weight).shape == (0, 48)


def test_tile_depends_on_the_weight_and_dtypes_only():
    """The contract of the table: one row for each weight, bounds ascending, every N served."""
    for table in (mm_fp32._TILES_16BIT, mm_fp32._TILES_FP32):
        bounds = [row[0] for row in table]
        assert bounds == sorted(bounds) and bounds[-1] == 2**31 - 1
    assert mm_fp32._tile(256, torch.bfloat16, torch.bfloat16) == (False, (16, 32, 128, 5, 4))
    assert mm_fp32._tile(256, torch.bfloat16, torch.float32)[0], "a mixed product must be ieee fp32, never TF32"


def test_kernel_is_not_specialised_on_the_batch():
    """M = 1 and M divisible by 16 would otherwise compile to other binaries."""
    launch_options = mm_fp32._mm_fp32_kernel.__dict__.get("kwargs", {}) or vars(mm_fp32._mm_fp32_kernel)
    assert "M" in launch_options["do_not_specialize"]


def test_operator_traces_to_its_shape():
    with torch.device("meta"):
        out = torch.ops.zero_mismatch.mm_fp32(torch.empty(7, 64), torch.empty(9, 64))
    assert out.shape == (7, 9) and out.dtype == torch.float32


@pytest.mark.parametrize(
    "x,weight,found",
    [
        (torch.zeros(2, 3, 4), torch.zeros(5, 4), "(2, 3, 4)"),
        (torch.zeros(2, 4), torch.zeros(4, 5), "(4, 5)"),
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(5, 4), "float64"),
        (torch.zeros(2, 4), torch.zeros(5, 4, dtype=torch.int8), "int8"),
    ],
)
def test_unsupported_operands_are_refused_with_what_was_found(x, weight, found):
    with pytest.raises(ValueError, match="expected") as error:
        bi_mm_fp32(x, weight)
    assert found in str(error.value)


def test_stock_router_contract_rounds_logits_to_bf16():
    """F.linear on BF16, upstream's batch-invariant gate, is another number and ties experts that fp32 keeps apart."""
    x, weight = operands(8, 256, 512)
    stock = F.linear(x, weight).float()
    ours = bi_mm_fp32(x, weight)
    assert (stock.view(torch.int32) != ours.view(torch.int32)).float().mean() > 0.9
    assert all(len(row.unique()) == 256 for row in ours), "fp32 logits keep the experts apart"
    assert any(len(row.unique()) < 256 for row in stock), "BF16 logits tie some, so the tie rule picks the expert"


def test_stock_reduction_order_changes_bits():
    """What a split-K chosen for small M does to a row: the same factors, another grouping, other bits."""
    x, weight = operands(4, 64, 1024)
    halves = bi_mm_fp32(x[:, :512], weight[:, :512]) + bi_mm_fp32(x[:, 512:], weight[:, 512:])
    whole = bi_mm_fp32(x, weight)
    assert (halves.view(torch.int32) != whole.view(torch.int32)).any()
