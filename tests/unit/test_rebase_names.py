"""A hunk that applies and leans on a name the release no longer has is not let through."""
from __future__ import annotations

import pytest
from releases import ENGINE, FORWARD, LAST, VERSION, Upstream, files, only

from patchset import rebase_names


@pytest.fixture
def upstream(tmp_path) -> Upstream:
    return Upstream(tmp_path)


def test_a_name_that_the_release_does_not_define_is_found_by_scope(upstream):
    """`os` is imported in the base; the release has a local of that name elsewhere, which does not help."""
    upstream.hook("gate", FORWARD, anchor=f"{ENGINE}::LIMIT")
    upstream.edit_release(("import os\n", "import io\n"), ("    a = x\n", "    a = os = x\n"))
    result = only(upstream.rebase())
    assert (result.verdict, result.text, upstream.result.code) == ("name gone", "clean", 3)
    assert result.names == [f"{ENGINE}: os is not defined"]


def test_an_attribute_that_the_release_renamed_is_found_by_its_word(upstream):
    upstream.hook("reduce", ("            total += step\n", "            total += step * self.height\n"),
                  anchor=f"{ENGINE}::LIMIT")
    upstream.edit_release(("        self.height = 2\n", "        self.tall = 2  # height\n"))
    result = only(upstream.rebase())
    assert (result.verdict, result.text) == ("name gone", "clean")
    assert result.names == [f"{ENGINE}: the release's file no longer has the word height"]


def test_an_import_that_a_patch_adds_must_resolve_in_the_release(upstream):
    call = "        y = scale(x)\n"
    upstream.hook("gate", (call, f"        from toy.other import OTHER\n\n{call}"), anchor=f"{ENGINE}::LIMIT")
    assert only(upstream.rebase()).verdict == "clean"
    upstream.release = upstream.release | files({"toy/other.py": "SOMETHING = 1\n"})
    result = only(upstream.rebase())
    assert (result.verdict, result.names) == ("name gone", [f"{ENGINE}: toy.other.OTHER is not there to import"])


def test_what_an_earlier_patch_brings_along_counts(upstream):
    helper = files({"toy/hook.py": "def hooked(x):\n    return x\n"})
    upstream.add("helper", upstream.state | helper, trailers="Arch: any\n")
    upstream.hook("gate", ("        y = scale(x)\n", "        from toy.hook import hooked\n\n        y = hooked(x)\n"),
                  anchor=f"{ENGINE}::LIMIT")
    assert [result.verdict for result in upstream.rebase().patches] == ["clean", "clean"]


def test_a_patch_written_by_hand_is_checked_for_undefined_names_but_not_for_words(upstream):
    upstream.hook("gate", FORWARD, anchor=f"{ENGINE}::LIMIT")
    upstream.edit_release(("import os\n", "import io\n"))
    upstream.write(f"patches/toy/gate@{VERSION}.patch", upstream.read("patches/toy/gate.patch"))
    assert only(upstream.rebase()).verdict == "name gone"
    upstream.change(f"patches/toy/gate@{VERSION}.patch", "not os.environ", "not io.SEEK_SET")
    assert only(upstream.rebase()).verdict == "resolved"


def test_overlay_modules_must_find_what_they_import(upstream):
    upstream.hook("gate", LAST, anchor=f"{ENGINE}::LIMIT")
    upstream.write("overlays/toy/toy/zero_mismatch/gate.py",
                   "from toy.zero_mismatch import other\n\n\ndef gate():\n    from toy.engine import LIMIT, scale\n"
                   "    from toy import engine\n    import toy._C\n")
    upstream.write("overlays/toy/toy/zero_mismatch/other.py", "")
    assert upstream.rebase().overlay == []  # toy._C is compiled, so neither sdist has it
    upstream.edit_release(("LIMIT = 8", "BOUND = 8"))
    done = upstream.rebase()
    assert done.overlay == ["toy/zero_mismatch/gate.py: toy.engine.LIMIT is not there to import"]
    assert upstream.result.code == 3
    assert "toy.engine.LIMIT" in "\n".join(upstream.result.lines)
    assert "toy.engine.LIMIT" in (upstream.out / "report.md").read_text()


@pytest.mark.parametrize("source, names", [
    ("def f():\n    return missing\n", {"missing"}),
    ("def f():\n    x = 1\n    def g():\n        return x\n    return g\n", set()),
    ("def f():\n    global made\n    made = 1\n\n\ndef g():\n    return made\n", set()),
    ("class A:\n    one = 1\n    two = one\n\n    def f(self):\n        return one\n", {"one"}),
    ("[x for x in range(3)]\nprint(x)\n", {"x"}),
    ("try:\n    import a.b as c\nexcept ImportError as error:\n    c = error\n__file__, c\n", set()),
    ("from a import *\nanything\n", set()),
    ("def f(x: 'Later') -> Later:\n    pass\n", {"Later"}),
    ("def f(\n", set()),
])
def test_undefined_names_are_those_a_compiler_would_look_up_in_vain(source, names):
    assert rebase_names.undefined(source.encode(), "f.py") == names


def test_imports_resolve_to_definitions_modules_and_dynamic_modules():
    release = {"toy/__init__.py": b"from .core import thing\n", "toy/core.py": b"x = y\n", "toy/sub/__init__.py": b"",
               "toy/lazy.py": b"def __getattr__(name):\n    return 1\n"}.get
    assert rebase_names.resolves("toy", "thing", release)
    assert rebase_names.resolves("toy", "sub", release) and rebase_names.resolves("toy.sub", "", release)
    assert rebase_names.resolves("toy.lazy", "whatever", release)
    assert rebase_names.resolves("toy.core", "x", release)
    assert not rebase_names.resolves("toy.core", "y", release)  # read there, not defined
    assert not rebase_names.resolves("toy.none", "", release)


def test_a_name_that_is_missing_in_the_old_release_too_is_the_patchs_own_affair(upstream):
    upstream.hook("last", LAST, anchor=f"{ENGINE}::LIMIT")
    assert "hooked" in rebase_names.undefined(upstream.state[ENGINE].data, ENGINE)
    assert only(upstream.rebase()).verdict == "clean"
