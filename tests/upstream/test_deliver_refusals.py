"""What is not exactly the release or exactly the locked tree is refused by its own message, and nothing is written."""
from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from delivery import Checkout, assert_same, link_copy, mounted, snapshot

PLENTY = 64 << 20


def replace(path, data: bytes) -> None:
    """Other content under that name; never into the file, which is a link to the original."""
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)


def hooked(said: dict, tree) -> list[str]:
    """The upstream files that the series changes, sorted."""
    return sorted(path for path in said["targets"][0]["paths"] if (tree / path).exists())


def edit(tree, checkout) -> tuple[list[str], list[str]]:
    path = hooked(checkout.run("plan", "--from", tree), tree)[0]
    replace(tree / path, (tree / path).read_bytes() + b"# mine\n")
    return [path], ["locally edited"]


def edit_after_apply(tree, checkout) -> tuple[list[str], list[str]]:
    path = hooked(checkout.run("plan", "--from", tree), tree)[0]
    checkout.run("apply", "--from", tree)
    replace(tree / path, (tree / path).read_bytes() + b"# mine\n")
    return [path], ["edited since"]


def remove_a_file(tree, checkout) -> tuple[list[str], list[str]]:
    path = hooked(checkout.run("plan", "--from", tree), tree)[0]
    (tree / path).unlink()
    return [path], ["missing"]


