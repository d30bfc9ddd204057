"""Apply, revert, apply on each kind of real target: every byte, mode and RECORD line comes back; git stays clean."""
from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from delivery import ROOT, Checkout, assert_same, difference, git, link_copy, pip, snapshot, wheel

from patchset import pins

PINNED = [(name, version) for name, upstream in pins.load(ROOT).upstreams.items() for version in upstream.releases]


def paths_of(said: dict) -> set[str]:
    return {path for target in said["targets"] for path in target["paths"]}


@pytest.mark.parametrize("name,version", PINNED)
def test_apply_revert_apply_on_every_pinned_sdist(name, version, store, checkout, tmp_path):
    tree = link_copy(store.tree(name, version), tmp_path / "tree")
    pristine = snapshot(tree)
    said = checkout.run("apply", "--from", tree)
    assert said["targets"][0]["done"] == "applied" and said["targets"][0]["version"] == version
    locked = snapshot(tree)
    changed = {path for path in difference(pristine, locked) if ".zero-mismatch" not in path}
    assert {path for path in changed if (tree / path).is_file()} == paths_of(said)
    again = checkout.run("apply", "--from", tree)
    assert again["targets"][0]["done"] == "unchanged"
    assert_same(locked, snapshot(tree), "applied twice")
    assert checkout.run("verify", "--from", tree)["exit"] == 0
    assert checkout.run("status", "--from", tree)["targets"][0]["done"] == "applied"
    assert checkout.run("revert", "--from", tree)["targets"][0]["done"] == "reverted"
    assert_same(pristine, snapshot(tree), "reverted")
    assert checkout.run("status", "--from", tree, code=1)["targets"][0]["done"] == "pristine"
    checkout.run("apply", "--from", tree)
    assert_same(locked, snapshot(tree), "applied again")


def test_a_git_checkout_keeps_a_clean_index(store, checkout, tmp_path):
    """Patched files show as modified, overlays as new, the state not at all; reverted, nothing shows."""
    vllm_tree = link_copy(store.repository(), tmp_path / "vllm")
    pristine = snapshot(vllm_tree, leave_out=(".git",))
    said = checkout.run("apply", "--from", vllm_tree)
    assert git(vllm_tree, "diff", "--cached", "--name-only") == ""
    status = git(vllm_tree, "status", "--porcelain", "-uall").splitlines()
    assert {line[3:] for line in status} == paths_of(said) and {line[:2] for line in status} <= {" M", "??"}
    checkout.run("revert", "--from", vllm_tree)
    assert git(vllm_tree, "status", "--porcelain", "-uall") == ""
    assert_same(pristine, snapshot(vllm_tree, leave_out=(".git",)), "reverted")


def test_apply_from_a_clone_of_the_pinned_commit(store, tmp_path):
    """The real files under a commit of our own, which is then the pinned one."""
    origin = store.repository()
    head = git(origin, "rev-parse", "HEAD").strip()
    mine = Checkout(tmp_path / "checkout")
    release = mine.pins.upstream("vllm").release()
    toml = (mine.root / "patchset.toml").read_text().replace(f'tag = "{release.tag}"', 'tag = "released"', 1)
    (mine.root / "patchset.toml").write_text(toml)
    refusal = mine.refused("apply", "--upstream", "vllm", "--git", origin, code=5)
    assert "not the pinned commit" in refusal["message"] and not (mine.root / "build" / "vllm").exists()
    (mine.root / "patchset.toml").write_text(toml.replace(f'"{release.commit}"', f'"{head[:9]}"'))
    said = mine.run("apply", "--upstream", "vllm", "--git", origin)
    built = mine.root / "build" / "vllm"
    assert said["targets"][0]["done"] == "applied" and git(built, "diff", "--cached", "--name-only") == ""
    mine.run("revert", "--upstream", "vllm")
    assert git(built, "status", "--porcelain", "-uall") == ""


def record_rows(site: Path, distribution: str) -> dict[str, tuple[str, str]]:
    [record] = site.glob(f"{distribution}-*.dist-info/RECORD")
    return {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(record.read_text()))}


def assert_record_is_true(site: Path, distribution: str) -> None:
    """Every file is listed with its digest and size; what lies in the distribution's own folders is listed."""
    rows = record_rows(site, distribution)
    for path, (digest, size) in rows.items():
        if digest and not path.startswith(".."):
            data = (site / path).read_bytes()
            own = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (f"sha256={own}", str(len(data))) == (digest, size), path
    package = {"vllm": "vllm", "megatron_core": "megatron"}[distribution]
    [info] = site.glob(f"{distribution}-*.dist-info")
    for folder in (site / package, info):
        for path in folder.rglob("*"):
            assert path.is_dir() or path.relative_to(site).as_posix() in rows, f"{path} is not in RECORD"


