"""Where routed rows go: a prefix count, so the same place in every run; nothing else is written."""
import pytest
import torch
from permute_cases import EXPERTS, KINDS, capacity, check_against_reference, routing, rows_of

from vllm.zero_mismatch import experts_permute


@pytest.fixture(autouse=True)
def few_slots_at_a_time(monkeypatch):
    """So that few tokens already take several turns of the ranking program."""
    monkeypatch.setattr(experts_permute, "SLOTS", 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_slots_go_to_their_rank_within_the_expert(tokens, kind):
    check_against_reference(tokens, kind, alignment=16)


@pytest.mark.parametrize("alignment", [8, 128])
def test_experts_start_at_multiples_of_the_alignment(alignment):
    check_against_reference(7, "uniform", alignment)


def test_scales_may_stay_in_rows():
    check_against_reference(3, "empty slots", alignment=16, column_major=False)


def test_no_tokens_leave_every_expert_empty():
    codes, scales = rows_of(0)
    out = torch.empty(0, codes.shape[1], dtype=codes.dtype)
    _, ends, place = experts_permute.permute(codes, scales, routing(0, "uniform")[0], EXPERTS, out, alignment=16)
    assert ends.tolist() == [0] * EXPERTS and place.shape == (0, 6)


def test_other_experts_do_not_move_a_row_within_its_expert():
    """A slot's rank counts earlier slots of its own expert only."""
    ids = routing(9, "uniform")[0]
    place, ends = experts_permute.places_reference(ids, EXPERTS, 16)
    fewer = torch.where(ids == ids[4, 0], ids, -1)
    alone, _ = experts_permute.places_reference(fewer, EXPERTS, 16)
    mine = ids == ids[4, 0]
    start = int(ends[ids[4, 0] - 1] + 15) // 16 * 16 if ids[4, 0] else 0
    assert torch.equal(place[mine] - start, alone[mine])


@pytest.mark.parametrize("wrong,words", [
    ({"codes": torch.zeros(4, 40, dtype=torch.uint8)}, "multiples of 16"),
    ({"scales": torch.zeros(3, 3)}, "fp32 scales and one list of experts a row"),
    ({"ids": torch.zeros(4, 12, dtype=torch.int32)[:, ::2]}, "contiguous"),
])
def test_unfit_rows_are_refused(wrong, words):
    codes, scales = rows_of(4)
    fit = {"codes": codes, "scales": scales, "ids": routing(4, "uniform")[0]} | wrong
    out = torch.empty(capacity(24, EXPERTS, 16), fit["codes"].shape[1], dtype=torch.uint8)
    with pytest.raises(ValueError, match=words):
        experts_permute.permute(fit["codes"], fit["scales"], fit["ids"], EXPERTS, out, alignment=16)
