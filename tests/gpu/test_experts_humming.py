"""On the GPU: NVFP4 experts by Humming, in upstream's own class under batch invariance, at the tiny and the real width.

A token's output has the same bits in every batch and at every place in it, and is the product of the dequantised
weights within BF16.
"""
import pytest
import torch
from humming_experts import SIZES, Experts, routed
from mamba2_cases import assert_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOKENS = (1, 4, 16, 64, 257, 1000, 4096)  # across the table's tiles, and the batches that move Marlin's bits


@pytest.fixture(scope="module", params=SIZES)
def experts(request):
    return Experts(request.param)


def test_a_token_keeps_its_bits_in_any_batch(experts):
    """vllm PR #46639: Marlin's stream-K gives a row other bits at 4, 16, 64 and 257 tokens."""
    x, ids, weights = routed(experts, max(TOKENS))
    whole = experts(x, ids, weights)
    for tokens in TOKENS:
        assert_same_bits(experts(x[:tokens], ids[:tokens], weights[:tokens]), whole[:tokens], f"{tokens} tokens")


def test_order_in_the_batch_and_a_second_run_move_no_bit(experts):
    """vllm #52525: rows of an expert are aligned in another order and the result moves; #56887: split K by atomics."""
    x, ids, weights = routed(experts, 600)
    whole, order = experts(x, ids, weights), torch.randperm(600, device="cuda")
    assert_same_bits(experts(x, ids, weights), whole, "again")
    assert_same_bits(experts(x[order], ids[order], weights[order]), whole[order], "permuted")


def test_crowded_experts_leave_the_others_alone(experts):
    """Every other token goes to the same experts: tiles fill and split differently, no row's sum does."""
    x, ids, weights = routed(experts, 512)
    crowded = ids.clone()
    crowded[1::2] = torch.arange(experts.top_k, device="cuda", dtype=torch.int32)
    assert_same_bits(experts(x, crowded, weights)[::2], experts(x, ids, weights)[::2], "the tokens between")


def test_result_is_the_dequantised_product(experts):
    x, ids, weights = routed(experts, 16)
    expected = experts.reference(x, ids, weights)
    error = (experts(x, ids, weights).double() - expected).abs().max() / expected.abs().max()
    assert error < 0.02, f"{float(error):.4f} of the largest value; BF16 between the two products allows about 0.01"