def test_apply_revert_apply_on_the_installed_wheels(site, checkout):
    pristine = snapshot(site)
    said = checkout.run("apply", "--site", site)
    assert [target["done"] for target in said["targets"]] == ["applied", "applied"]
    assert {target["kind"] for target in said["targets"]} == {"site"}
    locked = snapshot(site)
    assert paths_of(said) <= set(difference(pristine, locked))
    for distribution in ("vllm", "megatron_core"):
        assert_record_is_true(site, distribution)
    assert checkout.run("verify", "--site", site)["exit"] == 0
    assert {t["done"] for t in checkout.run("apply", "--site", site)["targets"]} == {"unchanged"}
    assert_same(locked, snapshot(site), "applied twice")
    checkout.run("revert", "--site", site)
    assert_same(pristine, snapshot(site), "reverted")
    checkout.run("apply", "--site", site)
    assert_same(locked, snapshot(site), "applied again")


def test_status_and_recover_name_the_engine_that_still_waits(site, checkout):
    """What a kill between the two leaves: each is atomic, the pair is not."""
    checkout.run("apply", "--site", site, "--upstream", "vllm")
    for verb, code in (("recover", 0), ("status", 1)):
        assert checkout.run(verb, "--site", site, code=code)["waiting"] == ["megatron"]
    done = subprocess.run(checkout.command("status", "--site", site)[:-1], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].startswith("megatron still waits")
    assert f"apply.py apply --site {site} finishes" in done.stdout
    assert [one["done"] for one in checkout.run("apply", "--site", site)["targets"]] == ["unchanged", "applied"]
    checkout.run("revert", "--site", site, "--upstream", "vllm")
    assert checkout.run("recover", "--site", site)["waiting"] == ["vllm"]
    checkout.run("revert", "--site", site)
    for verb, code in (("recover", 0), ("status", 1)):
        assert "waiting" not in checkout.run(verb, "--site", site, code=code), "both are pristine: nothing waits"


VERBS = ["plan", "apply", "verify", "status", "recover", "revert"]


def test_a_site_with_one_of_the_two_is_patched_only_by_name(site, checkout):
    """It may be meant, or the folder is a wrong one: then megatron alone would be patched and exit 0."""
    for path in [*site.glob("vllm-*.dist-info"), site / "vllm"]:
        shutil.rmtree(path)
    before = snapshot(site)
    for verb in VERBS:
        error = checkout.refused(verb, "--site", site, code=2)
        assert error["message"].startswith("vllm not installed in") and "megatron-core 0.19.2 is" in error["message"]
        assert "--upstream megatron" in error["remedy"], error
        error = checkout.refused(verb, "--site", site, "--upstream", "vllm", code=2)
        assert error["remedy"] == "pip install the pinned release there"
        assert_same(before, snapshot(site), verb)
    for verb in VERBS:
        said = checkout.run(verb, "--site", site, "--upstream", "megatron")
        assert [target["upstream"] for target in said["targets"]] == ["megatron"]
    assert_same(before, snapshot(site), "reverted")
    error = checkout.refused("apply", "--site", site.parent, code=2)
    assert error["message"].startswith("vllm and megatron-core not installed in")


def test_the_sdist_and_the_wheel_get_the_same_files(site, vllm_tree, megatron_tree, checkout):
    """One diff, two deliveries: what a wheel's user runs is what a tree's user reads."""
    said = checkout.run("apply", "--site", site)
    for target, tree in zip(said["targets"], (vllm_tree, megatron_tree), strict=True):
        checkout.run("apply", "--from", tree)
        for path in target["paths"]:
            assert (site / path).read_bytes() == (tree / path).read_bytes(), path


def test_a_hard_linked_cache_is_not_written_through(store, checkout, tmp_path):
    """An installer that links from its cache shares inodes with every other environment."""
    cache = link_copy(store.site(), tmp_path / "cache")
    site = link_copy(cache, tmp_path / "site")
    before = snapshot(cache, fresh=True)
    inodes = {path: (cache / path).stat().st_ino for path in before if (cache / path).is_file()}
    said = checkout.run("apply", "--site", site)
    assert_same(before, snapshot(cache, fresh=True), "the cache after apply")
    assert all((site / path).stat().st_ino != inodes.get(path) for path in paths_of(said))
    checkout.run("revert", "--site", site)
    assert_same(before, snapshot(cache, fresh=True), "the cache after revert")
    assert all((site / path).stat().st_ino == inode for path, inode in inodes.items()), "revert gives the inodes back"


