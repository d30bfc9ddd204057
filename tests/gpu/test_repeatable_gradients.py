"""On the GPU: the same backward twice has the same bits, for both models of the trainer on vLLM's kernels.

With the engine's replacements of aten operators in the process, as in an actor's:

    python -m pytest tests/gpu/test_repeatable_gradients.py -q -s

The second backward shares the GPU with work of another stream, so its threads arrive in another order. Prints how many
words differ, and for one block of DeepSeek-V4's attention what adding up its rows takes, beside index_add_, whose words
do differ from run to run.
"""
import bench_trainer
import pytest
import torch
from megatron.zero_mismatch import attention_sparse
from megatron.zero_mismatch.models.nemotron_h import NemotronH
from megatron.zero_mismatch.packing import Packed
from mm_cases import differing_words

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("actor"),
]
MODELS = {"deepseek-v4": bench_trainer.deepseek, "nemotron": lambda: bench_trainer.model(NemotronH)}
# Tokens of the embedding's gradient: fewer than 3,072, and more, where another kernel adds them up.
LENGTHS = ((664, 577, 321), bench_trainer.BATCHES["deepseek-v4"][1])


@pytest.fixture(scope="module", params=MODELS)
def model(request, actor):
    return MODELS[request.param]()


def disturb(kernels: int) -> None:
    """Work for half a millisecond a kernel, on a stream of its own. Not by cuBLAS, which promises the same bits to a
    stream that is alone."""
    with torch.cuda.stream(torch.cuda.Stream()):
        noise = torch.ones(1 << 28, device="cuda")
        for _ in range(kernels):
            noise.sin_()


def gradients(model, tokens, packed, weights) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    (model(tokens, packed) * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{sum(lengths)} tokens")
def test_same_backward_twice_has_the_same_bits(model, lengths):
    generator = torch.Generator("cuda").manual_seed(1)
    packed = Packed(lengths, torch.device("cuda"))
    tokens = torch.randint(0, model.shape.vocab, (packed.tokens,), device="cuda", generator=generator)
    weights = torch.randn(packed.tokens, device="cuda", generator=generator)
    once = gradients(model, tokens, packed, weights)
    torch.cuda.synchronize()
    disturb(1000)
    twice = gradients(model, tokens, packed, weights)
    assert once["model.embed_tokens.weight"].any() and once.keys() == twice.keys()
    words = {name: differing_words(twice[name], grad) for name, grad in once.items()}
    moved = {name: count for name, count in words.items() if count}
    print(f"\n{type(model).__name__}, {packed.tokens} tokens: {sum(words.values()):,} of "
          f"{sum(grad.numel() for grad in once.values()):,} words differ, in {len(moved)} of {len(words)} parameters")
    assert not moved


def by_index(dk, listed, count):
    """As a sum by atomics would do it, entries without a row spread in the same way."""
    listed = listed.flatten().long()
    anywhere = torch.arange(len(listed), device=listed.device) % count
    return dk.new_zeros(count, dk.shape[-1]).index_add_(0, torch.where(listed < 0, anywhere, listed), dk.flatten(0, 1))


@pytest.mark.parametrize("ratio,top_k", [(0, 0), (4, 512), (128, 1 << 20)])
def test_rows_are_added_up_to_the_same_bits_and_to_the_sum(ratio, top_k):
    packed = Packed(LENGTHS[1], torch.device("cuda"))
    indices, lengths = attention_sparse.row_lists(packed, 128, ratio, top_k)
    indices = indices[:, : int(lengths.max())]
    listed = indices[: attention_sparse.BLOCK_BYTES // (4 * indices.shape[1] * 512)]
    count = packed.tokens + sum(n // ratio if ratio else 0 for n in packed.lengths)
    dk = torch.randn(*listed.shape, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(ratio))
    dk *= (listed >= 0)[..., None]
    first = attention_sparse._by_row(dk, listed, count)
    for _ in range(4):
        disturb(20)
        assert not differing_words(attention_sparse._by_row(dk, listed, count), first)
    torch.cuda.synchronize()
    exact = by_index(dk.double(), listed, count)
    assert (first - exact).norm() <= 1e-6 * exact.norm()  # fp32, some hundred additions behind each other
    moved = differing_words(by_index(dk, listed, count), by_index(dk, listed, count))
    took = [bench_trainer.median_ms(lambda add=add: add(dk, listed, count))
            for add in (attention_sparse._by_row, by_index)]
    print(f"\nratio {ratio}: {len(listed)} queries of {listed.shape[1]} rows: {took[0]} ms, by index_add_ {took[1]} "
          f"ms, of whose {first.numel():,} words {moved:,} differ between two runs")
