"""NVFP4 in plain PyTorch: the writer's bits, its error, and the weights that training may pass through."""
import pytest
import tiny_nemotron_quantised
import torch
from megatron.zero_mismatch import quant_nvfp4


def weights(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.1).bfloat16()


def bits(t):
    return t.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_codes_and_scales_are_those_of_the_recipes_writer(seed):
    made = quant_nvfp4.quantise(weights(3, 24, 64, seed=seed))
    for matrix, *ours in zip(weights(3, 24, 64, seed=seed), *made, strict=True):
        theirs = tiny_nemotron_quantised.WRITER.to_fp4(matrix.float())
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))


def test_a_tie_goes_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert quant_nvfp4._codes(torch.cat([ties, -ties])).tolist() == [0, 2, 2, 4, 4, 6, 6] + [8 + c for c in (
        0, 2, 2, 4, 4, 6, 6)]


def test_a_value_is_within_tolerance_of_its_weight():
    master = weights(5, 48, 96)
    parts = quant_nvfp4.quantise(master)
    largest = master.float().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    error = (quant_nvfp4.dequantise(*parts) - master.float()).abs() / largest
    assert 0.1 < error.max() <= quant_nvfp4.TOLERANCE


@pytest.mark.parametrize("dead", ["matrix", "group"])
def test_zeros_stay_zeros(dead):
    master = weights(2, 16, 32)
    place = (0,) if dead == "matrix" else (0, 3, slice(16, 32))
    master[place] = 0
    found = quant_nvfp4.dequantise(*quant_nvfp4.quantise(master))
    assert not found[place].any() and found.isfinite().all()
    assert found[1].any()


def test_a_code_times_its_scale_is_a_bf16_number():
    codes, scales, overall = quant_nvfp4.quantise(weights(2, 32, 64))
    exact = quant_nvfp4.dequantise(codes, scales, torch.ones_like(overall))
    assert torch.equal(exact, exact.bfloat16().float())


def test_a_width_without_whole_groups_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        quant_nvfp4.quantise(weights(16, 24))