def test_a_site_inside_another_repository_is_really_patched(site, checkout, tmp_path):
    """`git apply` run in there exits 0 and changes nothing; the outer repository must not even notice us."""
    outer = tmp_path / "outer"
    (outer / "venv").mkdir(parents=True)
    (outer / "README").write_text("someone else's\n")
    git(outer, "init", "-q")
    git(outer, "add", "README")
    git(outer, "commit", "-qm", "outer")
    inner = Path(shutil.move(site, outer / "venv" / "site-packages"))
    before, pristine = snapshot(outer / ".git"), snapshot(inner)
    said = checkout.run("apply", "--site", inner, cwd=outer)
    assert paths_of(said) <= set(difference(pristine, snapshot(inner)))
    assert_same(before, snapshot(outer / ".git"), "the outer repository")
    checkout.run("revert", "--site", inner, cwd=inner)
    assert_same(pristine, snapshot(inner), "reverted")


@pytest.fixture(scope="module")
def environment(tmp_path_factory, store):
    """A virtual environment with the real vLLM wheel (its dependencies left out), and what was there before it."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    bare = snapshot(folder)
    python = folder / "bin" / "python"
    pip("--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel(store.pins.upstream("vllm")))
    yield python, bare, folder
    shutil.rmtree(folder)


def test_pip_uninstall_after_apply_leaves_nothing_behind(environment, checkout):
    python, bare, folder = environment
    installed = snapshot(folder)
    said = checkout.run("apply", "--upstream", "vllm", "--installed", python)
    site = Path(said["targets"][0]["root"])
    assert_record_is_true(site, "vllm")
    checkout.run("revert", "--upstream", "vllm", "--installed", python)
    assert_same(installed, snapshot(folder), "reverted")
    checkout.run("apply", "--upstream", "vllm", "--installed", python)
    overlays = sorted(path for path in paths_of(said) if "zero_mismatch" in path)
    subprocess.run([sys.executable, "-m", "compileall", "-q", *(site / path for path in overlays)], check=True)
    assert any(site.glob("vllm/zero_mismatch/__pycache__/*.pyc")), "as if they had been imported"
    pip("--python", python, "uninstall", "-y", "vllm")
    assert_same(bare, snapshot(folder), "uninstalled")


def test_stale_compiled_files_are_never_used(vllm_tree, checkout):
    """Python takes a .pyc whose recorded time and size agree; an apply within the second could make them agree."""
    said = checkout.run("plan", "--from", vllm_tree)
    hooked = [path for path in paths_of(said) if path.endswith(".py") and (vllm_tree / path).exists()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *(vllm_tree / path for path in hooked)], check=True)
    compiled = {path for path in snapshot(vllm_tree) if path.endswith(".pyc")}
    assert len(compiled) == len(hooked)
    pristine = snapshot(vllm_tree)
    checkout.run("apply", "--from", vllm_tree)
    assert not {path for path in snapshot(vllm_tree) if path.endswith(".pyc")}
    checkout.run("revert", "--from", vllm_tree)
    assert_same(pristine, snapshot(vllm_tree), "reverted")
    checkout.run("apply", "--from", vllm_tree)
    for folder in vllm_tree.rglob("__pycache__"):
        shutil.rmtree(folder)  # as many a cleaning command does
    checkout.run("revert", "--from", vllm_tree)
    assert_same(pristine, snapshot(vllm_tree), "reverted after a cleaning")


def test_without_arguments_both_upstreams_are_fetched_and_patched(tmp_path):
    mine = Checkout(tmp_path / "checkout")
    before = snapshot(mine.root)
    planned = mine.run("plan", cwd=mine.root)
    assert_same(before, snapshot(mine.root, leave_out=("__pycache__",)), "plan before there is a target")
    assert {target["done"] for target in planned["targets"]} == {"absent"}
    said = mine.run("apply")
    for one, other in zip(planned["targets"], said["targets"], strict=True):
        assert {**one, "done": "applied"} == other, "what was planned is what was done"
    assert [target["upstream"] for target in said["targets"]] == ["vllm", "megatron"]
    assert {target["done"] for target in said["targets"]} == {"applied"}
    assert {t["done"] for t in mine.run("apply")["targets"]} == {"unchanged"}
    assert {t["done"] for t in mine.run("status")["targets"]} == {"applied"}
    assert mine.run("verify")["exit"] == 0
    mine.run("revert")
    assert {t["done"] for t in mine.run("status", code=1)["targets"]} == {"pristine"}
    assert json.loads(json.dumps(said)) == said and said["schema"] == 1