def half_apply(tree, checkout) -> tuple[list[str], list[str]]:
    """As a tool without rollback leaves it: some of the files patched, nothing that says so."""
    paths = hooked(checkout.run("plan", "--from", tree), tree)
    whole = link_copy(tree, tree.with_name("whole"))
    checkout.run("apply", "--from", whole)
    half = paths[: len(paths) // 2]
    for path in half:
        replace(tree / path, (whole / path).read_bytes())
    return half, ["half applied"]


def test_a_change_of_a_file_that_no_patch_touches_is_found_in_an_installed_wheel(site, checkout):
    """By the wheel's own RECORD; status looks at the locked paths alone."""
    said = checkout.run("apply", "--site", site)
    locked = {path for one in said["targets"] for path in one["paths"]}
    assert checkout.run("verify", "--site", site)["exit"] == 0
    edited, lost = [path for path in ("vllm/sampling_params.py", "vllm/logprobs.py") if path not in locked]
    replace(site / edited, (site / edited).read_bytes() + b"# mine\n")
    (site / lost).unlink()
    error = checkout.refused("verify", "--site", site, code=4)
    assert "unlocked change" in error["message"] and "pip" in error["remedy"]
    assert sorted((row["path"], row["found"]) for row in error["paths"]) == [(lost, "missing"), (edited, "edited")]
    assert checkout.run("status", "--site", site)["exit"] == 0
    assert checkout.run("verify", "--site", site, "--upstream", "megatron")["exit"] == 0


def apply_by_an_older_lock(tree, checkout) -> tuple[list[str], list[str]]:
    """The last patch of the series is left out of a second checkout, which has its own lock."""
    older = Checkout(tree.with_name("older"))
    series = older.root / "patches" / "vllm" / "series"
    lines = series.read_text().splitlines(keepends=True)
    while lines.pop().startswith(("#", "\n")):
        pass
    series.write_text("".join(lines))
    older.run("export")
    older.run("apply", "--from", tree)
    return [], ["another lock"]


def pretend_another_version(tree, checkout) -> tuple[list[str], list[str]]:
    replace(tree / "PKG-INFO", (tree / "PKG-INFO").read_bytes().replace(b"\nVersion: 0.33.0\n", b"\nVersion: 0.31.0\n"))
    return [], ["0.31.0", "wrong version"]


def put_a_link_in_the_way(tree, checkout) -> tuple[list[str], list[str]]:
    path = hooked(checkout.run("plan", "--from", tree), tree)[0]
    elsewhere = tree.with_name("elsewhere.py")
    (tree / path).rename(elsewhere)
    (tree / path).symlink_to(elsewhere)
    return [path], ["symbolic link"]


def put_a_folder_in_the_way(tree, checkout) -> tuple[list[str], list[str]]:
    path = hooked(checkout.run("plan", "--from", tree), tree)[0]
    (tree / path).unlink()
    (tree / path).mkdir()
    return [path], ["folder"]


def put_a_file_where_an_overlay_goes(tree, checkout) -> tuple[list[str], list[str]]:
    paths = checkout.run("plan", "--from", tree)["targets"][0]["paths"]
    path = next(path for path in paths if not (tree / path).exists())
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text("# someone's own\n")
    return [path], ["edited"]


CASES = {
    edit: 4, edit_after_apply: 4, remove_a_file: 4, half_apply: 4, apply_by_an_older_lock: 5,
    pretend_another_version: 5, put_a_link_in_the_way: 4, put_a_folder_in_the_way: 4,
    put_a_file_where_an_overlay_goes: 4,
}


@pytest.fixture(scope="module")
def messages():
    """Each refusal's message without the name of its folder, to see that no two cases share one."""
    return {}


@pytest.mark.parametrize("spoil", CASES, ids=lambda case: case.__name__)
def test_refused_with_its_own_message_a_table_and_nothing_written(spoil, vllm_tree, checkout, messages):
    paths, words = spoil(vllm_tree, checkout)
    before = snapshot(vllm_tree)
    error = checkout.refused("apply", "--from", vllm_tree, code=CASES[spoil])
    assert all(word in error["message"] for word in words), error
    assert error["remedy"]
    named = [row["path"] for row in error["paths"]]
    assert named and all(any(row.endswith(path) for row in named) for path in paths), error
    assert all(row["found"] and row["expected"] for row in error["paths"])
    assert_same(before, snapshot(vllm_tree), "refused")
    messages[spoil.__name__] = error["message"].replace(str(vllm_tree), "TREE")


def test_no_two_refusals_share_a_message(messages):
    if len(messages) < 2:
        pytest.skip("the cases before were not run")
    by_text = {}
    for case, message in messages.items():
        by_text.setdefault(message, []).append(case)
    shared = {message: cases for message, cases in by_text.items() if len(cases) > 1}
    same = {"edit", "put_a_file_where_an_overlay_goes"}  # both are edits, told apart by the table
    assert all(set(cases) <= same for cases in shared.values()), shared


def test_the_wrong_release_named_by_hand_is_refused(store, checkout, tmp_path):
    tree = link_copy(store.tree("vllm", "0.32.0"), tmp_path / "tree")
    before = snapshot(tree)
    error = checkout.refused("apply", "--from", tree, "--version", "0.33.0", code=5)
    assert "0.32.0" in error["message"] and "0.33.0" in error["message"]
    assert_same(before, snapshot(tree), "refused")


def test_an_edit_outside_the_series_is_the_users_own_and_stays(vllm_tree, checkout):
    replace(vllm_tree / "README.md", b"mine\n")
    before = snapshot(vllm_tree)
    checkout.run("apply", "--from", vllm_tree)
    assert (vllm_tree / "README.md").read_bytes() == b"mine\n"
    checkout.run("revert", "--from", vllm_tree)
    assert_same(before, snapshot(vllm_tree), "reverted")


def test_revert_never_loses_an_edit(vllm_tree, checkout, tmp_path):
    [path], _ = edit_after_apply(vllm_tree, checkout)
    mine = (vllm_tree / path).read_bytes()
    before = snapshot(vllm_tree)
    checkout.refused("revert", "--from", vllm_tree, code=4)
    assert_same(before, snapshot(vllm_tree), "refused")
    checkout.run("revert", "--from", vllm_tree, "--edits-to", tmp_path / "edits")
    assert (tmp_path / "edits" / path).read_bytes() == mine
    assert checkout.run("status", "--from", vllm_tree, code=1)["targets"][0]["done"] == "pristine"


def test_a_refusal_of_one_wheel_leaves_the_other_alone(site, checkout):
    """Every target is looked at before the first is written to."""
    said = checkout.run("plan", "--site", site)
    path = next(path for path in said["targets"][1]["paths"] if not (site / path).exists())
    (site / path).parent.mkdir(parents=True)
    (site / path).write_text("mine\n")
    before = snapshot(site)
    checkout.refused("apply", "--site", site, code=4)
    assert_same(before, snapshot(site), "refused")


def test_two_applies_at_once_one_waits_or_is_refused(vllm_tree, checkout, store, tmp_path):
    alone = link_copy(store.tree("vllm"), tmp_path / "alone")
    checkout.run("apply", "--from", alone)
    locked, pristine = snapshot(alone), snapshot(vllm_tree)
    for gap in (0, 0.05, 0.2):
        both = []
        for _ in range(2):
            both.append(subprocess.Popen(checkout.command("apply", "--from", vllm_tree), stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, text=True))
            time.sleep(gap)
        said = [(process.communicate()[0], process.returncode) for process in both]
        assert sorted(code for _, code in said) in ([0, 0], [0, 1]), said
        assert all("at work" in text for text, code in said if code), said
        assert_same(locked, snapshot(vllm_tree), "after both")
        checkout.run("revert", "--from", vllm_tree)
        assert_same(pristine, snapshot(vllm_tree), "reverted")


def test_two_first_applies_at_once_make_one_whole_tree(tmp_path):
    """Both find no build/ folder and unpack; the one that comes second must not spoil what the first made."""
    mine = Checkout(tmp_path / "checkout")
    both = [subprocess.Popen(mine.command("apply"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    said = [(*process.communicate(), process.returncode) for process in both]
    assert sorted(code for *_, code in said)[0] == 0, said
    assert not any("Traceback" in errors for _, errors, _ in said), said
    assert mine.run("apply")["exit"] == 0 and mine.run("verify")["exit"] == 0
    assert {path.name for path in (mine.root / "build").iterdir()} == {"vllm", "megatron"}


def attempt(command: list) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fill(folder, leave: int) -> None:
    """Take all space but about `leave` bytes."""
    info = os.statvfs(folder)
    with open(folder / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, info.f_bavail * info.f_frsize - leave)


def test_a_full_disk_at_any_moment_leaves_the_tree_as_it_was(store, checkout, tmp_path):
    original = store.tree("vllm")
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=400m", "tmpfs") as disk:
        tree = disk / "vllm"
        subprocess.run(["cp", "-a", original, tree], check=True)
        pristine = snapshot(tree)
        failed = 0
        for leave in (0, 4 << 10, 64 << 10, 200 << 10, 400 << 10, 600 << 10, PLENTY):
            fill(disk, leave)
            if leave == PLENTY:
                break
            done = attempt(checkout.command("apply", "--from", tree))
            if done.returncode == 0:
                break
            assert done.returncode == 1 and "No space left on device" in done.stdout, done.stdout + done.stderr
            assert_same(pristine, snapshot(tree), f"with {leave} bytes left")
            failed += 1
            (disk / "ballast").unlink()
        assert failed >= 3
        (disk / "ballast").unlink(missing_ok=True)
        checkout.run("apply", "--from", tree)
        locked = snapshot(tree)
        fill(disk, 0)
        error = checkout.refused("revert", "--from", tree, code=1)
        assert "No space left" in error["message"] and "still patched" in error["message"]
        assert_same(locked, snapshot(tree), "revert without room")
        (disk / "ballast").unlink()
        checkout.run("revert", "--from", tree)
        assert_same(pristine, snapshot(tree), "reverted")


@pytest.mark.parametrize("limit", [0, 2, 20, 60])
def test_writes_that_fail_leave_the_tree_as_it_was(limit, vllm_tree, checkout):
    """A limit on file sizes needs no rights: every file over it fails as on a full disk."""
    pristine = snapshot(vllm_tree)
    limited = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "-"]
    done = attempt([*limited, *checkout.command("apply", "--from", vllm_tree)])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert_same(pristine, snapshot(vllm_tree), f"files limited to {limit} KiB")
    checkout.run("apply", "--from", vllm_tree)


def test_a_read_only_target_is_refused_and_can_be_read(vllm_tree, checkout, tmp_path):
    pristine = snapshot(vllm_tree)
    with mounted(tmp_path / "mount", "--bind", vllm_tree) as place:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        error = checkout.refused("apply", "--from", place, code=1)
        assert "Read-only" in error["message"] and error["remedy"]
        assert checkout.run("plan", "--from", place)["targets"][0]["done"] == "pristine"
        assert checkout.run("status", "--from", place, code=1)["targets"][0]["done"] == "pristine"
    assert_same(pristine, snapshot(vllm_tree), "read-only")
    checkout.run("apply", "--from", vllm_tree)
    locked = snapshot(vllm_tree)
    with mounted(tmp_path / "mount", "--bind", vllm_tree) as place:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        error = checkout.refused("revert", "--from", place, code=1)
        assert "Read-only" in error["message"] and "still patched" in error["message"]
        assert checkout.run("verify", "--from", place)["exit"] == 0
    assert_same(locked, snapshot(vllm_tree), "read-only")


def test_one_file_that_cannot_be_replaced_undoes_the_rest(vllm_tree, checkout):
    """The error comes in the middle of the renames: those done before are taken back."""
    path = hooked(checkout.run("plan", "--from", vllm_tree), vllm_tree)[-1]
    replace(vllm_tree / path, (vllm_tree / path).read_bytes())  # an inode of its own: the mark would hit the original
    pristine = snapshot(vllm_tree)
    done = attempt(["chattr", "+i", vllm_tree / path])
    if done.returncode:
        pytest.skip(f"no immutable files here: {done.stderr.strip()}")
    try:
        error = checkout.refused("apply", "--from", vllm_tree, code=1)
    finally:
        subprocess.run(["chattr", "-i", vllm_tree / path], check=True)
    assert "not permitted" in error["message"] and "as it was" in error["message"]
    assert_same(pristine, snapshot(vllm_tree), "undone")
    checkout.run("apply", "--from", vllm_tree)


def test_refusals_on_a_terminal_name_the_remedy(vllm_tree, checkout):
    """The same refusal as text: message, table, what to do; on stderr, without a traceback."""
    [path], _ = edit(vllm_tree, checkout)
    done = attempt([sys.executable, checkout.root / "apply.py", "apply", "--from", vllm_tree])
    assert done.returncode == 4 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert "locally edited" in lines[0] and any(path in line for line in lines) and "what to do:" in lines[-1]
