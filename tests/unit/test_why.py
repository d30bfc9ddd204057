"""`why` names the patches on a path, their lines, reasons and overlay modules; no patch is an answer."""
import pytest
from checkout import BODY, NEW, OLD, Checkout, hooked, pack, tree

from patchset import diff, why
from patchset.errors import NeedsWork, UsageError

GATE = "overlays/toy/toy/zero_mismatch/gate.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Checkout:
    checkout = hooked(tmp_path_factory.mktemp("why"))
    checkout.patch("line-one", "toy/lines.txt", "line 1\n", "", subject="The first line goes")
    return checkout


@pytest.fixture(autouse=True)
def cache(made, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.root / "cache"))


@pytest.fixture(scope="module")
def packed(made) -> Checkout:
    pack(made)
    return made


def ask(made, path, version=None):
    result = why.run(made.root, made.pins, path, version)
    assert result.code == 0
    return result


def test_a_patched_path_shows_lines_reason_trailers_and_overlay_modules(made):
    result = ask(made, "toy/router.py")
    (entry,) = result.data["patches"]
    (file,) = entry["files"]
    assert entry["slug"] == "gate-fp32" and entry["imports"] == file["imports"] == ["toy/zero_mismatch/gate.py"]
    assert file["hunks"] == [{"first": 6, "last": 8, "added": 3, "removed": 1, "section": "import os"}]
    assert entry["body"].split() == BODY.split()
    assert entry["trailers"]["Drop-When"] == ["upstream multiplies in fp32 itself"]
    text = "\n".join(result.lines)
    for part in ("toy/router.py:6-8 (+3 -1)", "calls overlay toy/zero_mismatch/gate.py", "Load-Bearing: yes",
                 "dtype of its input"):
        assert part in text


def test_every_patch_on_a_path_is_named_in_order(made):
    entries = ask(made, "toy/lines.txt").data["patches"]
    assert [entry["slug"] for entry in entries] == ["line-thirty", "line-one"]
    assert [entry["files"][0]["hunks"][0]["first"] for entry in entries] == [30, 1]


@pytest.mark.parametrize("path", ["./toy/router.py", "build/toy/toy/router.py", "{root}/build/toy/toy/router.py",
                                  "toy\\router.py"])
def test_a_path_may_be_written_as_it_stands_in_the_target(made, path):
    result = ask(made, path.format(root=made.root))
    assert result.data["path"] == "toy/router.py" and len(result.data["patches"]) == 1


def test_a_folder_shows_all_below_it(made):
    assert [entry["slug"] for entry in ask(made, "toy/").data["patches"]] == ["gate-fp32", "line-thirty", "line-one"]


@pytest.mark.parametrize("path", [GATE, "toy/zero_mismatch/gate.py"])
def test_an_overlay_module_names_the_hooks_that_import_it(made, path):
    result = ask(made, path)
    assert result.data["overlay"] and result.data["imported_by"] == ["gate-fp32"] and result.data["near"] == []
    assert "module of our overlay" in result.lines[0] and "gate-fp32" in result.lines[1]


@pytest.mark.parametrize("path", ["setup.py", "build/toy/setup.py", "{root}/build/toy/setup.py"])
def test_a_file_of_the_release_that_no_patch_touches_is_an_answer(packed, path):
    result = ask(packed, path.format(root=packed.root))
    assert result.lines[0] == "no patch touches setup.py" and result.data["patches"] == []


@pytest.mark.parametrize(("path", "near"), [("toy/sub/router.py", "toy/router.py"), ("toy/routr.py", "toy/router.py"),
                                            ("set-up.py", "setup.py"), ("toy/zero_mismatch/gates.py", GATE[13:]),
                                            ("toy/router.py/x", "toy/router.py"), ("zzz", None), ("", None),
                                            ("/toy", None)])
def test_a_path_that_nothing_has_is_refused_with_what_is_near(packed, path, near):
    with pytest.raises(UsageError, match="neither toy 2.0.0 nor the overlay has") as caught:
        ask(packed, path)
    meant = caught.value.remedy
    assert meant.startswith(f"did you mean {near}") if near else "top of the source tree" in meant, meant


def test_without_the_sources_an_unknown_path_is_no_answer(made, monkeypatch, tmp_path):
    """Neither archive nor build/: it may be a slip of the pen or a file of the release."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NeedsWork, match="cannot be told") as caught:
        ask(made, "toy/routr.py")
    assert "did you mean toy/router.py?" in caught.value.remedy and "apply.py fetch" in caught.value.remedy
    assert ask(made, "toy/router.py").data["patches"], "what a patch touches needs no sources"


def test_a_tree_in_build_serves_in_place_of_the_archive(tmp_path, monkeypatch):
    built = hooked(tmp_path / "built")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree(built)
    assert ask(built, "setup.py").lines[0] == "no patch touches setup.py"
    with pytest.raises(UsageError):
        ask(built, "toy/routr.py")
    with pytest.raises(NeedsWork, match="cannot be told"):
        ask(built, "setup.py", OLD)


@pytest.mark.parametrize("place", ["/opt/site-packages/toy/router.py", "/opt/toy/toy/router.py"])
def test_an_absolute_path_may_lie_in_any_target(made, place):
    assert ask(made, place).data["path"] == "toy/router.py"


def test_a_version_selects_its_variant(made):
    variant = made.write(f"patches/toy/gate-fp32@{OLD}.patch", made.read("patches/toy/gate-fp32.patch"))
    assert ask(made, "toy/router.py", OLD).data["patches"][0]["patch"].endswith(f"@{OLD}.patch")
    assert ask(made, "toy/router.py", NEW).data["patches"][0]["patch"].endswith("gate-fp32.patch")
    variant.unlink()
    with pytest.raises(UsageError, match="not pinned"):
        why.run(made.root, made.pins, "toy/router.py", "9.9")


@pytest.mark.parametrize(("line", "found"), [
    ("from toy.zero_mismatch.gate import gate", {"gate"}),
    ("from toy.zero_mismatch import gate, other as o", {"gate", "other"}),
    ("    from toy.zero_mismatch import (gate,\n+        other)", {"gate", "other"}),
    ("import toy.zero_mismatch.other", {"other"}),
    ("from toy.zero_mismatch import VERSION", {"__init__"}),
    ("from toy.router import Gate", set()),
    ("from toy.zero_mismatch.gone import x", set())])
def test_imports_of_overlay_modules_are_found(line, found):
    count = line.count("\n") + 1
    text = f"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,0 +2,{count} @@\n+{line}\n"
    overlays = {f"toy/zero_mismatch/{name}.py" for name in ("gate", "other", "__init__")}
    (file,) = diff.parse(text.encode(), "x")
    assert why.imports(file, overlays) == {f"toy/zero_mismatch/{name}.py" for name in found}
