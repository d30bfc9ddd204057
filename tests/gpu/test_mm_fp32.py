"""On the GPU: the compiled fixed-order product at real shapes, in graphs, and beside what upstream runs instead."""
import pytest
import torch
from mm_cases import assert_same_bits, differing_words, operands

from vllm.zero_mismatch import mm_fp32
from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32, reference, tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# Router and indexer compressor, ratio-128 and ratio-4 compressor, indexer weights, tiny and full lm_head. K = 4096 is
# the hidden size.
SHAPES = [(256, 4096), (512, 4096), (1024, 4096), (2048, 4096), (64, 4096), (8192, 4096), (129280, 4096)]
BATCHES = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 4097,
           8192)


def _switch(n, k, x_dtype=torch.bfloat16, w_dtype=torch.bfloat16):
    """The largest batch whose slices have programs of their own, 0 where none has."""
    tile = mm_fp32._tile(n, x_dtype, w_dtype)[1]
    return max((m for m in range(16, 2**13, 16) if mm_fp32._places(m, n, k, tile) > 1), default=0)


def _batches(n, k):
    switch = _switch(n, k)
    around = (switch - 1, switch, switch + 1) if switch else ()
    return sorted({m for m in (*BATCHES, *around) if 1 <= m <= 8192 and m * n <= 2**27})


@pytest.mark.parametrize("n,k", SHAPES)
def test_row_keeps_its_bits_in_any_batch(n, k):
    batches = _batches(n, k)
    x, weight = operands(batches[-1], n, k, device="cuda")
    whole = bi_mm_fp32(x, weight)
    for m in batches:
        assert_same_bits(bi_mm_fp32(x[:m], weight), whole[:m], f"first {m} rows")
    for row in (1, 7, 8, 15, 16, 63):
        assert_same_bits(bi_mm_fp32(x[row : row + 1], weight), whole[row : row + 1], f"row {row} alone")


@pytest.mark.parametrize("n,k", [(64, 4096), (256, 4096), (1024, 4096), (2048, 4096), (8192, 4096), (2048, 4000),
                                 (256, 1024), (40, 257), (40, 129), (40, 96)])  # the last ones: few steps of K
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_place_of_the_slices_does_not_reach_the_bits(n, k, dtype, monkeypatch):
    x, weight = operands(300, n, k, dtype, dtype, device="cuda")
    found = []
    for bound in (0, 2**31 - 1):
        monkeypatch.setattr(mm_fp32, "_SPREAD", bound)
        found.append(bi_mm_fp32(x, weight))
    assert_same_bits(found[1], found[0], "slices on programs of their own")


@pytest.mark.parametrize("n,k", [*SHAPES[:6], (256, 1024), (40, 129)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_height_of_the_tile_does_not_reach_the_bits(n, k, dtype, monkeypatch):
    x, weight = operands(130, n, k, dtype, dtype, device="cuda")
    want = bi_mm_fp32(x, weight)
    _, tile = mm_fp32._tile(n, dtype, dtype)
    for height in tile.heights:
        monkeypatch.setattr(mm_fp32, "_TILES_16BIT", ((2**31 - 1, tile._replace(heights=(height,))),))
        assert_same_bits(bi_mm_fp32(x, weight), want, f"tiles of {height} rows")


@pytest.mark.parametrize("n,k", [(256, 4096), (2048, 4096)])
def test_address_and_stride_do_not_reach_the_bits(n, k):
    """An odd address compiles another binary, whose loads are narrower; its products must be the same."""
    x, weight = operands(65, n, k, device="cuda")
    want = bi_mm_fp32(x, weight)
    store = torch.empty(65 * (k + 3) + 1, dtype=x.dtype, device="cuda")
    moved = store[1:].view(65, k + 3)[:, :k]
    moved.copy_(x)
    for m in (1, 65):
        assert_same_bits(bi_mm_fp32(moved[:m], weight), want[:m], f"{m} rows at odd addresses")


def test_products_on_several_streams_do_not_meet():
    """The compressors project on side streams, at once."""
    pairs = [operands(17, n, 4096, device="cuda", seed=n) for n in (256, 512, 1024, 2048)]
    alone = [bi_mm_fp32(*pair) for pair in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    found = []
    for _ in range(50):
        for stream, pair in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                found.append(bi_mm_fp32(*pair))
    torch.cuda.synchronize()
    for number, out in enumerate(found):
        assert_same_bits(out, alone[number % len(pairs)], f"call {number}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_keeps_its_bits_for_each_dtype(dtype):
    x, weight = operands(513, 256, 1024, dtype, dtype, device="cuda")
    whole = bi_mm_fp32(x, weight)
    switch = _switch(256, 1024, dtype, dtype)
    for m in sorted({1, 16, 17, 128, 513, *(m for m in (switch, switch + 1) if m <= 513)}):
        assert_same_bits(bi_mm_fp32(x[:m], weight), whole[:m], f"first {m} rows")


@pytest.mark.parametrize("n,k", SHAPES[:6])
@pytest.mark.parametrize("m", [1, 17, 257, 2049])
def test_result_is_the_exact_product_within_fp32_accumulation(m, n, k):
    x, weight = operands(m, n, k, device="cuda")
    error = (bi_mm_fp32(x, weight).double() - reference(x, weight)).abs()
    assert (error <= tolerance(x, weight)).all(), f"max error {error.max().item()}"


@pytest.mark.parametrize("n,k", [(40, 1), (40, 31), (65, 129), (520, 257), (1025, 100)])
def test_odd_shapes_are_the_exact_product_too(n, k):
    for m in (1, 17, 65, 129):
        x, weight = operands(m, n, k, device="cuda")
        error = (bi_mm_fp32(x, weight).double() - reference(x, weight)).abs()
        assert (error <= tolerance(x, weight)).all(), f"{m} rows: max error {error.max().item()}"


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


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("n,k", SHAPES[:4])
def test_a_padded_graph_gives_the_bits_of_eager(n, k, rows):
    """Megatron PR #6521: one and two tokens, padded to a graph's size, were reduced otherwise than eager ones."""
    x, weight = operands(64, n, k, device="cuda")
    eager = bi_mm_fp32(x[:rows], weight)
    graph = torch.cuda.CUDAGraph()
    bi_mm_fp32(x, weight)
    with torch.cuda.graph(graph):
        out = bi_mm_fp32(x, weight)
    x[rows:] = float("nan")  # what a padded slot may hold
    graph.replay()
    assert_same_bits(out[:rows], eager, f"{rows} rows in a graph of 64")


@pytest.mark.parametrize("n,k", [(256, 4096), (1024, 4096)])
def test_stock_cublas_changes_a_rows_bits_with_the_batch(n, k):
    """Counter-test: torch.mm(out_dtype=float32), what the hooked call sites run without the patches."""
    x, weight = operands(4097, n, k, device="cuda")

    def product(m):
        return torch.mm(x[:m], weight.T, out_dtype=torch.float32)[0]

    whole = product(4097)
    changed = [m for m in _batches(n, k) if differing_words(product(m), whole)]
    assert changed, "cuBLAS gave row 0 the same bits at every M: the patches may no longer be needed"
