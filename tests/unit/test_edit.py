"""Edits of a patched tree go into one patch and the later ones move on top of it, or nothing is written."""
import ast
import copy
import shutil

import pytest
import user_configs
from checkout import BASE, NEW, OLD, Checkout, edit, hooked, tree

from patchset import deliver, series, state, target
from patchset import edit as edits
from patchset.errors import ConflictError, DirtyTarget, LockMismatch, NeedsWork, UsageError
from patchset.shadow import File

GATE, LINES, SERIES = "patches/toy/gate-fp32.patch", "patches/toy/line-thirty.patch", "patches/toy/series"


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Checkout:
    """Three patches, the last two on one file, and build/toy with the series applied. Not to be written to."""
    checkout = hooked(tmp_path_factory.mktemp("template"))
    checkout.patch("line-twelve", "toy/lines.txt", "line 12\n", "line twelve\n")
    checkout.export()
    tree(checkout)
    return checkout


@pytest.fixture
def made(template, tmp_path) -> Checkout:
    checkout = copy.copy(template)
    checkout.base = dict(template.base)
    checkout.root = shutil.copytree(template.root, tmp_path / "checkout")
    return checkout


def alter(made: Checkout, path: str, old: str, new: str) -> None:
    made.change(f"build/toy/{path}", old, new)


def refresh(made: Checkout, slug=None, add=None):
    return edits.refresh(made.root, made.pins, "toy", slug, None, add, made)


def kept(made: Checkout) -> dict[str, tuple[int, bytes]]:
    """What the checkout itself holds, without build/."""
    return {path: found for path, found in made.snapshot().items() if not path.startswith("build/")}


def is_applied(made: Checkout) -> bool:
    request = deliver.Request(made.root, made.pins, made.pins.profile("all"))
    one = target.tree(made.pins.upstream("toy"), made.root / "build/toy")
    return deliver.verify(request, one).done == "applied"


@pytest.mark.parametrize("name", user_configs.CONFIGS)
def test_refresh_with_nothing_changed_writes_nothing_under_any_configuration(name, template, tmp_path, monkeypatch):
    user_configs.install(name, tmp_path, monkeypatch)
    before = template.snapshot()
    assert refresh(template, "gate-fp32").data == {"patch": "gate-fp32", "edited": [], "written": [], "left": {}}
    assert template.snapshot() == before


def test_an_edit_goes_into_the_last_patch_that_touches_the_file(made):
    alter(made, "toy/router.py", "        y = gate(x)\n", "        y = gate(x)  # fp32\n")
    others = made.read(LINES)
    result = refresh(made)
    assert result.data == {"patch": "gate-fp32", "edited": ["toy/router.py"], "written": [GATE], "left": {}}
    assert "+        y = gate(x)  # fp32" in made.read(GATE) and made.read(LINES) == others
    assert made.export(check=True).code == 0 and is_applied(made)
    assert refresh(made).data["edited"] == []


def test_later_patches_move_on_top_of_an_edit_of_an_earlier_one(made):
    alter(made, "toy/lines.txt", "line 28\n", "line 28\nline 28.5\n")
    result = refresh(made, "line-thirty")
    assert result.data["written"] == [LINES, "patches/toy/line-twelve.patch"]
    assert "+line 28.5" in made.read(LINES) and "28.5" not in made.read("patches/toy/line-twelve.patch")
    assert made.export(check=True).code == 0 and is_applied(made)
    assert "line 28.5\n" in made.read("build/toy/toy/lines.txt")


def test_an_edit_on_a_later_patchs_lines_is_a_conflict_with_both_sides_and_nothing_written(made):
    alter(made, "toy/lines.txt", "line twelve\n", "line XII\n")
    before = made.snapshot()
    with pytest.raises(ConflictError) as caught:
        refresh(made, "line-thirty")
    assert caught.value.exit_code == 3 and "line XII" in caught.value.message and "line 12" in caught.value.message
    assert made.snapshot() == before
    assert refresh(made).data["patch"] == "line-twelve"


