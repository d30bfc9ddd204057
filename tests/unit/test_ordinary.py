"""What `prove cost` measures against is the aligned model: the same values and gradients where nothing rounds."""
from unittest import mock

import pytest
import tiny_deepseek_v4
import tiny_nemotron
import torch
from megatron.zero_mismatch import kernels, kernels_dsv4
from megatron.zero_mismatch.models import deepseek_v4, nemotron_h
from megatron.zero_mismatch.packing import pack

from prove import ordinary_deepseek_v4, ordinary_nemotron_h

LENGTHS = (5, 140, 1, 33)


def grouped(x, w, offs):
    """F.grouped_mm in any dtype."""
    starts = [0, *offs.tolist()]
    return torch.cat([x[a:b] @ one for a, b, one in zip(starts[:-1], starts[1:], w, strict=True)])


def nemotron(kind):
    made = kind(nemotron_h.Shape.from_hf(tiny_nemotron.CONFIG), kernels.reference(), torch.float64)
    made.take(tiny_nemotron.engine_weights(torch.float64))
    return made


def deepseek(kind):
    """Every pooled row is chosen: the aligned indexer chooses by FP8 scores."""
    shape = deepseek_v4.Shape.from_hf({**tiny_deepseek_v4.CONFIG, "index_topk": 64})
    tables = {ratio: table.double() for ratio, table in tiny_deepseek_v4.tables().items()}
    made = kind(shape, kernels_dsv4.exact(), tables, torch.float64)
    return tiny_deepseek_v4.fill(made, ("_expert_table", tiny_deepseek_v4._expert_table))


FAMILIES = {"nemotron_h": (nemotron, nemotron_h.NemotronH, ordinary_nemotron_h.Ordinary),
            "deepseek_v4": (deepseek, deepseek_v4.DeepseekV4, ordinary_deepseek_v4.Ordinary)}


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_model_is_the_aligned_one_without_its_roundings(family):
    make, *kinds = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    batch = pack([torch.randint(0, 64, (n,), generator=generator) for n in LENGTHS])
    found = []
    with mock.patch("torch.nn.functional.grouped_mm", grouped):
        for kind in kinds:
            for recompute in (False, True):
                made = make(kind)
                made.recompute = recompute
                out = made(*batch)
                (out * torch.arange(len(out)).sin()).sum().backward()
                found.append((out.detach(), {n: p.grad for n, p in made.named_parameters() if p.grad is not None}))
    first, *others = found
    for out, grads in others:
        torch.testing.assert_close(out, first[0], rtol=1e-4, atol=1e-4)
        assert grads.keys() == first[1].keys()
        for name, grad in grads.items():
            error = (grad - first[1][name]).norm() / first[1][name].norm()
            assert error < 1e-3, (name, error)
