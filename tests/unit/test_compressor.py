"""The KV compressor on plain PyTorch kernels: CuTe DSL is on the GPU."""
import functools

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from megatron.zero_mismatch import compressor as module
from megatron.zero_mismatch import kv_fp8
from megatron.zero_mismatch.compressor import States, compress, pooled, reference
from megatron.zero_mismatch.packing import Packed
from megatron.zero_mismatch.version_guard import WeightsChanged

gradcheck = functools.partial(torch.autograd.gradcheck, fast_mode=True)
CPU = torch.device("cpu")
EPS = 1e-3
LENGTHS = {4: (11, 3, 8, 4), 128: (130, 5, 256)}


def scene(ratio, dim=6, turned=4, dtype=torch.float64):
    generator, packed = torch.Generator().manual_seed(0), Packed(LENGTHS[ratio], CPU)
    columns = (2 if ratio == 4 else 1) * dim

    def normal(*shape, shift=0.0):
        return (torch.randn(*shape, generator=generator) + shift).to(dtype).requires_grad_()

    angle = torch.randn(max(packed.lengths), turned // 2, generator=generator)
    weights = normal(packed.tokens, 2 * columns), normal(ratio, columns), normal(dim, shift=1.0)
    return weights, (packed, torch.cat([angle.cos(), angle.sin()], -1))


def plain(kv_score, ape, weight, packed, cos_sin, ratio):
    """Row by row and column by column, straight from the engine's kernel: window positions, head offset, mask."""
    dim, overlap, rows = len(weight), ratio == 4, []
    width = kv_score.shape[1] // 2
    for begin, end in packed.bounds:
        for p in range(end - begin):
            if (p + 1) % ratio:
                continue
            window = range(p - (1 + overlap) * ratio + 1, p + 1)
            row = []
            for c in range(dim):
                e, v = [], []
                for i, position in enumerate(window):
                    if position >= 0:
                        column = c + (dim if overlap and i >= ratio else 0)
                        token = kv_score[begin + position]
                        e.append(torch.exp(token[width + column] + ape[position % ratio, column]))
                        v.append(token[column])
                row.append(sum(a * b for a, b in zip(e, v, strict=True)) / sum(e))
            row = torch.stack(row)
            row = row / (row.square().mean() + EPS) ** 0.5 * weight
            first = p // ratio * ratio
            cos, sin = cos_sin[first].double().chunk(2)
            tail = row[dim - 2 * len(cos) :]
            tail = torch.stack([tail[0::2] * cos - tail[1::2] * sin, tail[0::2] * sin + tail[1::2] * cos], 1).flatten()
            rows.append(torch.cat([row[: dim - 2 * len(cos)], tail]))
    return torch.stack(rows)


def run(kv_score, ape, weight, packed, cos_sin, ratio):
    return compress(reference, kv_score, ape, weight, packed, cos_sin, ratio, EPS)


@pytest.mark.parametrize("ratio", LENGTHS)
def test_gradcheck(ratio):
    weights, rest = scene(ratio)
    assert gradcheck(lambda *w: run(*w, *rest, ratio), weights)


@pytest.mark.parametrize("ratio", LENGTHS)
def test_value_and_gradient_are_those_of_the_engines_window(ratio):
    weights, rest = scene(ratio)
    got, want = run(*weights, *rest, ratio), plain(*weights, *rest, ratio)
    assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-11)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for g, w in zip(torch.autograd.grad(got, weights, grad), torch.autograd.grad(want, weights, grad), strict=True):
        assert torch.allclose(g, w, rtol=1e-9, atol=1e-11)


def test_leftover_tokens_get_no_gradient():
    weights, (packed, cos_sin) = scene(4)
    run(*weights, packed, cos_sin, 4).sum().backward()
    touched = weights[0].grad.ne(0).any(-1).tolist()
    assert touched == [p // 4 < n // 4 for n in packed.lengths for p in range(n)]


class OwnGroupOnly(module._Compress):
    """A backward whose rows see their own four tokens and not the four before."""

    @staticmethod
    def backward(ctx, grad):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_with_previous", lambda x, _, fill: torch.cat(
                [torch.full_like(x.chunk(2, -1)[0], fill), x.chunk(2, -1)[1]], 1))
            return module._Compress.backward(ctx, grad)


def test_forgotten_previous_group_is_caught():
    weights, (packed, cos_sin) = scene(4)
    with pytest.raises(GradcheckError):
        gradcheck(lambda *w: OwnGroupOnly.apply(reference, *w, packed, cos_sin, 4, EPS, None), weights)


def test_low_precision_row_is_pooled_in_fp32_and_made_the_trip():
    weights, (packed, cos_sin) = scene(4, 512, 64, torch.float32)
    got = compress(reference, *weights, packed, cos_sin, 4, 1e-6)
    want = kv_fp8.round_trip(pooled(*weights, packed, cos_sin, 4, 1e-6), 64)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    assert torch.autograd.grad(got.float().sum(), weights)[0].dtype == torch.float32


def test_rows_do_not_depend_on_neighbouring_sequences():
    (kv_score, ape, weight), (packed, cos_sin) = scene(4)
    whole, at = run(kv_score, ape, weight, packed, cos_sin, 4), 0
    for (begin, end), n in zip(packed.bounds, packed.lengths, strict=True):
        alone = run(kv_score[begin:end], ape, weight, Packed((n,), CPU), cos_sin, 4)
        assert torch.equal(alone, whole[at : at + n // 4])
        at += n // 4


@pytest.mark.parametrize("ratio", LENGTHS)
def test_states_give_every_token_a_slot_and_every_group_a_row(ratio):
    packed = Packed(LENGTHS[ratio], CPU)
    states = States(packed, ratio, 4)
    assert len(set(states.slots.tolist())) == packed.tokens, "two tokens share a slot"
    rows = [slot for slot in states.row_slots.tolist() if slot >= 0]
    assert rows == list(range(module.count(packed, ratio)))
    for t, (p, request) in enumerate(zip(packed.positions.tolist(), states.request.tolist(), strict=True)):
        page = int(states.table[request, p // states.page])
        assert states.slots[t] == page * states.page + p % states.page and page < len(states.cache)
        assert (states.row_slots[t] >= 0) == ((p + 1) % ratio == 0)


def test_batch_without_a_whole_group_gives_no_rows():
    (kv_score, ape, weight), (_, cos_sin) = scene(4)
    assert run(kv_score[:3], ape, weight, Packed((3,), CPU), cos_sin, 4).shape == (0, 6)


def test_changed_ape_is_refused_in_backward():
    weights, rest = scene(4)
    out = run(*weights, *rest, 4)
    with torch.no_grad():
        weights[1].add_(1)
    with pytest.raises(WeightsChanged, match="'ape' has writes"):
        out.sum().backward()


def test_unknown_ratio_is_refused():
    weights, rest = scene(4)
    with pytest.raises(ValueError, match="expected 4 or 128"):
        run(*weights, *rest, 8)
