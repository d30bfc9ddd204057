"""On the real releases: what export and refresh write does not depend on the user's git, and lint is content."""
from __future__ import annotations

import pytest
import user_configs
from delivery import Checkout

from patchset import deliver, edit, export, lint, target
from patchset.errors import NeedsWork

HOOK = "    def supports_batch_invariance(cls) -> bool:\n"
FILE = "vllm/v1/attention/backend.py"


@pytest.fixture(scope="module")
def base():
    return export.Sdists()


@pytest.fixture(scope="module")
def made(tmp_path_factory, base) -> Checkout:
    """A copy of this checkout with the whole series applied to build/vllm."""
    checkout = Checkout(tmp_path_factory.mktemp("export") / "checkout")
    try:
        export.run(checkout.root, checkout.pins, False, base)
    except NeedsWork as error:
        pytest.skip(f"no sdist of the pinned releases: {error}")
    checkout.run("apply", "--upstream", "vllm")
    return checkout


def kept(made: Checkout) -> dict[str, tuple[int, bytes]]:
    """Inode and bytes of every patch, overlay file and the lock."""
    files = [made.root / "patchset.lock", *(made.root / "patches").rglob("*"), *(made.root / "overlays").rglob("*")]
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in files if path.is_file()}


def test_a_second_export_writes_nothing(made, base):
    before = kept(made)
    assert export.run(made.root, made.pins, False, base).data == {"changed": [], "written": False}
    assert kept(made) == before


@pytest.mark.parametrize("name", list(user_configs.CONFIGS)[1:21])  # tests/unit tries the rest on a toy upstream
def test_refresh_of_an_unedited_tree_writes_nothing_under_any_configuration(name, made, base, tmp_path, monkeypatch):
    before = kept(made)
    user_configs.install(name, tmp_path, monkeypatch)
    assert edit.refresh(made.root, made.pins, "vllm", None, None, base=base).data["written"] == []
    for path, text in export.canonical_patches(made.root, made.pins, base).items():
        assert path.read_bytes() == text, path.name
    assert kept(made) == before


def test_an_edit_becomes_a_patch_and_the_tree_carries_the_new_lock(made, base):
    before = {path: data for path, (_, data) in kept(made).items()}
    edit.new(made.root, made.pins, "vllm", "test-of-refresh")
    place = made.root / "build/vllm" / FILE
    text = place.read_text()
    assert text.count(HOOK) == 1
    place.write_text(text.replace(HOOK, HOOK + "        # edited\n"))
    said = edit.refresh(made.root, made.pins, "vllm", "test-of-refresh", None, base=base).data
    assert said["edited"] == [FILE]
    assert said["written"] == ["patches/vllm/test-of-refresh.patch", "patches/vllm/series"]
    one = target.tree(made.pins.upstream("vllm"), made.root / "build/vllm")
    request = deliver.Request(made.root, made.pins, made.pins.profile("all"))
    assert deliver.verify(request, one).done == "applied" and "# edited" in place.read_text()
    rules = {finding["rule"] for finding in lint.run(made.root, made.pins, base).data["findings"]
             if "test-of-refresh" in finding["path"]}
    assert rules == {"todo"}
    (made.root / "patches/vllm/test-of-refresh.patch").unlink()
    series = made.root / "patches/vllm/series"
    series.write_text(series.read_text().replace("test-of-refresh\n", ""))
    export.run(made.root, made.pins, False, base)
    assert {path: data for path, (_, data) in kept(made).items()} == before
