"""Sparse attention on the plain PyTorch kernel: lists, derivative, sink. FlashMLA is on the GPU."""
import functools

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import attention_sparse as module
from megatron.zero_mismatch.attention_sparse import attend, reference, row_lists
from megatron.zero_mismatch.packing import Packed
from megatron.zero_mismatch.version_guard import WeightsChanged

gradcheck = functools.partial(torch.autograd.gradcheck, fast_mode=True)
CPU = torch.device("cpu")
SCALE = 0.6


def scene(tokens=5, heads=2, dim=4, rows=9, width=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    lengths = torch.randint(1, width + 1, (tokens,), generator=generator).int()
    indices = torch.stack([torch.randperm(rows, generator=generator)[:width] for _ in range(tokens)]).int()
    indices[2, 0] = -1  # an entry the indexer failed to fill
    lengths[2] = 3
    return (normal(tokens, heads, dim), normal(rows, dim), normal(heads)), (indices, lengths)


def run(q, rows, sink, indices, lengths, kernel=reference):
    return attend(kernel, q, rows, sink, indices, lengths, SCALE)


def plain(q, rows, sink, indices, lengths):
    """Query by query and head by head, in the order of the list."""
    out = []
    for t in range(len(q)):
        listed = [i for i in indices[t, : int(lengths[t])].tolist() if i >= 0]
        for h in range(q.shape[1]):
            e = [torch.exp(SCALE * (q[t, h] @ rows[i])) for i in listed]
            total = sum(e) + torch.exp(sink[h])
            out.append(sum(v / total * rows[i] for v, i in zip(e, listed, strict=True)))
    return torch.stack(out).view_as(q)


def test_gradcheck_of_queries_rows_and_sink():
    inputs, lists = scene()
    assert gradcheck(lambda *t: run(*t, *lists), inputs)


def test_value_and_gradient_are_those_of_the_formula():
    inputs, lists = scene(7)
    got, want = run(*inputs, *lists), plain(*inputs, *lists)
    assert torch.allclose(got, want, rtol=1e-12)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for g, w in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        assert torch.allclose(g, w, rtol=1e-10, atol=1e-12)


class NoSink(module._Attend):
    @staticmethod
    def backward(ctx, grad):
        got = list(module._Attend.backward(ctx, grad))
        got[3] = None
        return tuple(got)


class ValuesOnly(module._Attend):
    """Rows are keys and values at once; this one forgets that they are keys."""

    @staticmethod
    def backward(ctx, grad):
        got = list(module._Attend.backward(ctx, grad))
        q, rows, sink, indices, lengths = ctx.saved_tensors
        k, dead = module._listed(rows, indices, lengths)
        p, _ = module._softmax(q @ k.mT * ctx.scale, dead, sink)
        got[2] = torch.zeros_like(rows).index_add(0, indices.flatten().clamp(min=0).long(), (p.mT @ grad).flatten(0, 1))
        return tuple(got)


@pytest.mark.parametrize("fault", [NoSink, ValuesOnly])
def test_planted_fault_is_caught(fault):
    inputs, lists = scene()
    with pytest.raises(GradcheckError):
        gradcheck(lambda q, rows, sink: fault.apply(reference, q, rows, sink, *lists, SCALE, None), inputs)


def test_blocks_of_queries_do_not_change_the_gradient(monkeypatch):
    inputs, lists = scene(7)
    whole = torch.autograd.grad(run(*inputs, *lists).square().sum(), inputs)
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 4 * 6 * 4)
    for a, b in zip(whole, torch.autograd.grad(run(*inputs, *lists).square().sum(), inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_entries_of_a_row_are_added_up_and_those_without_one_add_nothing():
    generator = torch.Generator().manual_seed(0)
    listed = torch.randint(-1, 9, (50, 6), generator=generator).int()  # every row about 30 times
    dk = torch.randn(50, 6, 4, dtype=torch.float64, generator=generator) * (listed >= 0)[..., None]
    want = torch.zeros(10, 4, dtype=torch.float64)  # nobody lists the tenth row
    want.index_add_(0, listed.flatten().clamp(min=0).long(), dk.flatten(0, 1))
    assert torch.allclose(module._by_row(dk, listed, 10), want, rtol=1e-13, atol=1e-13)


def test_changed_sink_is_refused_in_backward():
    (q, rows, sink), lists = scene()
    out = run(q, rows, sink, *lists)
    with torch.no_grad():
        sink.add_(1)
    with pytest.raises(WeightsChanged, match="'attn_sink' has writes"):
        out.sum().backward()


# ---- the lists


def plain_lists(lengths, window, ratio, top_k, chosen):
    """The engine's rule, token by token (combine_topk_swa_indices): compressed rows first, then the window."""
    lists, base, first = [], 0, sum(n // ratio if ratio else 0 for n in lengths)
    for n in lengths:
        for p in range(n):
            top = min((p + 1) // ratio, top_k) if ratio else 0
            local = list(range(top)) if chosen is None else chosen[len(lists), :top].tolist()
            rows = [base + i if i >= 0 else -1 for i in local]
            token = first + len(lists)
            lists.append(rows + list(range(token - min(p + 1, window) + 1, token + 1)))
        base += n // ratio if ratio else 0
    return lists


@pytest.mark.parametrize("ratio,top_k,choose", [(0, 0, False), (4, 3, True), (4, 64, True), (128, 1 << 20, False)])
@pytest.mark.parametrize("lengths", [(1,), (7, 300, 1, 33)])
def test_lists_are_the_engines(ratio, top_k, choose, lengths):
    packed = Packed(lengths, CPU)
    chosen = None
    if choose:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.full((packed.tokens, top_k), -1, dtype=torch.int32)
        for t, p in enumerate(packed.positions.tolist()):
            best = torch.randperm((p + 1) // ratio, generator=generator)[:top_k].sort(descending=True).values.int()
            chosen[t, : len(best)] = best
    indices, counts = row_lists(packed, 8, ratio, top_k, chosen)
    assert indices.dtype == counts.dtype == torch.int32 and indices.shape[1] % module.ALIGNMENT == 0
    for t, want in enumerate(plain_lists(lengths, 8, ratio, top_k, chosen)):
        assert indices[t, : len(want)].tolist() == want and counts[t] == len(want)
        assert (indices[t, len(want) :] == -1).all()


def test_a_sequences_values_do_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 21, 4)
    q, rows = (torch.randn(34, *shape, generator=generator) for shape in ((2, 8), (8,)))
    compressed = [torch.randn(n // 4, 8, generator=generator) for n in lengths]
    sink = torch.zeros(2)
    whole = run(q, torch.cat([*compressed, rows]), sink, *row_lists(Packed(lengths, CPU), 6, 4, 2))
    start = 0
    for n, own in zip(lengths, compressed, strict=True):
        part = slice(start, start + n)
        alone = run(q[part], torch.cat([own, rows[part]]), sink, *row_lists(Packed((n,), CPU), 6, 4, 2))
        assert torch.equal(alone, whole[part])
        start += n


def test_wrong_shapes_are_refused():
    (q, rows, sink), lists = scene()
    with pytest.raises(ValueError, match=r"expected \[T, heads, D\]"):
        run(q, rows, sink[:1], *lists)