def test_an_edit_that_undoes_a_later_patch_is_refused(made):
    alter(made, "toy/lines.txt", "line twelve\n", "line 12\n")
    before = made.snapshot()
    with pytest.raises(ConflictError):
        refresh(made, "line-twelve")
    assert made.snapshot() == before


def test_overlay_edits_and_new_overlay_files_are_copied_back(made):
    alter(made, "toy/zero_mismatch/gate.py", "2.0", "3.0")
    made.write("build/toy/toy/zero_mismatch/sub/more.py", "x = 1\n")
    made.write("build/toy/toy/zero_mismatch/__pycache__/more.pyc", b"x")
    made.write("build/toy/toy/scratch.py", "no overlay\n")
    made.write("build/toy/toy/zero_mismatch/gate.py.orig", "an editor's\n")
    result = refresh(made)
    assert result.data["written"] == [f"overlays/toy/toy/zero_mismatch/{name}" for name in ("gate.py", "sub/more.py")]
    assert result.data["left"] == {"toy/scratch.py": "new, and not in a folder of the overlay",
                                   "toy/zero_mismatch/gate.py.orig": "new, and no .py file as the overlay holds"}
    assert "toy/scratch.py: left in the tree (new" in "\n".join(result.lines)
    assert result.data["patch"] is None and "x * 3.0" in made.read(result.data["written"][0])
    assert is_applied(made) and made.read("build/toy/toy/scratch.py") == "no overlay\n"
    assert refresh(made).data["edited"] == []


def test_a_lost_overlay_file_is_refused(made):
    (made.root / "build/toy/toy/zero_mismatch/gate.py").unlink()
    with pytest.raises(DirtyTarget, match="missing in the tree"):
        refresh(made)


def test_a_file_without_a_patch_needs_a_name(made):
    alter(made, "setup.py", "toy", "TOY")
    before = made.snapshot()
    with pytest.raises(UsageError, match="belong to one patch"):
        refresh(made)
    with pytest.raises(UsageError, match="no patch 'nobody'"):
        refresh(made, "nobody")
    with pytest.raises(UsageError, match="touches none of the edited files") as caught:
        refresh(made, "gate-fp32")
    assert [(row.path, row.found) for row in caught.value.rows] == [("setup.py", "edited, of no patch")]
    assert made.snapshot() == before
    assert refresh(made, "gate-fp32", ["setup.py"]).data["written"] == [GATE]
    assert "b/setup.py" in made.read(GATE) and is_applied(made)


def test_a_patch_grows_only_by_files_that_were_named(made):
    """Edits of other files stay in the tree as they are, byte for byte, and are listed."""
    alter(made, "toy/router.py", "        y = gate(x)\n", "        y = gate(x)  # fp32\n")
    alter(made, "toy/lines.txt", "line 40\n", "line forty\n")
    alter(made, "setup.py", "toy", "TOY")
    (made.root / "build/toy/toy/__init__.py").unlink()
    others = {path: made.read(f"build/toy/{path}") for path in ("toy/lines.txt", "setup.py")}
    result = refresh(made, "gate-fp32")
    assert result.data["edited"] == ["toy/router.py"] and result.data["written"] == [GATE]
    assert result.data["left"] == {"setup.py": "edited, of no patch", "toy/lines.txt": "edited, of line-twelve"}
    assert "setup.py: left in the tree (edited, of no patch)" in result.lines and "--add PATH" in result.lines[-1]
    assert {path: made.read(f"build/toy/{path}") for path in others} == others
    assert series.load(made.root, "toy", NEW)[0].paths == ["toy/router.py"] and made.export(check=True).code == 0
    assert refresh(made, "line-twelve").data["edited"] == ["toy/lines.txt"], "the other patch takes its own next"
    assert is_applied(made)


