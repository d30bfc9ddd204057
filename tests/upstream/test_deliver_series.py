"""What the series says is what a real tree gets: a profile's patches, in exact places, none that does nothing."""
from __future__ import annotations

import pytest
from delivery import Checkout, assert_same, difference, link_copy, snapshot

from patchset import series


def patches(checkout: Checkout, version: str) -> dict[str, series.Patch]:
    return {patch.slug: patch for patch in series.load(checkout.root, "vllm", version)}


@pytest.mark.parametrize("name", ["hopper", "blackwell", "rollout"])
def test_a_profile_selects_by_upstream_and_arch(name, vllm_tree, checkout):
    """Its patches and no others are applied, and every later verb keeps to it without being told."""
    pristine, profile = snapshot(vllm_tree), checkout.pins.profile(name)
    chosen = [slug for slug, patch in patches(checkout, "0.33.0").items() if patch.arch & {"any", *profile.arch}]
    [said] = checkout.run("apply", "--from", vllm_tree, "--profile", name)["targets"]
    assert said["patches"] == chosen
    locked = snapshot(vllm_tree)
    changed = {path for path in difference(pristine, locked) if path in pristine}
    assert changed == {path for slug in chosen for path in patches(checkout, "0.33.0")[slug].paths}
    for verb in (["status"], ["verify"], ["apply", "--profile", name]):
        assert checkout.run(*verb, "--from", vllm_tree)["targets"][0]["patches"] == chosen, verb
    other = "blackwell" if name == "hopper" else "hopper"
    error = checkout.refused("apply", "--from", vllm_tree, "--profile", other, code=5)
    assert f"profile {name}" in error["message"] and "apply.py revert" in error["remedy"]
    assert_same(locked, snapshot(vllm_tree), "refused")
    checkout.run("revert", "--from", vllm_tree)
    assert_same(pristine, snapshot(vllm_tree), "reverted")


def test_profiles_differ_where_the_series_does(checkout):
    by_arch = {name: {slug for slug, patch in patches(checkout, "0.33.0").items()
                      if patch.arch & {"any", *checkout.pins.profile(name).arch}} for name in ("hopper", "blackwell")}
    assert by_arch["blackwell"] - by_arch["hopper"], "else the test above shows nothing"


def test_a_profile_of_one_upstream_leaves_the_other_alone(site, checkout):
    said = checkout.run("apply", "--site", site, "--profile", "rollout")
    assert [target["upstream"] for target in said["targets"]] == ["vllm"]
    assert checkout.run("status", "--site", site, "--upstream", "megatron", code=1)["targets"][0]["done"] == "pristine"
    error = checkout.refused("apply", "--site", site, "--profile", "hoper", code=2)
    assert "hopper" in error["remedy"]


def spoil(checkout: Checkout, kind: str) -> str:
    """Change the copy's series so that one patch cannot stand; its slug."""
    folder = checkout.root / "patches" / "vllm"
    first, *_, last = patches(checkout, "0.33.0").values()
    if kind == "does not apply":  # one word of one line of context
        lines = first.path.read_bytes().split(b"\n")
        start = next(n for n, line in enumerate(lines) if line.startswith(b"@@"))
        at = next(n for n in range(start + 1, len(lines)) if lines[n].startswith(b" ") and lines[n].strip())
        lines[at] += b"  # otherwise"
        first.path.write_bytes(b"\n".join(lines))
        return first.slug
    (folder / "again.patch").write_bytes(last.path.read_bytes())
    with open(folder / "series", "a") as file:
        file.write("again\n")
    return "again"


@pytest.mark.parametrize("kind", ["absorbed", "does not apply"])
def test_a_patch_that_changes_nothing_or_needs_fuzz_stops_everything(kind, vllm_tree, tmp_path):
    mine = Checkout(tmp_path / "checkout")
    slug = spoil(mine, kind)
    before, own = snapshot(vllm_tree), snapshot(mine.root, leave_out=("__pycache__",))
    for verb in (["plan", "--from", vllm_tree], ["apply", "--from", vllm_tree], ["export"]):
        error = mine.refused(*verb, code=3)
        assert f"vllm/{slug}" in error["message"] and kind in error["message"] and error["paths"], verb
    assert_same(before, snapshot(vllm_tree), "refused")
    assert_same(own, snapshot(mine.root, leave_out=("__pycache__",)), "the checkout")


def test_offsets_are_exact(store, checkout, tmp_path):
    """A moved hunk is reported at the line where its text then stands (seen where one patch alone has the file)."""
    tree = link_copy(store.tree("vllm", "0.32.0"), tmp_path / "tree")
    [said] = checkout.run("apply", "--from", tree)["targets"]
    found = patches(checkout, "0.32.0")
    alone = {path for path in said["paths"] if sum(path in patch.paths for patch in found.values()) == 1}
    looked_at = 0
    for slug, moved in said["offsets"].items():
        files = {file.path: file for file in found[slug].files}
        for one in moved:
            if one["path"] not in alone:
                continue
            hunk = files[one["path"]].hunks[one["hunk"] - 1]
            after = [line[1:].rstrip(b"\n") for line in hunk.lines if line[:1] in b" +"]
            text = (tree / one["path"]).read_bytes().split(b"\n")
            assert text[one["line"] - 1 : one["line"] - 1 + len(after)] == after, (slug, one)
            looked_at += 1
    assert looked_at >= 5
    again = link_copy(store.tree("vllm"), tmp_path / "default")
    assert "offsets" not in checkout.run("apply", "--from", again)["targets"][0], "the release they were written for"
