"""What export writes depends on the patches and the release alone, and writing it twice changes nothing."""
import copy
import functools
import re
import shutil

import pytest
import user_configs
from checkout import BASE, BODY, NEW, OLD, TRAILERS, Checkout, diff, edit, files, hooked, user_git
from hypothesis import given, settings
from hypothesis import strategies as st

from patchset import export, lock, series
from patchset.errors import ConflictError
from patchset.series import Patch
from patchset.shadow import File

GATE = "patches/toy/gate-fp32.patch"
UNUSUAL = 'toy/ü "q" b.py'


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> Checkout:
    """Patches whose diff git prints in many ways: two hunks near each other, odd names, CRLF, a copy, several files."""
    made = Checkout(tmp_path_factory.mktemp("spread"))
    more = files({UNUSUAL: "a = 1\n" * 9, "toy/crlf.py": b"x = 1\r\ny = 2\r\nz = 3",
                  "toy/sub/c.py": BASE["toy/lines.txt"]})
    made.base = {version: base | more for version, base in made.base.items()}
    made.state = dict(made.base[NEW])
    state = edit(made.state, "toy/lines.txt", "line 3\n", "line three\n")
    state = edit(state, "toy/lines.txt", "line 15\n", "line fifteen \n")
    state = edit(edit(state, UNUSUAL, "a = 1\n", "a = 2\n"), "toy/crlf.py", "y = 2\r\nz = 3", "y = 5\r\nz = 4")
    state |= {"toy/copied.txt": File(state["toy/lines.txt"].data + b"more\n"), "toy/empty.py": File(b"", "100755")}
    del state["setup.py"]
    made.add("many-files", state)
    made.patch("gate-fp32", "toy/router.py", "y = x * 2\n", "y = x * 2.0\n")
    made.export()
    return made


def texts(snapshot) -> dict[str, bytes]:
    return {path: data for path, (_, data) in snapshot.items()}


@pytest.mark.parametrize("name", user_configs.CONFIGS)
def test_no_user_configuration_changes_a_byte(name, spread, tmp_path, monkeypatch):
    made = copy.copy(spread)
    made.root = shutil.copytree(spread.root, tmp_path / "checkout")
    before = made.snapshot()
    user_configs.install(name, tmp_path, monkeypatch)
    result = made.export()
    assert (result.data["changed"], made.snapshot()) == ([], before)
    shuffled = made.read(GATE).replace("Arch: any\n", "").replace("Tests:", "Arch: any\nTests:", 1)
    made.write(GATE, shuffled + "-- \n2.50\n")
    (made.root / lock.NAME).unlink()
    assert sorted(made.export().data["changed"]) == [GATE, lock.NAME]
    assert texts(made.snapshot()) == texts(before)


@pytest.mark.parametrize("name", user_configs.BITES)
def test_plain_git_does_print_something_else_under_these(name, tmp_path):
    before = files({"lines.txt": BASE["toy/lines.txt"], "é b.py": "a\n"})
    after = edit(edit(before, "lines.txt", "line 3\n", "LINE 3\n"), "lines.txt", "line 15\n", "line 15 \n")
    after = edit(after, "é b.py", "a\n", "b\n") | {"copied.txt": File(before["lines.txt"].data + b"more\n")}
    for path, file in before.items():
        (tmp_path / path).write_bytes(file.data)
    plain, own = tmp_path / "plain", user_configs.write(name, tmp_path)
    plain.write_text("")
    user_git("init", "-q", ".", cwd=tmp_path, config=plain)
    user_git("add", *before, cwd=tmp_path, config=plain)
    user_git("commit", "-qm", "before", cwd=tmp_path, config=plain)
    for path, file in after.items():
        (tmp_path / path).write_bytes(file.data)
    user_git("add", *after, cwd=tmp_path, config=plain)
    said = [user_git("diff", "--cached", cwd=tmp_path, config=config) for config in (own, plain)]
    assert said[0] != said[1]


def test_check_writes_nothing_and_names_what_differs(tmp_path):
    made = hooked(tmp_path)
    assert made.export(check=True).code == 0
    made.change(GATE, "Arch: any\n", "")
    made.change(GATE, "Upstream-PR", "Arch: any\nUpstream-PR")
    before = made.snapshot()
    result = made.export(check=True)
    assert (result.code, result.data["changed"]) == (1, [GATE, lock.NAME])
    assert made.snapshot() == before
    assert made.export().code == 0 and made.export(check=True).code == 0


def test_a_missing_or_stale_lock_is_written(tmp_path):
    made = hooked(tmp_path)
    text = made.read(lock.NAME)
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "2.0", "4.0")
    assert made.export(check=True).data["changed"] == [lock.NAME]
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "4.0", "2.0")
    (tmp_path / lock.NAME).unlink()
    assert made.export().data["changed"] == [lock.NAME] and made.read(lock.NAME) == text


def test_header_body_and_trailers_take_their_fixed_form(tmp_path):
    made = Checkout(tmp_path)
    shuffled = "".join(reversed(TRAILERS.splitlines(keepends=True))) + "X-Own: kept\n"
    shuffled += f"Tests: {'t/' * 70}x.py::test_a\n"
    path = made.patch("gate-fp32", "toy/router.py", "y = x * 2\n", "y = x * 2.0\n", trailers=shuffled,
                      body="  \n" + "word " * 60 + "\n\n- a list\n- stays\n\n    code  \n\n\n" + BODY)
    path.write_bytes(path.read_bytes().replace(b"---\ndiff", b"---\n toy/router.py | 2 +-\n\ndiff"))
    made.export()
    head = path.read_text().split("\n---\n")[0]
    assert head.split("\n\n")[2:4] == ["- a list\n- stays", "    code"]
    assert max(len(line) for line in head.splitlines() if "t/t/" not in line) <= export.WIDTH
    names = re.findall(r"^([A-Z][\w-]*):", head.split("\n\n")[-1], re.MULTILINE)
    assert names == ["Upstream-Status", "Upstream-PR", "Arch", "Tests", "Tests", "Counter-Test", "Drop-When",
                     "Load-Bearing", "Anchors", "X-Own"]


