"""What is named inside a site: the two calls that were given the same bits of a row and made other bits of it."""
import sys
import types

import pytest
from written_module import written_module

import torch

from prove import leaf, repro

KERNELS = """
import torch

def small(x, weight):
    return (x[:, None, :] * weight[None]).sum(-1)

def written(x, weight, out):
    out.copy_(small(x, weight))

def many(*tensors):
    return small(*tensors)

def twofold(x, weight):
    '''Another sum over K where more than 4 rows run together.'''
    return small(x, weight) if len(x) <= 4 else small(x[:, :4], weight[:, :4]) + small(x[:, 4:], weight[:, 4:])
"""
ROWS = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    return written_module(tmp_path, monkeypatch, "leaf_kernels", KERNELS)


class Layer(torch.nn.Module):
    def __init__(self, few, many):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.few, self.many = torch.nn.Parameter(torch.randn(8, 8)), few, many

    def forward(self, x):
        return (self.many if len(x) > 4 else self.few)(x, self.weight)


def calls(layer):
    """A row's call together with others and alone, whose answers differ."""
    for row in range(len(ROWS)):
        left = {"site": "l", "path": None, "args": (ROWS,), "kwargs": {}, "rows": len(ROWS), "row": row}
        found = repro.reduce(layer, left, left | {"args": (ROWS[row:row + 1],), "rows": 1, "row": 0})
        if found:
            return found["left"], found["right"]
    raise AssertionError("the layer's rows have the same bits alone")


def named(layer):
    with torch.inference_mode():
        left, right = calls(layer)
        found = leaf.pair(layer, left, right)
    return found and tuple(found[side]["path"] for side in ("left", "right"))


def matmul(x, weight):
    return torch.mm(x, weight.T)


def test_the_operators_that_a_module_chooses_between_are_named(kernels):
    assert named(Layer(kernels.small, matmul)) == ("torch:ops.aten.mm.default", "leaf_kernels:small")


def test_they_are_found_behind_other_modules(kernels):
    inside = torch.nn.Sequential(torch.nn.LayerNorm(8), Layer(kernels.small, matmul), torch.nn.ReLU())
    assert named(inside) == ("torch:ops.aten.mm.default", "leaf_kernels:small")


def test_an_operator_that_both_arms_call_is_named_before_what_follows_from_it(kernels):
    class Follows(Layer):
        def forward(self, x):
            return torch.mm(kernels.twofold(x, self.weight).tanh(), self.weight)
    assert named(Follows(None, None)) == ("leaf_kernels:twofold", "leaf_kernels:twofold")


def test_what_is_written_to_an_argument_counts_as_made(kernels):
    def filled(function):
        def fill(x, weight):
            out = torch.empty(len(x), 8)
            function(x, weight, out)
            return out
        return fill

    def mm_out(x, weight, out):
        torch.mm(x, weight.T, out=out)
    found = named(Layer(filled(kernels.written), filled(mm_out)))
    assert found == ("torch:ops.aten.mm.out", "leaf_kernels:small")


class Gated(Layer):
    """A gate whose kernel is chosen, and another projection of the same input that is not."""

    def __init__(self, few, many, each):
        super().__init__(few, many)
        self.up, self.each = torch.nn.Parameter(torch.randn(8, 8)), each

    def forward(self, x):
        return super().forward(x) * self.each(x, self.up).sign()


def test_a_call_is_no_other_one_s_counterpart_that_has_other_weights(kernels):
    """`small` is called twice in one arm and once in the other, first with the gate's weights and with the others'."""
    assert named(Gated(kernels.small, matmul, kernels.small)) == ("torch:ops.aten.mm.default", "leaf_kernels:small")


def test_a_call_is_no_other_one_s_counterpart_that_has_another_number_or_dtype(kernels):
    class Scaled(Layer):
        def forward(self, x):
            made = self.many(x, self.weight) if len(x) > 4 else self.few(x * 0.5, self.weight * 2.0)
            return made * (x * 3.0).sign()
    assert named(Scaled(kernels.small, matmul)) is None  # one arm halves its input first: nothing has equal inputs


def test_another_power_of_the_row_is_no_other_answer_of_the_same_call(kernels):
    class Powers(Layer):
        def forward(self, x):
            made = super().forward(x)
            return made * (x.pow(2) if len(x) > 4 else x.pow(4) / x.pow(2)).sign()
    assert named(Powers(kernels.small, matmul)) == ("torch:ops.aten.mm.default", "leaf_kernels:small")


def test_the_two_made_the_same_one_of_several_results(kernels):
    class Several(Gated):
        def forward(self, x):
            if len(x) > 4:
                return self.many(x, self.weight), self.many(x, self.up)
            second = self.few(x, self.up)
            return self.few(x, self.weight), second
    layer = Several(kernels.small, matmul, None)
    with torch.inference_mode():
        found = leaf.pair(layer, *calls(layer))
    weights = [found["left"]["args"][1].T, found["right"]["kwargs"]["weight"]]
    assert torch.equal(*weights) and found["right"]["path"] == "leaf_kernels:small"


