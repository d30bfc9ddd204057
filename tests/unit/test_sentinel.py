"""The sentinel sees every change of what an anchored symbol computes, and nothing else."""
from __future__ import annotations

import pytest

from patchset import sentinel

SOURCE = '''\
"""The engine."""
import os

LIMIT = 8


def scale(x):
    """Double it."""
    return x * 2


def helper(x):
    # a sum in order
    total = 0
    for item in x:
        total += item
    return total


def kernel(x):
    return x


class Base:
    def reduce(self, y):
        return helper(y)


class Gate(Base):
    """A gate."""

    width: int = 4

    def __init__(self, width):
        self.width = width

    def forward(self, x):
        """One step."""
        y = scale(x)
        z = self.reduce(y)
        kernel[(1,)](z)
        return os.path.join(z, Gate.shape(z))

    @staticmethod
    def shape(z):
        return z.shape

    def outer(self, x):
        return super().reduce(x) + make(x)


def make(x):
    return Gate(x)
'''
PATH = "toy/engine.py"


def compare(new: str, name: str = "Gate.forward", others: dict[str, str] | None = None,
            moved: dict[str, str] | None = None, old: str = SOURCE) -> list[sentinel.Finding]:
    release = {PATH: new.encode(), **{path: text.encode() for path, text in (others or {}).items()}}
    if moved:
        release = {moved.get(path, path): data for path, data in release.items()}
    return sentinel.compare(sentinel.Anchor(PATH, name), {PATH: old.encode()}.get, release.get, release, moved)


def edited(*pairs: tuple[str, str]) -> str:
    text = SOURCE
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize("change", [
    ('"""One step."""', '"""One step of the gate, told at length."""'),
    ('        """One step."""\n', ""),
    ("    # a sum in order\n", "    # summed\n"),
    ("        y = scale(x)\n", "        y = scale(\n            x,\n        )\n"),
    ("import os\n", "import os\nimport sys\n"),
    ("def make(x):\n", "def more(x):\n    return x\n\n\ndef make(x):\n"),
    ("    def outer(self, x):\n        return super()", "    def outer(self, x):\n        return 2 * super()"),
])
def test_comments_docstrings_layout_and_code_that_is_not_called_are_no_change(change):
    assert compare(edited(change)) == []


def test_changed_body_is_shown_as_a_diff_of_normalised_source():
    [finding] = compare(edited(("z = self.reduce(y)", "z = self.reduce(y + 1)")))
    assert (finding.kind, finding.symbol) == ("contract changed", f"{PATH}::Gate.forward")
    assert "-    z = self.reduce(y)\n+    z = self.reduce(y + 1)" in finding.diff
    assert "One step" not in finding.diff


@pytest.mark.parametrize("old, new", [("f('')", "f()"), ("f(0)", "f(0.0)"), ("f(1)", "f(True)"), ("f(None)", "f()"),
                                      ("[[]]", "[]"), ("x = 1", "x: int = 1"), ("f'{x}'", "f'{x!r}'"), ("-1", "1"),
                                      ("def g(): pass", "async def g(): pass"), ("f(*a)", "f(a)"), ("b'a'", "'a'")])
def test_small_differences_of_meaning_are_seen(old, new):
    [finding] = compare(f"def h():\n    {new}\n", name="h", old=f"def h():\n    {old}\n")
    assert finding.kind == "contract changed"


@pytest.mark.parametrize("symbol, old, new", [
    ("scale", "return x * 2", "return x * 3"),  # by name
    ("kernel", "def kernel(x):\n    return x\n", "def kernel(x):\n    return -x\n"),  # a Triton launch
    ("Base.reduce", "return helper(y)", "return helper(y) + 0"),  # inherited, through self
    ("Gate.shape", "return z.shape", "return z.shape[1:]"),  # through the class
])
def test_changed_callee_is_named_though_the_anchor_is_the_same(symbol, old, new):
    [finding] = compare(edited((old, new)))
    assert (finding.kind, finding.anchor) == ("contract changed", f"{PATH}::Gate.forward")
    assert finding.symbol == f"{PATH}::{symbol}"
    assert (finding.diff.count("\n-"), finding.diff.count("\n+")) == (1, 2), finding.diff  # one line, and the header's


def test_callee_of_a_callee_is_another_contract():
    assert compare(edited(("total += item", "total -= item"))) == []
    [finding] = compare(edited(("total += item", "total -= item")), name="Base.reduce")
    assert finding.symbol == f"{PATH}::helper"


def test_super_and_constructor_calls_are_followed():
    [finding] = compare(edited(("return helper(y)", "return helper(y) + 0")), name="Gate.outer")
    assert finding.symbol == f"{PATH}::Base.reduce"
    [finding] = compare(edited(("        self.width = width", "        self.width = 2 * width")), name="make")
    assert finding.symbol == f"{PATH}::Gate.__init__"


def test_method_that_comes_to_override_the_called_one_is_a_change():
    new = edited(("    @staticmethod\n", "    def reduce(self, y):\n        return 0\n\n    @staticmethod\n"))
    findings = compare(new)
    assert {f.symbol for f in findings} == {f"{PATH}::Gate.reduce", f"{PATH}::Base.reduce"}