def test_left_edits_come_back_though_the_tree_cannot_be_patched_again(made, monkeypatch):
    alter(made, "toy/router.py", "        y = gate(x)\n", "        y = gate(x)  # fp32\n")
    alter(made, "toy/lines.txt", "line 40\n", "line forty\n")
    mine = made.read("build/toy/toy/lines.txt")
    monkeypatch.setattr(deliver, "_deliver", lambda *_: (_ for _ in ()).throw(NeedsWork("no space")))
    with pytest.raises(NeedsWork, match="no space"):
        refresh(made, "gate-fp32")
    assert made.read("build/toy/toy/lines.txt") == mine


@pytest.mark.parametrize("path", ["toy/router.py", "toy/scratch.py", "nowhere.py", "../../patchset.toml"])
def test_only_edited_files_of_the_release_can_be_added(made, path):
    alter(made, "setup.py", "toy", "TOY")
    made.write("build/toy/toy/scratch.py", "new\n")
    before = made.snapshot()
    with pytest.raises(UsageError, match="cannot take these"):
        refresh(made, "gate-fp32", [path])
    with pytest.raises(UsageError):
        refresh(made, None, [path])
    assert made.snapshot() == before


def test_a_file_to_add_may_be_named_as_it_lies_on_disk(made, monkeypatch):
    alter(made, "setup.py", "toy", "TOY")
    monkeypatch.chdir(made.root / "build" / "toy" / "toy")
    assert refresh(made, "gate-fp32", ["../setup.py"]).data["edited"] == ["setup.py"]


def test_files_of_two_patches_need_a_name(made):
    alter(made, "toy/router.py", "import os\n", "import os, sys\n")
    alter(made, "toy/lines.txt", "line 40\n", "line forty\n")
    with pytest.raises(UsageError) as caught:
        refresh(made)
    assert {row.found for row in caught.value.rows} == {"last touched by gate-fp32", "last touched by line-twelve"}


def test_a_new_patch_is_a_draft_until_its_first_refresh(made):
    before = kept(made)
    draft = edits.new(made.root, made.pins, "toy", "first-line").data["draft"]
    assert {**before, draft: made.snapshot()[draft]} == kept(made), "no other file changes"
    assert made.export(check=True).code == 0 and is_applied(made), "every other verb goes on"
    with pytest.raises(NeedsWork, match="no edits"):
        refresh(made, "first-line")
    made.change(draft, "Subject: TODO", "Subject: First")
    alter(made, "toy/lines.txt", "line 1\n", "line one\n")
    result = refresh(made, "first-line")
    assert result.data["written"] == ["patches/toy/first-line.patch", SERIES] and not (made.root / draft).exists()
    assert series.slugs(made.root, "toy")[-1] == "first-line"
    patch = series.load(made.root, "toy", NEW)[-1]
    assert patch.subject.startswith("First what") and patch.values("Tests")[0].startswith("TODO")
    assert made.export(check=True).code == 0 and is_applied(made)


@pytest.mark.parametrize("slug", ["Gate", "a_b", "a/b", "-a", "gate-fp32"])
def test_bad_and_taken_names_are_refused(made, slug):
    before = made.snapshot()
    with pytest.raises(UsageError):
        edits.new(made.root, made.pins, "toy", slug)
    assert made.snapshot() == before


def test_a_second_draft_of_one_name_is_refused(made):
    edits.new(made.root, made.pins, "toy", "first-line")
    with pytest.raises(UsageError):
        edits.new(made.root, made.pins, "toy", "first-line")


def test_a_deleted_file_of_the_series_becomes_a_deletion(made):
    (made.root / "build/toy/toy/lines.txt").unlink()
    assert refresh(made).data["patch"] == "line-twelve"
    assert "deleted file mode 100644" in made.read("patches/toy/line-twelve.patch") and is_applied(made)


