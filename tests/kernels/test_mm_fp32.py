"""bi_mm_fp32 on the CPU, the same source under Triton's interpreter. tests/gpu asks the same of the hardware."""
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from mm_cases import assert_same_bits, operands

from vllm.zero_mismatch import mm_fp32
from vllm.zero_mismatch.mm_fp32 import bi_mm_fp32, reference, tolerance

# Around the edges of the small tiles below. At 33 rows and more some of these shapes keep a tile's slices together.
BATCHES = (1, 15, 16, 17, 33, 64, 65, 70)
SMALL_TILES = ((64, mm_fp32.Tile((16, 32), 32, 32, 4, 1, 4)), (2**31 - 1, mm_fp32.Tile((64,), 64, 64, 2, 1, 16)))
PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.fixture
def small_tiles(monkeypatch):
    """The interpreter takes seconds for a large tile. The kernel is the same; tests without this use the real table."""
    monkeypatch.setattr(mm_fp32, "_TILES_16BIT", SMALL_TILES)
    monkeypatch.setattr(mm_fp32, "_TILES_FP32", SMALL_TILES)
    monkeypatch.setattr(mm_fp32, "_SPREAD", 20)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("x_dtype,w_dtype", PAIRS)
@pytest.mark.parametrize("n", [40, 200])  # a table row each
def test_row_keeps_its_bits_in_any_batch(n, x_dtype, w_dtype):
    x, weight = operands(max(BATCHES), n, 160, x_dtype, w_dtype)
    whole = bi_mm_fp32(x, weight)
    for row in (0, 15, 16, 69):
        assert_same_bits(bi_mm_fp32(x[row : row + 1], weight), whole[row : row + 1], f"row {row} alone")
    for m in BATCHES:
        assert_same_bits(bi_mm_fp32(x[:m], weight), whole[:m], f"first {m} rows")
    assert_same_bits(bi_mm_fp32(x.flip(0), weight), whole.flip(0), "reversed batch")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("x_dtype,w_dtype", PAIRS)
@pytest.mark.parametrize("n,k", [(40, 256), (40, 65), (70, 300)])  # slices full, mostly empty, cut in a step
def test_place_of_the_slices_does_not_reach_the_bits(n, k, x_dtype, w_dtype, monkeypatch):
    """One program that walks all slices, against a program a slice and the second kernel."""
    x, weight = operands(33, n, k, x_dtype, w_dtype)
    x[3] = -0.0
    x[5] = float("nan")
    found = []
    for bound in (0, 2**31 - 1):
        monkeypatch.setattr(mm_fp32, "_SPREAD", bound)
        assert (mm_fp32._places(33, n, k, mm_fp32._tile(n, x_dtype, w_dtype)[1]) > 1) == bool(bound)
        found.append(bi_mm_fp32(x, weight))
    assert_same_bits(found[1], found[0], "slices on programs of their own")


def test_partials_are_added_in_slice_order(monkeypatch):
    """The contract a trainer copies: ((p0 + p1) + p2) + ..., with values at which every other order shows."""
    _, tile = mm_fp32._tile(40, torch.bfloat16, torch.bfloat16)
    slice_k = 2 * tile.block_k  # two steps, the fewest there are; one product of a slice is not zero
    x = torch.ones(1, tile.slices * slice_k, dtype=torch.bfloat16)
    weight = torch.zeros(40, x.shape[1], dtype=torch.bfloat16)
    noise = torch.randn(2, tile.slices, 40, generator=torch.Generator().manual_seed(1))
    partials = (noise[0] * (8 * noise[1]).exp()).bfloat16()
    weight[:, ::slice_k] = partials.T
    want = torch.zeros(40)
    for partial in partials.float():
        want = want + partial
    for bound in (0, 2**31 - 1):
        monkeypatch.setattr(mm_fp32, "_SPREAD", bound)
        assert_same_bits(bi_mm_fp32(x, weight)[0], want, f"spread bound {bound}")
    assert not torch.equal(want, partials.float().flip(0).cumsum(0)[-1]), "the values must tell orders apart"


def test_batch_moves_slices_and_grows_tiles_in_every_class_that_has_them():
    """Both layouts are reachable, so that the tests around the switch compare two of them."""
    for n in (64, 256, 512, 1024, 2048, 8192):
        tile = mm_fp32._tile(n, torch.bfloat16, torch.bfloat16)[1]
        assert mm_fp32._places(1, n, 4096, tile) == mm_fp32._slices(4096, tile)[0] > 1
        assert mm_fp32._places(8192 * 4, n, 4096, tile) == 1
        assert (mm_fp32._height(64, tile), mm_fp32._height(65, tile)) == tile.heights
    assert mm_fp32._places(1, 129280, 4096, mm_fp32._tile(129280, torch.bfloat16, torch.bfloat16)[1]) == 1