@pytest.mark.parametrize("name, old, new", [
    ("LIMIT", "LIMIT = 8", "LIMIT = 9"),
    ("Gate.width", "width: int = 4", "width: int = 5"),
    ("Gate", "return z.shape", "return 0"),
])
def test_constants_and_whole_classes_can_be_anchors(name, old, new):
    [finding] = compare(edited((old, new)), name=name)
    assert (finding.kind, finding.symbol) == ("contract changed", f"{PATH}::{name}")
    assert compare(SOURCE, name=name) == []


def test_lost_symbol_is_found_renamed_in_its_file():
    [finding] = compare(edited(("def forward(self, x):", "def step(self, x):")))
    assert (finding.kind, finding.where) == ("anchor gone", (f"{PATH}::Gate.step (renamed, same body)",))


def test_lost_symbol_is_found_in_another_file_by_name_and_body():
    gone = edited(("def scale(x):\n    \"\"\"Double it.\"\"\"\n    return x * 2\n", ""))
    others = {"toy/other.py": "def scale(x):\n    return 7\n", "toy/broken.py": "def scale(x) return\n",
              "toy/math.py": "def scale(x):\n    return x * 2  # twice\n"}
    [finding] = compare(gone, name="scale", others=others)
    assert (finding.kind, finding.where) == ("anchor gone", ("toy/math.py::scale (same body)",))
    del others["toy/math.py"]
    [finding] = compare(gone, name="scale", others=others)
    assert finding.where == ("toy/other.py::scale (same name, other body)",)


def test_lost_callee_is_a_changed_contract_that_says_where_it_went():
    gone = edited(("def scale(x):\n    \"\"\"Double it.\"\"\"\n    return x * 2\n", "from toy.math import scale\n"))
    [finding] = compare(gone, others={"toy/math.py": "def scale(x):\n    return x * 2\n"})
    assert (finding.kind, finding.symbol) == ("contract changed", f"{PATH}::scale")
    assert finding.where == ("toy/math.py::scale (same body)",)


def test_lost_file_is_a_lost_anchor_and_a_renamed_one_is_followed():
    [finding] = sentinel.compare(sentinel.Anchor(PATH, "make"), {PATH: SOURCE.encode()}.get, {}.get, {})
    assert finding.kind == "anchor gone"
    assert compare(SOURCE, moved={PATH: "toy/core.py"}) == []
    [finding] = compare(edited(("return x * 2", "return x * 3")), moved={PATH: "toy/core.py"})
    assert "+++ toy/core.py::scale" in finding.diff


def test_anchor_that_the_base_lacks_is_said_to_lack():
    [finding] = compare(SOURCE, name="Gate.absent")
    assert finding.kind == "anchor not in base"
    [finding] = sentinel.compare(sentinel.Anchor("no/file.py", "f"), {}.get, {}.get, {})
    assert finding.kind == "anchor not in base"


def test_definitions_in_branches_count_together():
    old = "if True:\n    def f(x):\n        return 1\nelse:\n    def f(x):\n        return 2\n"
    [finding] = compare(old.replace("return 2", "return 3"), name="f", old=old)
    assert "+    return 3" in finding.diff
    old = "try:\n    import x\nexcept ImportError:\n    def f():\n        return 1\n"
    assert compare(old.replace("return 1", "return 0"), name="f", old=old)[0].kind == "contract changed"


def test_file_that_is_no_python_is_compared_whole():
    anchor = sentinel.Anchor("csrc/a.cu", "kernel")
    same, other = {"csrc/a.cu": b"int kernel;\n"}, {"csrc/a.cu": b"int kernel; // 2\n"}
    assert sentinel.compare(anchor, same.get, same.get, {}) == []
    [finding] = sentinel.compare(anchor, same.get, other.get, {})
    assert (finding.kind, "+int kernel; // 2" in finding.diff) == ("contract changed", True)


def test_syntax_newer_than_this_python_is_reported_not_passed_over():
    [finding] = compare("def forward(:\n")
    assert (finding.kind, finding.where[0][:7]) == ("anchor unreadable", "line 1:")


def test_anchor_trailers_may_list_several():
    found = sentinel.anchors(["a/b.py::C.d, a/b.py::e", "c.py::F", "none"])
    assert [str(anchor) for anchor in found] == ["a/b.py::C.d", "a/b.py::e", "c.py::F"]


def test_long_differences_are_cut_and_say_so():
    body = "".join(f"    x = {n}\n" for n in range(200))
    [finding] = compare(f"def f():\n{body}".replace("= ", "= -"), name="f", old=f"def f():\n{body}")
    assert finding.diff.count("\n") == sentinel.EVIDENCE_LINES
    assert finding.diff.endswith("more lines")


def test_digest_of_the_differences_does_not_hang_on_the_python_that_computes_it():
    """Recorded in patches, so it must be the same under every Python: this value was computed under 3.11."""
    findings = compare(edited(("return x * 2", "return x * 3"), ("z = self.reduce(y)", "z = f'{self!r:>{y}}'")))
    assert len(findings) == 2
    assert sentinel.digest(findings) == sentinel.digest(reversed(findings)) == "130b0d1c2e20"
