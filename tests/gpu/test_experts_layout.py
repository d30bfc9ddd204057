"""On the GPU: places, tile heights and layouts of the routed experts move no bit, and the result is right."""
import pytest
import torch
from permute_cases import KINDS, check_against_reference
from silu_cases import assert_same_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 546, 547, 1024, 1025,
          1067, 2048, 2177, 4096, 4097)  # 546, 1067 and 2177 lie at the limits of the tile heights


@pytest.fixture(scope="module")
def chain():
    pytest.importorskip("vllm.third_party.deep_gemm", reason="needs vLLM's compiled DeepGEMM")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("tile heights below 128 are SM90's")
    import experts_chain

    return experts_chain.Experts()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens,alignment", [(1, 16), (256, 16), (257, 32), (4097, 128)])
def test_places_are_those_of_the_reference(tokens, alignment, kind):
    check_against_reference(tokens, kind, alignment, "cuda", experts=256, hidden=4096)


@pytest.mark.parametrize("tokens", [1, 40, 256, 2048])
def test_row_keeps_its_bits_at_every_tile_height(chain, tokens):
    _, quantised, ids, weights = chain.inputs(tokens)
    want = chain.run(quantised, ids, weights, tile=128)
    for tile in (16, 32, 64):
        assert_same_bytes(chain.run(quantised, ids, weights, tile=tile), want, f"tiles of {tile} rows against 128")


@pytest.mark.parametrize("kind", ["uniform", "one expert"])
def test_row_keeps_its_bits_in_any_batch(chain, kind):
    _, quantised, ids, weights = chain.inputs(max(TOKENS), kind)
    whole = chain.run(quantised, ids, weights)
    for tokens in TOKENS:
        last = slice(max(TOKENS) - tokens, None)
        got = chain.run(tuple(part[last].contiguous() for part in quantised), ids[last].contiguous(), weights[last])
        assert_same_bytes(got, whole[last], f"the last {tokens} tokens alone")


def test_masked_layout_has_the_bits_of_the_contiguous_one(chain):
    _, quantised, ids, weights = chain.inputs(256)
    rows, ends, place = chain.placed(quantised, ids, 16)
    slabs, counts, inside = chain.slabs(quantised, ids, place, ends, 16)
    got = chain.masked(slabs, counts)[inside.flatten().long()]
    assert_same_bytes(got, chain.gemms(rows, ends, 16, 16)[place.flatten().long()], "masked against contiguous")


def test_upstreams_places_give_the_same_bits(chain):
    _, quantised, ids, weights = chain.inputs(256)
    want = chain.stock(quantised, ids, weights)
    assert_same_bytes(chain.run(quantised, ids, weights), want, "against upstream's scatter")


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_repeated_runs_have_the_same_bits(chain, tile):
    """Tiles below 64 rows let the warps that store nothing run ahead into the next tile's scales."""
    _, quantised, ids, weights = chain.inputs(256)
    want = chain.run(quantised, ids, weights, tile=128).view(torch.int16)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        differing += (chain.run(quantised, ids, weights, tile=tile).view(torch.int16) != want).sum()
    assert int(differing) == 0


def test_experts_are_those_of_an_fp64_reference(chain):
    _, quantised, ids, weights = chain.inputs(256)
    tokens = [0, 100, 255]
    want = chain.reference(quantised, ids, weights, tokens)
    got = chain.run(quantised, ids, weights)[tokens].double()
    # The activation's FP8 codes carry 3 bits; the errors of 512 products average out.
    assert float((got - want).norm() / want.norm()) < 2.0**-4
