"""The routed experts' constants and the order of the combine."""
import torch

from vllm.zero_mismatch.experts_deepgemm import MASKED_EXPECTED_M, combine_reference, expected_m


def test_expected_rows_are_a_constant():
    assert {expected_m(capacity) for capacity in (64, 128, 1024, 65536)} == {MASKED_EXPECTED_M}
    assert expected_m(16) == 16  # a slab smaller than the constant is still a static size


def combine(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(96, 256, generator=generator).to(torch.bfloat16)
    place = torch.randperm(96, generator=generator)[:48].view(8, 6)
    weights = torch.rand(8, 6, generator=generator)
    expert = torch.randint(0, 256, (8, 6), generator=generator)
    return rows, place, weights, expert


def test_combine_is_independent_of_where_rows_lie():
    """NeMo-RL #4243: the trainer's degree of expert parallelism was in its logprobs. It decides where rows lie."""
    rows, place, weights, expert = combine()
    moved = torch.randperm(len(rows))
    elsewhere = combine_reference(rows[moved], torch.argsort(moved)[place], weights, expert)
    assert torch.equal(combine_reference(rows, place, weights, expert).view(torch.int16), elsewhere.view(torch.int16))


def test_empty_slot_adds_nothing():
    rows, place, weights, expert = combine()
    expert[:, 3] = -1
    without = [0, 1, 2, 4, 5]
    want = combine_reference(rows, place[:, without], weights[:, without], expert[:, without])
    assert torch.equal(combine_reference(rows, place, weights, expert).view(torch.int16), want.view(torch.int16))


def test_another_slot_order_differs():
    """Counter-test: summing in order of arrival is another arithmetic. Two experts that cancel make it visible."""
    rows, place, weights, expert = combine()
    rows[place[:, 0]] = torch.randn(8, 256).to(torch.bfloat16) * 2**16
    rows[place[:, 1]], weights[:, 1] = -rows[place[:, 0]], weights[:, 0]
    back = [5, 4, 3, 2, 1, 0]
    other = combine_reference(rows, place[:, back], weights[:, back], expert[:, back])
    assert not torch.equal(combine_reference(rows, place, weights, expert), other)
