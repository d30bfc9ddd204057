"""Humming's kernel tables: one order of sums passes; an order that follows the number of rows is refused and named."""
import pytest
from vllm.zero_mismatch.experts_humming import check_tables


def _row(above, up_to, block=(8, 256, 64), warp=(8, 32, 64), **changes):
    return [above, up_to, {"block_shape": block, "warp_shape": warp, "use_stream_k": False, "use_f16_accum": False,
                           "num_stages": 4, "mma_type": "wgmma"} | changes]


# humming-kernels 0.1.19 on an H200, 1856 x 2688, 128 experts: under batch invariance, and without.
INVARIANT = [_row(0, 344), _row(344, 1160, (16, 256, 64), (16, 32, 64)),
             _row(1160, 1 << 30, (128, 256, 64), (128, 32, 64))]
STOCK = [_row(0, 48, (8, 128, 128), num_ctas_per_sm=2, use_stream_k=True),
         _row(48, 1 << 30, (16, 512, 64), (16, 32, 64))]


def test_table_with_one_order_passes():
    check_tables(w13=INVARIANT, w2=INVARIANT[:1])


@pytest.mark.parametrize("table", [
    STOCK,
    [*INVARIANT, _row(9, 10, use_stream_k=True)],
    [*INVARIANT, _row(9, 10, block=(8, 256, 128), warp=(8, 32, 128))],
    [*INVARIANT, _row(9, 10, mma_type="mma")],
    [_row(0, 9, block=(8, 256, 128))],                      # two K partitions in a tile: joined in another order
    [_row(0, 9, use_f16_accum=True)],
])  # fmt: skip
def test_table_whose_order_follows_the_rows_is_refused(table):
    with pytest.raises(ValueError, match=r"Humming's kernels for w2 do not add in one order: at \d+ < rows <= \d+"):
        check_tables(w13=INVARIANT, w2=table)


def test_stream_k_is_refused_where_humming_leaves_it_at_its_default():
    row = _row(0, 9)
    del row[2]["use_stream_k"]
    with pytest.raises(ValueError, match="'stream-K': True"):
        check_tables(w13=[row])
