"""Two ranks that share a batch give the bits of one: two gloo processes over the reference kernels, and
Nemotron-H's over the engine's scan (cp_ranks.py)."""
import pathlib
import subprocess
import sys

import cp_ranks
import pytest
import torch
from megatron.zero_mismatch.context_parallel import ALONE, Ranks, collect, to_heads, to_tokens
from megatron.zero_mismatch.packing import Packed

SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    running = [subprocess.Popen([sys.executable, cp_ranks.__file__, str(folder), str(rank), str(SIZE)])
               for rank in range(SIZE)]
    assert [process.wait(timeout=300) for process in running] == [0] * SIZE
    return [torch.load(pathlib.Path(folder) / f"{rank}.pt") for rank in range(SIZE)]


def words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("model", cp_ranks.MODELS)
def test_logprobs_of_two_ranks_are_those_of_one_bit_for_bit(ranks, model):
    lengths = cp_ranks.MODELS[model][0]
    for found in ranks:
        alone = found[model, "alone", "logprobs"]
        assert torch.equal(words(found[model, "group", "logprobs"]), words(alone))
        assert alone.count_nonzero() == sum(lengths) - len(lengths)


@pytest.mark.parametrize("model", cp_ranks.MODELS)
def test_gradients_summed_over_the_ranks_are_those_of_one(ranks, model):
    for found in ranks:
        assert torch.allclose(found[model, "group", "exact"], found[model, "alone", "exact"], rtol=0, atol=1e-12)
        shared, alone = found[model, "group", "gradients"], found[model, "alone", "gradients"]
        assert shared.keys() == alone.keys()
        for name, want in alone.items():
            assert (shared[name] - want).norm() <= 1e-10 * want.norm(), name


def test_packing_and_micro_batches_change_no_bit_under_context_parallelism(ranks):
    whole = ranks[0]["nemotron", "alone", "logprobs"].split(cp_ranks.LENGTHS)
    for found in ranks:
        for batch, logprobs in zip(cp_ranks.MICRO, found["micro"], strict=True):
            assert torch.equal(words(logprobs), words(torch.cat([whole[i] for i in batch])))


def test_rows_taken_for_whole_sequences_would_have_other_values(ranks):
    whole, cut = ranks[0]["nemotron", "alone", "logprobs"][-24:], ranks[0]["cut"][-24:]
    assert (words(whole) != words(cut)).all(), "else the equality above says nothing about the exchange"


def test_heads_are_dealt_out_by_section_and_come_back(ranks):
    for rank, found in enumerate(ranks):
        narrow, broad = found["whole"].split([4, 8], 1)
        assert torch.equal(found["dealt"], torch.cat([narrow.chunk(2, 1)[rank], broad.chunk(2, 1)[rank]], 1))
        assert torch.equal(found["back"], found["own"][:, :4]), "the narrow section's two halves, for own rows"
        assert torch.equal(found["together"], found["whole"])


def test_gradients_go_back_to_the_rows_owner_and_add_up(ranks):
    for found in ranks:
        assert torch.equal(found["grad"], 1 + 3 * found["own"]), "weights 1 and 2 of the ranks"


def test_alone_nothing_is_moved():
    packed, x = Packed((3,), torch.device("cpu")), torch.randn(3, 4)
    assert to_heads(x, [4], packed) is x and to_tokens(x, packed) is x and collect(x, packed) is x
    assert ALONE.of_heads(x, [3]) is x and torch.equal(packed.own(x), x)


def of_size(size: int) -> Ranks:
    ranks = Ranks(None)
    ranks.__dict__.update(size=size, rank=0)  # cached properties of a group that is not there
    return ranks


def test_every_row_is_one_ranks():
    for tokens in (3, 7, 8):
        bounds = of_size(3).bounds(tokens)
        assert [row for begin, end in bounds for row in range(begin, end)] == list(range(tokens))
        assert all(end > begin for begin, end in bounds)


def test_heads_that_cannot_be_dealt_out_evenly_are_refused():
    with pytest.raises(ValueError, match="found 2 KV heads for 3 ranks"):
        of_size(3).share(2, "KV heads")


def test_a_batch_with_fewer_tokens_than_ranks_is_refused():
    with pytest.raises(ValueError, match="found 2 tokens for 3 context-parallel ranks"):
        Packed((2,), torch.device("cpu"), of_size(3))
