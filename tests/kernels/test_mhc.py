"""The fixed split of the mHC projection. The kernels themselves are upstream's; tests/gpu asks them for bits."""
import pytest
import torch

from vllm.zero_mismatch import mhc


@pytest.mark.parametrize("k", [64, 256, 1024, 2048, 4096, 5120, 16384, 20480, 28672])
def test_split_is_a_function_of_the_weights_width(k):
    splits = mhc.fixed_split(k, 64)
    assert 1 <= splits <= mhc.SPLITS
    assert splits == 1 or k // 64 >= mhc.MIN_BLOCKS * splits, "a split must be worth its launch"


def test_deepseek_v4_shapes_use_every_split():
    hidden, streams = 4096, 4
    assert mhc.fixed_split(hidden, 64) == mhc.fixed_split(streams * hidden, 64) == mhc.SPLITS == 16


@pytest.mark.parametrize("k,splits", [(4096, 16), (16384, 16), (5120, 16), (320, 3), (100, 2), (64, 1)])
def test_splits_cover_k_once_in_ascending_order(k, splits):
    bounds = mhc.split_bounds(k, splits)
    assert len(bounds) == splits and bounds[0][0] == 0 and bounds[-1][1] == k
    assert all(end == start for (_, end), (start, _) in zip(bounds, bounds[1:], strict=False))


def _operands(tokens=3, k=4096, n=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, k, generator=generator).bfloat16(), torch.randn(n, k, generator=generator)


def test_reference_parts_sum_to_the_projection():
    x, fn = _operands()
    partial, sqr = mhc.reference_prenorm(x, fn, 16)
    whole = x.double() @ fn.double().T
    assert ((partial.sum(0) - whole).abs() <= 1e-12 * (x.double().abs() @ fn.double().abs().T)).all()
    assert torch.allclose(sqr.sum(0), x.double().square().sum(-1), rtol=1e-14, atol=0)


def test_rounding_fn_to_tf32_stays_within_the_tolerance():
    x, fn = _operands()
    tf32 = (fn.view(torch.int32) & ~0x1FFF).view(torch.float32)  # drop 13 of 23 fraction bits
    error = (x.double() @ tf32.double().T - mhc.reference_prenorm(x, fn, 1)[0][0]).abs()
    assert 0 < error.max() and (error <= mhc.tolerance(x, fn)).all()


def test_another_number_of_splits_gives_other_bits():
    """Counter-test of mhc-fixed-split: in fp32, regrouping the same sum changes the row."""
    x, fn = _operands()

    def grouped(splits):
        total = torch.zeros(x.shape[0], fn.shape[0])
        for a, b in mhc.split_bounds(x.shape[1], splits):
            total = total + x[:, a:b].float() @ fn[:, a:b].T
        return total.view(torch.int32)

    assert (grouped(16) != grouped(1)).any()
