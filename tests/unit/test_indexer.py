"""The indexer's choice on plain PyTorch kernels: DeepGEMM's scores and the Top-K kernels are on the GPU."""
import torch

from megatron.zero_mismatch import compressor, indexer
from megatron.zero_mismatch.indexer import IndexerWeights, reference_kernels, select
from megatron.zero_mismatch.linear_fp8 import REFERENCE, OperandCache, linear_fp8
from megatron.zero_mismatch.packing import Packed
from megatron.zero_mismatch.version_guard import WeightGuard

CPU = torch.device("cpu")
HEADS, DIM, HIDDEN, RANK, EPS = 2, 128, 128, 128, 1e-6


def scene(lengths):
    generator, packed = torch.Generator().manual_seed(0), Packed(lengths, CPU)

    def normal(*shape, shift=0.0):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 + shift

    weights = IndexerWeights(
        normal(HEADS * DIM, RANK).bfloat16(), normal(HEADS, HIDDEN).bfloat16(), normal(4 * DIM, HIDDEN).bfloat16(),
        normal(4, 2 * DIM), normal(DIM, shift=1.0).bfloat16(),
    )
    hidden, qr = (torch.randn(packed.tokens, n, generator=generator).bfloat16() for n in (HIDDEN, RANK))
    angle = torch.randn(max(lengths), 32, generator=generator)
    return (hidden, qr, weights), packed, torch.cat([angle.cos(), angle.sin()], -1)


def run(inputs, packed, cos_sin, k, kernels=None, cache=None):
    return select(kernels or reference_kernels(REFERENCE), *inputs, packed, cos_sin, k, EPS, cache)


def plain_scores(inputs, packed, cos_sin, begin, end):
    """Scores of one sequence without quantisation, head by head in fp64."""
    hidden, qr, w = inputs
    own = Packed((end - begin,), CPU)
    kv_score = hidden[begin:end].double() @ w.wkv_wgate.double().T
    keys = compressor.pooled(kv_score, w.ape.double(), w.norm.double(), own, cos_sin, 4, EPS)
    q = indexer.rotate((qr[begin:end].double() @ w.wq_b.double().T).unflatten(1, (HEADS, DIM)), own.positions, cos_sin)
    gate = hidden[begin:end].double() @ w.weights_proj.double().T
    return sum(gate[:, h, None] * torch.relu(q[:, h] @ keys.T) for h in range(HEADS)) * DIM**-0.5 * HEADS**-0.5


def test_chosen_rows_are_the_best_ones_up_to_the_quantisation():
    inputs, packed, cos_sin = scene((61, 3, 40))
    chosen = run(inputs, packed, cos_sin, 4)
    for begin, end in packed.bounds:
        if end - begin < 4:
            continue
        scores = plain_scores(inputs, packed, cos_sin, begin, end)
        noise = 0.1 * scores.abs().max()  # FP8 of queries and keys
        for p in range(end - begin):
            visible = (p + 1) // 4
            rows = [r for r in chosen[begin + p].tolist() if r >= 0]
            assert len(rows) == min(4, visible) and rows == sorted(rows, reverse=True)
            assert all(0 <= r < visible for r in rows), "a row that is not complete yet"
            left = [r for r in range(visible) if r not in rows]
            if left:
                assert scores[p, rows].min() > scores[p, left].max() - noise


def test_fewer_rows_than_k_are_all_chosen_descending():
    inputs, packed, cos_sin = scene((13,))
    chosen = run(inputs, packed, cos_sin, 8)
    for p in range(13):
        visible = (p + 1) // 4
        assert chosen[p].tolist() == list(range(visible))[::-1] + [-1] * (8 - visible)


def test_choice_does_not_depend_on_neighbours_nor_on_blocks(monkeypatch):
    inputs, packed, cos_sin = scene((33, 2, 50))
    hidden, qr, weights = inputs
    whole = run(inputs, packed, cos_sin, 3)
    for begin, end in packed.bounds:
        own = hidden[begin:end], qr[begin:end], weights
        assert torch.equal(run(own, Packed((end - begin,), CPU), cos_sin, 3), whole[begin:end])
    monkeypatch.setattr(indexer, "BLOCK_SCORES", 40)
    assert torch.equal(run(inputs, packed, cos_sin, 3), whole)


def test_ties_go_to_the_later_row():
    kernels = reference_kernels(REFERENCE)._replace(
        scores=lambda codes, w, keys, scales, first, counts, width: torch.zeros(len(codes), width))
    inputs, packed, cos_sin = scene((24,))
    assert run(inputs, packed, cos_sin, 2, kernels)[-1].tolist() == [5, 4]


def test_indexer_is_frozen():
    (hidden, qr, weights), packed, cos_sin = scene((16,))
    trained = IndexerWeights(*(w.requires_grad_() for w in weights))
    chosen = run((hidden.requires_grad_(), qr.requires_grad_(), trained), packed, cos_sin, 2)
    assert not chosen.requires_grad and chosen.dtype == torch.int32


def test_queries_come_through_the_same_linear_and_its_cache():
    inputs, packed, cos_sin = scene((16,))
    _, qr, weights = inputs
    seen = []
    kernels = reference_kernels(REFERENCE)
    spied = kernels._replace(queries=lambda q, *rest: seen.append(q) or kernels.queries(q, *rest))
    cache = OperandCache(WeightGuard(lambda: [("wq_b", weights.wq_b)]))
    assert torch.equal(run(inputs, packed, cos_sin, 2, spied, cache), run(inputs, packed, cos_sin, 2))
    assert torch.equal(seen[0].flatten(1), linear_fp8(REFERENCE, qr, weights.wq_b))