def test_git_am_takes_it_with_its_trailers(tmp_path):
    made = Checkout(tmp_path / "checkout")
    long = f"itself, {'a condition of many words, ' * 5}folded as git folds it"
    made.patch("gate-fp32", "toy/router.py", "y = x * 2\n", "y = x * 2.0\n", subject="Gâte: ünusual",
               trailers=TRAILERS.replace("itself", long))
    text = made.read(GATE)
    made.write(GATE, text.replace("From: toy <toy@toy.invalid>\n", ""))
    made.export()
    tree, plain = tmp_path / "tree", tmp_path / "gitconfig"
    plain.write_text("")
    for path, text in BASE.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    for command in (["init", "-q", "."], ["add", "-A"], ["commit", "-qm", "base"], ["am", "-q", str(made.root / GATE)]):
        user_git(*command, cwd=tree, config=plain)
    assert (tree / "toy/router.py").read_bytes() == made.state["toy/router.py"].data
    form = "--format=%an <%ae>|%s|%(trailers:key=Drop-When,unfold,valueonly)"
    author, subject, when = user_git("log", "-1", form, cwd=tree, config=plain).strip().split("|")
    assert (author, subject) == (export.AUTHOR, "Gâte: ünusual")
    assert when == f"upstream multiplies in fp32 {long}"


def test_a_hunk_that_moved_is_written_at_its_exact_place(tmp_path):
    made = hooked(tmp_path)
    text = made.read("patches/toy/line-thirty.patch")
    made.base[NEW] = edit(made.base[NEW], "toy/lines.txt", "line 1\n", "line 1\nline 1.5\n")
    made.export()
    assert "@@ -28,7 +28,7 @@" in made.read("patches/toy/line-thirty.patch")
    assert "@@ -27,7 +27,7 @@" in text


def test_a_variant_is_taken_against_its_own_release(tmp_path):
    made = hooked(tmp_path)
    main = made.read(GATE)
    made.base[OLD] = edit(files(BASE), "toy/router.py", "y = x * 2\n", "y = 2 * x\n")
    moved = main.replace("y = x * 2\n", "y = 2 * x\n").replace("@@ -3,", "@@ -2,")
    made.write(f"patches/toy/gate-fp32@{OLD}.patch", moved)
    result = made.export()
    assert GATE not in result.data["changed"] and made.read(GATE) == main
    variant = made.read(f"patches/toy/gate-fp32@{OLD}.patch")
    blob = re.search(r"index ([0-9a-f]{40})", variant)[1]
    with_blob = diff(made.base[OLD], edit(made.base[OLD], "toy/router.py", "y", "Y")).decode()
    assert f"index {blob}" in with_blob and "@@ -3," in variant
    assert set(lock.Lock.load(tmp_path).targets) == {f"toy@{NEW}/all", f"toy@{OLD}/all"}


def test_a_patch_that_conflicts_or_is_absorbed_stops_everything(tmp_path):
    made = hooked(tmp_path)
    made.change("patches/toy/line-thirty.patch", " line 29\n", " line 29b\n")
    made.change(GATE, "Arch: any", "Arch: sm90")
    before = made.snapshot()
    with pytest.raises(ConflictError, match=f"does not apply .toy {NEW}."):
        made.export()
    assert made.snapshot() == before
    made.change("patches/toy/line-thirty.patch", " line 29b\n", " line 29\n")
    made.base[NEW] = edit(made.base[NEW], "toy/lines.txt", "line 30\n", "line thirty\n")
    with pytest.raises(ConflictError, match="absorbed"):
        made.export()
    made.base[NEW], made.base[OLD] = made.base[OLD], made.base[NEW]
    with pytest.raises(ConflictError, match=f"absorbed.*toy {OLD}") as caught:
        made.export()
    assert f"--to {OLD}" in caught.value.remedy


def test_a_body_that_git_would_end_early_is_refused():
    patch = Patch("toy", "x", None, b"", subject="S", body="Why.\n\ndiff --git a/x b/x\n\nMore.")
    with pytest.raises(ConflictError):
        export.canonical(patch, small_diff())


@functools.cache
def small_diff() -> bytes:
    return diff(files({"x": "a\n"}), files({"x": "b\n"}))


NAME = st.sampled_from([*export.ORDER, "X-Own"])
TEXT = st.text(st.sampled_from("ab \n-*|>:1.)\u00a0\u2014"), max_size=300)


@settings(max_examples=200, deadline=None)
@given(TEXT, st.lists(st.tuples(NAME, st.text(st.sampled_from("ab :-"), max_size=200)), max_size=5))
def test_the_canonical_form_is_a_fixed_point(body, values):
    trailers: dict[str, list[str]] = {}
    for name, value in values:
        trailers.setdefault(name, []).append(" ".join(value.split()))
    patch = Patch("toy", "x", None, b"", author="A <a@b>", date="today", subject="S", body=body.strip("\n"),
                  trailers=trailers)
    try:
        once = export.canonical(patch, small_diff())
    except ConflictError:
        return
    again = series.parse_patch("toy", "x", patch.path, once)
    assert export.canonical(again, again.text) == once
    assert again.body.split() == patch.body.split()
