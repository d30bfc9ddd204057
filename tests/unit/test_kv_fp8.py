"""The trip of a K row through the FP8 cache, against rationals and against the gather's own dequantisation."""
import plain_fp8
import pytest
import torch

from megatron.zero_mismatch import kv_fp8


def rows(count=3, seed=0):
    return torch.randn(count, 512, generator=torch.Generator().manual_seed(seed))


def test_row_read_back_is_that_of_exact_arithmetic():
    given = rows()
    given[1, :64] = 0
    given[2, 64:128] *= 1e-5  # below the floor of a group's magnitude
    got = kv_fp8.round_trip(given, 64)
    for row, read in zip(given, got, strict=True):
        for g in range(7):
            stored = row[g * 64 : g * 64 + 64].bfloat16().tolist()
            codes, scale = plain_fp8.quantise(stored, kv_fp8.FLOOR)
            assert read[g * 64 : g * 64 + 64].tolist() == [c * scale for c in codes]
        assert torch.equal(read[448:], row[448:].bfloat16())


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_row_is_what_the_engines_record_holds(ratio):
    """Bytes as the writer lays them out, read by the rollout's own reference (vllm/zero_mismatch/fp8_kv_gather.py)."""
    from vllm.zero_mismatch.fp8_kv_gather import dequantise

    given, cache = rows(67), kv_fp8.private_cache(67, torch.device("cpu"), ratio)
    page_rows = cache.shape[1]
    assert page_rows == {0: 64, 4: 64, 128: 2}[ratio] and cache.stride(0) % 576 == 0
    want = kv_fp8.round_trip(given, 64)
    for slot, row in enumerate(given):
        page, offset = divmod(slot, page_rows)
        groups = row[:448].bfloat16().float().unflatten(0, (7, 64))
        exponent = torch.ceil(torch.log2(groups.abs().amax(1).clamp(min=kv_fp8.FLOOR) / 448))
        flat = cache.as_strided((cache.stride(0),), (1,), page * cache.stride(0))
        data = flat[offset * 576 : offset * 576 + 576]
        data[:448] = (groups / torch.exp2(exponent)[:, None]).to(torch.float8_e4m3fn).flatten().view(torch.uint8)
        data[448:] = row[448:].bfloat16().view(torch.uint8)
        flat[page_rows * 576 + offset * 8 :][:7] = (exponent + 127).to(torch.uint8)
        assert torch.equal(dequantise(cache, page, offset), want[slot])


def test_second_trip_changes_nothing():
    once = kv_fp8.round_trip(rows(16), 64)
    assert torch.equal(kv_fp8.round_trip(once.float(), 64), once)


def test_unwritten_row_reads_as_zeros():
    from vllm.zero_mismatch.fp8_kv_gather import dequantise

    assert not dequantise(kv_fp8.private_cache(2, torch.device("cpu")), 0, 1).any()