def test_files_that_builds_write_are_no_edits(made):
    made.base[NEW] = made.base[NEW] | {"toy/_version.py": made.base[NEW]["toy/__init__.py"]}
    made.write("build/toy/toy/_version.py", "version = 'local'\n")
    made.write("build/toy/toy/_C.so", b"\x7fELF")
    assert refresh(made).data["edited"] == []


def test_modes_stay_out_of_the_patch(made, tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("modes"))
    checkout.base[NEW]["toy/router.py"] = File(BASE["toy/router.py"].encode(), "100755")
    checkout.state = dict(checkout.base[NEW])
    checkout.patch("gate-fp32", "toy/router.py", "y = x * 2\n", "y = x * 2.0\n")
    checkout.export()
    tree(checkout)
    alter(checkout, "toy/router.py", "2.0", "4.0")
    refresh(checkout)
    text = checkout.read(GATE)
    assert "mode 100" not in text and " 100755\n" in text
    assert (checkout.root / "build/toy/toy/router.py").stat().st_mode & 0o111


def test_another_locks_tree_a_pristine_and_a_missing_one_are_refused(made):
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "2.0", "5.0")
    with pytest.raises(LockMismatch, match="another lock"):
        refresh(made)
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "5.0", "2.0")
    one = target.tree(made.pins.upstream("toy"), made.root / "build/toy")
    deliver.revert(deliver.Request(made.root, made.pins, made.pins.profile("all")), one)
    with pytest.raises(NeedsWork, match="not patched"):
        refresh(made)
    with pytest.raises(UsageError):
        edits.refresh(made.root, made.pins, "toy", None, made.root / "nowhere", None, made)


def test_a_release_that_no_longer_takes_the_patch_is_named_after_writing(made):
    made.base[OLD] = edit(made.base[OLD], "toy/router.py", "    first = x\n", "    first = x + 0\n")
    made.export()
    alter(made, "toy/router.py", "    first = x\n", "    first = 2 * x\n")
    with pytest.raises(ConflictError, match="the lock is stale"):
        refresh(made)
    assert "first = 2 * x" in made.read(GATE)


def test_a_tree_of_another_release_gets_variants_of_its_own(made):
    made.base[OLD] = edit(made.base[OLD], "toy/lines.txt", "line 2\n", "line 2\nline 2.5\n")
    made.export()
    main = {path: data for path, (_, data) in kept(made).items() if path.startswith("patches/")}
    one = tree(made, OLD, "old")
    made.change("old/toy/lines.txt", "line 33\n", "line 33\nline 33.5\n")
    result = edits.refresh(made.root, made.pins, "toy", "line-thirty", one.root, None, made)
    assert result.data["written"] == [f"patches/toy/line-thirty@{OLD}.patch"], "line-twelve only moved"
    now = {path: data for path, (_, data) in kept(made).items() if path.startswith("patches/")}
    assert main.items() <= now.items()
    request = deliver.Request(made.root, made.pins, made.pins.profile("all"))
    assert deliver.verify(request, one).done == "applied" and made.export(check=True).code == 0
    assert edits.refresh(made.root, made.pins, "toy", None, one.root, None, made).data["edited"] == []


def test_a_new_patch_begins_on_the_default_release(made):
    one = tree(made, OLD, "old")
    edits.new(made.root, made.pins, "toy", "first-line")
    made.change("old/toy/lines.txt", "line 1\n", "line one\n")
    with pytest.raises(UsageError, match="first-line is new"):
        edits.refresh(made.root, made.pins, "toy", "first-line", one.root, None, made)


def test_the_refreshed_tree_compiles_and_keeps_its_state(made):
    alter(made, "toy/router.py", "y = gate(x)", "y = gate(x) + 0")
    refresh(made)
    ast.parse(made.read("build/toy/toy/router.py"))
    changed = {change.path for change in state.load(made.root / "build/toy/.zero-mismatch").changes}
    assert changed >= {"toy/router.py", "toy/lines.txt", "toy/zero_mismatch/gate.py"}