def test_slices_cover_k_once_each_with_some_of_it_and_two_steps():
    for table in (mm_fp32._TILES_16BIT, mm_fp32._TILES_FP32):
        for _, tile in table:
            for k in (0, 1, 63, 64, 65, 96, 127, 128, 129, 192, 193, 1000, 1024, 2048, 4000, 4096, 4097, 7168, 16384):
                slices, steps = mm_fp32._slices(k, tile)
                run = steps * tile.block_k
                assert 1 <= slices <= tile.slices and slices * run >= k and (slices - 1) * run < max(k, 1), (tile, k)
                assert slices == 1 or steps >= 2, (tile, k)


def _compiled(cases):
    """{case: what the compiler made of it}. Needs no GPU."""
    program = pathlib.Path(__file__).with_name("compile_mm_fp32.py")
    run = subprocess.run([sys.executable, program, json.dumps(cases)], capture_output=True, text=True,
                         env=os.environ | {"TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr
    return dict(zip(cases, json.loads(run.stdout), strict=True))


def test_compiled_for_sm90_every_height_address_and_k_runs_the_same_products():
    """What the interpreter cannot show: no slice is folded into the total, and M and addresses pick no instruction."""
    cases = [(n, k, "bf16", *form) for n, k in ((256, 96), (256, 4096), (1024, 1024), (1024, 4096))
             for form in itertools.product((64, 128), (True, False))]
    cases += [(256, 96, "fp32", 16, True), (256, 4096, "fp32", 16, True)]
    compiled = _compiled(cases)
    for case, code in compiled.items():
        accumulator, = code["accumulators"]
        assert accumulator.startswith("acc"), f"{case}: a slice adds to {accumulator}, it must start from zero"
        assert (code["additions"] > 0) == (code["slices"] > 1), f"{case}: partials are added where there are slices"
    for n, instruction in ((256, "m64n64k16"), (1024, "m64n128k16")):
        wide = [code["products"] for (width, _, dtype, *_), code in compiled.items() if (width, dtype) == (n, "bf16")]
        assert len(set(map(tuple, wide))) == 1 and all(instruction in product for product in wide[0]), (n, wide[0])


@pytest.mark.usefixtures("small_tiles")
def test_neighbouring_nan_and_infinity_stay_in_their_rows():
    x, weight = operands(33, 40, 160)
    clean = bi_mm_fp32(x, weight)
    x[5] = float("nan")
    x[20] = float("inf")
    keep = [i for i in range(33) if i not in (5, 20)]
    assert_same_bits(bi_mm_fp32(x, weight)[keep], clean[keep], "rows beside NaN and infinity")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("x_dtype,w_dtype", PAIRS)
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (3, 40, 31), (17, 65, 129), (65, 130, 257)])
def test_result_is_the_exact_product_within_fp32_accumulation(m, n, k, x_dtype, w_dtype):
    x, weight = operands(m, n, k, x_dtype, w_dtype)
    error = (bi_mm_fp32(x, weight).double() - reference(x, weight)).abs()
    assert (error <= tolerance(x, weight)).all(), f"max error {error.max().item()}"


@pytest.mark.usefixtures("small_tiles")
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
    assert mm_fp32._tile(256, torch.bfloat16, torch.bfloat16) == (False, mm_fp32._TILES_16BIT[0][1])
    assert mm_fp32._tile(256, torch.bfloat16, torch.float32)[0], "a mixed product must be ieee fp32, never TF32"


def test_kernel_is_not_specialised_on_the_batch():
    """M = 1 and M divisible by 16 would otherwise compile to other binaries, and so would a program of one slice."""
    launch_options = mm_fp32._mm_fp32_kernel.__dict__.get("kwargs", {}) or vars(mm_fp32._mm_fp32_kernel)
    assert {"M", "owned"} <= set(launch_options["do_not_specialize"])


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


@pytest.mark.usefixtures("small_tiles")
def test_stock_reduction_order_changes_bits():
    """What a split-K chosen for small M does to a row: the same factors, another grouping, other bits."""
    x, weight = operands(4, 64, 1024)
    halves = bi_mm_fp32(x[:, :512], weight[:, :512]) + bi_mm_fp32(x[:, 512:], weight[:, 512:])
    whole = bi_mm_fp32(x, weight)
    assert (halves.view(torch.int32) != whole.view(torch.int32)).any()
