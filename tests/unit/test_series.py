"""A patch file is read as git reads it, and the series refuses whatever is not plainly ordered."""
from pathlib import Path

import pytest
from checkout import NEW, OLD, TRAILERS, Checkout, hooked
from hypothesis import given
from hypothesis import strategies as st

from patchset import series
from patchset.errors import ConflictError, UsageError

DIFF = "diff --git a/toy/x b/toy/x\nindex 01..02 100644\n--- a/toy/x\n+++ b/toy/x\n@@ -1 +1 @@\n-a\n+b\n"
HEAD = "From 0000 Mon Sep 17 00:00:00 2001\nFrom: A <a@b.invalid>\nDate: today\nSubject: {}\n\n"


def read(text: str | bytes) -> series.Patch:
    return series.parse_patch("toy", "x", Path("x.patch"), text if isinstance(text, bytes) else text.encode())


def test_header_body_trailers_and_diff_come_apart():
    patch = read(HEAD.format("[PATCH 2/7] One line") + "Why it is.\n\nAnd more.\n\n" + TRAILERS + "---\n" + DIFF)
    assert (patch.author, patch.date, patch.subject) == ("A <a@b.invalid>", "today", "One line")
    assert patch.body == "Why it is.\n\nAnd more."
    assert patch.values("Load-Bearing") == ["yes — without it a row's bits depend on the batch"]
    assert patch.text == DIFF.encode() and patch.paths == ["toy/x"] and patch.arch == {"any"}


def test_folded_subject_and_trailers_unfold():
    patch = read(HEAD.format("One\n line") + "Why.\n\nDrop-When: it is\n done\nTests: a\nTests: b\n---\n" + DIFF)
    assert patch.subject == "One line"
    assert patch.trailers == {"Drop-When": ["it is done"], "Tests": ["a", "b"]}


def test_what_follows_the_ruler_is_a_note():
    patch = read(HEAD.format("S") + "Why.\n\nArch: any\n---\n toy/x | 2 +-\n 1 file changed\n\n" + DIFF)
    assert patch.trailers == {"Arch": ["any"]} and patch.body == "Why."


def test_an_indented_last_paragraph_is_body():
    patch = read(HEAD.format("S") + "Why:\n\n    code\n---\n" + DIFF)
    assert patch.trailers == {} and patch.body == "Why:\n\n    code"


@pytest.mark.parametrize("text", [
    HEAD.format("S") + "Why.\n---\n", HEAD.replace("Subject: {}\n", "") + "Why.\n---\n" + DIFF,
    (HEAD.format("S") + "Wh\u00ff.\n---\n" + DIFF).encode("latin-1")])
def test_no_diff_no_subject_and_no_utf8_are_conflicts(text):
    with pytest.raises(ConflictError):
        read(text)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(head, tail):
    try:
        _ = read(head + b"\n\ndiff --git " + tail).files
    except ConflictError:
        pass


@pytest.mark.parametrize("text", ["gate\ngate\n", "Gate\n", "gate-\n", "../gate\n", "gate.patch\n", "a b\n"])
def test_repeated_and_unplain_slugs_are_refused(tmp_path, text):
    made = Checkout(tmp_path)
    made.write("patches/toy/series", text)
    with pytest.raises(UsageError):
        series.slugs(tmp_path, "toy")


def test_a_missing_series_patch_or_overlay_is_an_error(tmp_path):
    made = Checkout(tmp_path)
    made.write("patches/toy/series", "# a comment\n\ngone  # and why\n")
    with pytest.raises(UsageError, match="gone.patch does not exist"):
        series.load(tmp_path, "toy", NEW)
    for missing in (lambda: series.slugs(tmp_path, "other"), lambda: series.overlay_files(tmp_path, "other")):
        with pytest.raises(UsageError):
            missing()


def test_a_patch_for_one_release_takes_the_place_of_the_main_one_there(tmp_path):
    made = hooked(tmp_path)
    variant = made.read("patches/toy/gate-fp32.patch").replace("a row", "the row")
    made.write(f"patches/toy/gate-fp32@{OLD}.patch", variant)
    assert series.load(tmp_path, "toy", OLD)[0].path.name == f"gate-fp32@{OLD}.patch"
    assert series.load(tmp_path, "toy", NEW)[0].path.name == "gate-fp32.patch"


def test_selection_takes_dependants_along_and_names_what_lacks(tmp_path):
    made = hooked(tmp_path)
    made.change("patches/toy/line-thirty.patch", "Arch: any", "Depends-On: gate-fp32\nArch: any")
    patches, everything = series.load(tmp_path, "toy", NEW), made.pins.profile("all")
    assert [p.slug for p in series.select(patches, everything)] == ["gate-fp32", "line-thirty"]
    assert series.select(patches, everything, ("gate-fp32",)) == []
    with pytest.raises(UsageError, match="no patch named"):
        series.select(patches, everything, ("gat",))
    with pytest.raises(UsageError, match="depends on gate-fp32"):
        series.select(patches[::-1], everything)
    made.change("patches/toy/gate-fp32.patch", "Arch: any", "Arch: gfx950, sm90x")
    with pytest.raises(UsageError, match="depends on gate-fp32"):
        series.select(series.load(tmp_path, "toy", NEW), everything)


def test_overlays_leave_caches_behind_and_refuse_links(tmp_path):
    made = Checkout(tmp_path)
    folder = tmp_path / "overlays/toy"
    made.write("overlays/toy/toy/zero_mismatch/__pycache__/gate.pyc", b"x")
    made.write("overlays/toy/.hidden", b"x")
    found = sorted(series.overlay_files(tmp_path, "toy"))
    assert found == ["toy/zero_mismatch/__init__.py", "toy/zero_mismatch/gate.py"]
    (folder / "toy/link.py").symlink_to("zero_mismatch/gate.py")
    with pytest.raises(UsageError, match="symbolic link"):
        series.overlay_files(tmp_path, "toy")
