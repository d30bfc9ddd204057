"""No gradient of the trainer's models is added up in the order in which a GPU's threads arrive.

A CPU repeats itself anyhow, so what is looked at is which operators a forward and a backward call: those that PyTorch
lists under torch.use_deterministic_algorithms may not be given one place twice. The bits themselves are compared on a
GPU (tests/gpu/test_repeatable_gradients.py).
"""
import pytest
import tiny_deepseek_v4
import tiny_nemotron
import tiny_nemotron_quantised
import torch
from megatron.zero_mismatch import attention_sparse
from megatron.zero_mismatch.packing import pack
from torch.utils._python_dispatch import TorchDispatchMode

MODELS = {"deepseek-v4": tiny_deepseek_v4, "nemotron": tiny_nemotron, "nemotron-quantised": tiny_nemotron_quantised}
LENGTHS = (133, 9, 1, 40)  # a group of 128, whole groups of 4, one token


def _one_place_twice(name: str, arguments: tuple) -> bool:
    if name.startswith(("index_add", "index_reduce")):
        index = arguments[2]
        return index.numel() != index.unique().numel()
    if name.startswith(("scatter_add", "scatter_reduce")):
        dim, index = arguments[1:3]
        return bool((index.sort(dim).values.diff(dim=dim) == 0).any())
    if "index_put" in name and len(arguments) > 3 and arguments[3]:
        places = torch.stack(torch.broadcast_tensors(*(i for i in arguments[1] if i is not None))).flatten(1)
        return places.shape[1] != places.unique(dim=1).shape[1]
    if name.startswith("cumsum"):  # along a whole tensor CUDA's scan looks back to whichever block is ready
        return arguments[0].is_floating_point() and arguments[0].numel() == arguments[0].shape[arguments[1]]
    return False


class Arrivals(TorchDispatchMode):
    """Notes the operators whose sums on CUDA would depend on which thread comes first."""

    def __init__(self):
        super().__init__()
        self.found, self.called = set(), set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        self.called.add(name)
        if _one_place_twice(name, arguments):
            self.found.add(name)
        return function(*arguments, **(keywords or {}))


def arrivals(model) -> Arrivals:
    generator = torch.Generator().manual_seed(0)
    batch = pack([torch.randint(0, 64, (n,), generator=generator) for n in LENGTHS])
    with Arrivals() as seen:
        model(*batch).square().sum().backward()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_no_gradient_depends_on_the_order_of_arrival(name):
    seen = arrivals(MODELS[name].model())
    assert "embedding_dense_backward" in seen.called, "the backward went all the way down"
    assert not seen.found


def test_rows_added_by_index_would_be_noticed(monkeypatch):
    def by_index(dk, listed, count):
        return dk.new_zeros(count, dk.shape[-1]).index_add_(0, listed.flatten().clamp(min=0).long(), dk.flatten(0, 1))

    monkeypatch.setattr(attention_sparse, "_by_row", by_index)
    assert arrivals(tiny_deepseek_v4.model()).found == {"index_add_"}


def table() -> torch.Tensor:
    return torch.zeros(5, 4, requires_grad=True)


TWICE = torch.tensor([0, 3, 0])


@pytest.mark.parametrize("operator,call", [
    ("index_add", lambda x: x.index_select(0, TWICE)),
    ("scatter_add", lambda x: x.gather(0, TWICE[:, None].expand(-1, 4))),
    ("index_put", lambda x: x[TWICE]),
    ("cumsum", lambda x: x[:, 0].cumsum(0)),
])  # fmt: skip
def test_operator_of_pytorchs_list_is_noticed(operator, call):
    with Arrivals() as seen:
        call(table()).sum().backward()
    assert any(operator in name for name in seen.found)
