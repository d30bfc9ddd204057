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
    ({"ids": torch.zeros(3, 6, dtype=torch.int32)}, "one list of experts a row"),
    ({"out": torch.empty(400, 256, dtype=torch.uint8)}, "contiguous rows of 272"),
])
def test_unfit_rows_are_refused(wrong, words):
    codes, scales = rows_of(4)
    fit = {"codes": codes, "scales": scales, "ids": routing(4, "uniform")[0],
           "out": torch.empty(capacity(24, EXPERTS, 16), codes.shape[1], dtype=torch.uint8)} | wrong
    with pytest.raises(ValueError, match=words):
        experts_permute.permute(fit["codes"], fit["scales"], fit["ids"], EXPERTS, fit["out"], alignment=16)


def test_experts_need_not_lie_in_a_row_of_their_own():
    """Routers may hand over a view, as upstream's scatter takes it."""
    ids = routing(5, "empty slots")[0]
    codes, scales = rows_of(5)
    wide = torch.full((5, 12), -7, dtype=torch.int32)
    wide[:, ::2] = ids
    out = torch.empty(capacity(ids.numel(), EXPERTS, 16), codes.shape[1], dtype=codes.dtype)
    place = experts_permute.permute(codes, scales, wide[:, ::2], EXPERTS, out, alignment=16)[2]
    assert torch.equal(place, experts_permute.places_reference(ids, EXPERTS, 16)[0])
