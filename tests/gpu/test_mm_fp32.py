"""On the GPU: the compiled fixed-order product at real shapes, in graphs, and beside what upstream runs instead."""
import pytest
import torch
from mm_cases import assert_same_bits, differing_words, operands

from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32, reference, tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# Router and indexer compressor, ratio-128 and ratio-4 compressor, tiny and full lm_head; K = 4096 is the hidden size.
SHAPES = [(256, 4096), (512, 4096), (1024, 4096), (2048, 4096), (8192, 4096), (129280, 4096)]
BATCHES = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 4097)


def _batches(n):
    return [m for m in BATCHES if m * n <= 2**27]


@pytest.mark.parametrize("n,k", SHAPES)
def test_row_keeps_its_bits_in_any_batch(n, k):
    batches = _batches(n)
    x, weight = operands(batches[-1], n, k, device="cuda")
    whole = bi_mm_fp32(x, weight)
    for m in batches:
        assert_same_bits(bi_mm_fp32(x[:m], weight), whole[:m], f"first {m} rows")
    for row in (1, 7, 8, 15, 16, 63):
        assert_same_bits(bi_mm_fp32(x[row : row + 1], weight), whole[row : row + 1], f"row {row} alone")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_keeps_its_bits_for_each_dtype(dtype):
    x, weight = operands(513, 256, 1024, dtype, dtype, device="cuda")
    whole = bi_mm_fp32(x, weight)
    for m in (1, 16, 17, 128, 513):
        assert_same_bits(bi_mm_fp32(x[:m], weight), whole[:m], f"first {m} rows")


@pytest.mark.parametrize("n,k", SHAPES[:5])
@pytest.mark.parametrize("m", [1, 17, 257])
def test_result_is_the_exact_product_within_fp32_accumulation(m, n, k):
    x, weight = operands(m, n, k, device="cuda")
    error = (bi_mm_fp32(x, weight).double() - reference(x, weight)).abs()
    assert (error <= tolerance(x, weight)).all(), f"max error {error.max().item()}"


def test_fp32_operands_are_not_rounded_to_tf32():
    x, weight = operands(64, 256, 1024, torch.float32, torch.float32, device="cuda")
    error = (bi_mm_fp32(x, weight).double() - reference(x, weight)).abs().max().item()
    tf32 = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (x, weight)]
    assert error < 0.1 * (reference(*tf32) - reference(x, weight)).abs().max().item()


def test_nan_rows_leave_their_neighbours_alone():
    x, weight = operands(64, 256, 4096, device="cuda")
    clean = bi_mm_fp32(x, weight)
    x[1::2] = float("nan")
    assert_same_bits(bi_mm_fp32(x, weight)[::2], clean[::2], "rows beside NaN")


@pytest.mark.parametrize("n,k", SHAPES[:4])
def test_a_padded_graph_gives_the_bits_of_eager(n, k):
    x, weight = operands(64, n, k, device="cuda")
    eager = bi_mm_fp32(x[:33], weight)
    graph = torch.cuda.CUDAGraph()
    bi_mm_fp32(x, weight)
    with torch.cuda.graph(graph):
        out = bi_mm_fp32(x, weight)
    x[33:] = float("nan")  # what a padded slot may hold
    graph.replay()
    assert_same_bits(out[:33], eager, "33 rows in a graph of 64")


@pytest.mark.parametrize("n,k", [(256, 4096), (1024, 4096)])
def test_stock_cublas_changes_a_rows_bits_with_the_batch(n, k):
    """Counter-test: torch.mm(out_dtype=float32), what the hooked call sites run without the patches."""
    x, weight = operands(4097, n, k, device="cuda")

    def product(m):
        return torch.mm(x[:m], weight.T, out_dtype=torch.float32)[0]

    whole = product(4097)
    changed = [m for m in _batches(n) if differing_words(product(m), whole)]
    assert changed, "cuBLAS gave row 0 the same bits at every M: the patches may no longer be needed"