def test_what_is_added_in_place_to_another_row_is_no_cause(kernels):
    class Added(Layer):
        def forward(self, x):
            return super().forward(x).add_(x)
    assert named(Added(kernels.small, matmul)) == ("torch:ops.aten.mm.default", "leaf_kernels:small")


def test_weights_with_as_many_rows_as_the_step_are_no_rows(kernels, monkeypatch):
    monkeypatch.setitem(globals(), "ROWS", ROWS[:8])
    # Not halved: 8 rows, and weights of 8 x 8.
    monkeypatch.setattr(repro, "reduce", lambda function, left, right: {"left": left, "right": right} if repro.changed(
        repro.row_bits(function, left), repro.row_bits(function, right)) else None)
    assert named(Layer(kernels.small, lambda x, weight: torch.mm(x, weight.T))) == (
        "torch:ops.aten.mm.default", "leaf_kernels:small")


def test_what_an_operator_returns_is_left_alone_whatever_its_name(kernels):
    """Only the allocators of torch return what nobody has filled yet."""
    library = torch.library.Library("leaf_named", "FRAGMENT")
    library.define("without_empty(Tensor x, Tensor weight) -> (Tensor, Tensor)")
    library.impl("without_empty", lambda x, weight: (x @ weight.T, x + 1), "CPU")
    found = named(Layer(kernels.small, lambda x, weight: torch.ops.leaf_named.without_empty(x, weight)[0]))
    assert found == ("torch:ops.leaf_named.without_empty.default", "leaf_kernels:small")


def test_a_function_of_any_number_of_arguments_is_passed_over(kernels):
    assert named(Layer(kernels.many, matmul)) == ("torch:ops.aten.mm.default", "leaf_kernels:small")


def test_a_difference_that_no_call_inside_makes_of_equal_inputs_has_no_name():
    """The last operator makes what is returned, but of other inputs; the ones before it have no counterpart."""
    def halves(x, weight):
        return (x[:, :4] @ weight[:, :4].T).add(x[:, 4:] @ weight[:, 4:].T)

    def whole(x, weight):
        return (x[:, None] * weight[None]).sum(-1)
    assert named(Layer(whole, halves)) is None


def test_the_arguments_are_those_before_the_call(kernels):
    """Both arms overwrite their input after they have used it."""
    class Overwrites(Layer):
        def forward(self, x):
            made = super().forward(x)
            x.zero_()
            return made
    layer = Overwrites(kernels.small, matmul)
    with torch.inference_mode():
        left, right = calls(layer)
        found = leaf.pair(layer, left, right)
    assert torch.equal(found["left"]["args"][0], left["args"][0]) and left["args"][0].any()
    assert torch.equal(found["right"]["kwargs"]["x"], right["args"][0])


def test_a_site_that_objects_to_being_watched_keeps_its_own_file(kernels, capsys):
    layer, before = Layer(kernels.small, matmul), sys.getprofile()
    with torch.inference_mode():
        left, right = calls(layer)
        layer.many = layer.few = lambda x, weight: (_ for _ in ()).throw(ValueError("not today"))
        assert leaf.pair(layer, left, right) is None
    assert "not looked into: ValueError: not today" in capsys.readouterr().out
    assert sys.getprofile() is before


REGISTERING = """
import torch

library = torch.library.Library("leaf_test", "FRAGMENT")
library.define("small(Tensor x, Tensor weight) -> Tensor")

def computed(x, weight):
    return (x[:, None, :] * weight[None]).sum(-1)

library.impl("small", computed, "CPU")
"""


def test_an_operator_registered_in_python_is_named_by_its_function(tmp_path, monkeypatch):
    """A file that calls it through torch.ops would have to know which module registers it."""
    written_module(tmp_path, monkeypatch, "leaf_registering", REGISTERING)
    layer = Layer(lambda x, weight: torch.ops.leaf_test.small(x, weight), matmul)
    with torch.inference_mode():
        found = leaf.pair(layer, *calls(layer))
    assert found["right"]["path"] == "leaf_registering:computed"
    (script,) = repro.scripts(repro.save(tmp_path, "r", "l", None, found), "l", found, {})
    said = repro.run(tmp_path / script, {"PYTHONPATH": str(tmp_path)})
    assert said["shown"], said


def test_the_file_of_an_extension_s_operator_imports_the_extension(monkeypatch):
    for name, file in (("engine._Ctest", "a.abi3.so"), ("engine._Ctest_stable", "b.so"), ("engine._Ctest_py", "c.py")):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__file__=file))
    assert repro._registering("torch:ops._Ctest.f.default") == {"engine._Ctest", "engine._Ctest_stable"}
    assert not repro._registering("torch:ops.aten.mm.default") and not repro._registering("engine._Ctest:f")
