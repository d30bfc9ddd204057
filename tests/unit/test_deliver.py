"""Apply, revert and recover on a toy upstream: atomic at every step, and every refusal with its own message."""
from __future__ import annotations

import base64
import csv
import errno
import hashlib
import os
import subprocess
import sys
import tempfile

import pytest
import toy as toys

from patchset import deliver, target, transaction
from patchset.errors import DirtyTarget, LockMismatch, NeedsWork, PatchsetError, UsageError

STEPS = ("replace", "link", "unlink", "fsync", "mkdir", "rmdir", "open")


@pytest.fixture
def toy(tmp_path):
    return toys.Toy(tmp_path)


@pytest.fixture(params=["tree", "site"])
def made(request, toy):
    """A target of either kind and its pristine snapshot."""
    if request.param == "tree":
        one = target.tree(toy.upstream, toy.tree())
    else:
        one = target.site(toy.upstream, toy.site())
    return toy, one, toys.snapshot(one.root)


def applied_snapshot(toy, one):
    deliver.apply(toy.request(), one)
    after = toys.snapshot(one.root)
    deliver.revert(toy.request(), one)
    return after


def test_apply_revert_apply_restores_every_byte_and_mode(made):
    toy, one, before = made
    os.chmod(one.root / "toy/a.py", 0o755)
    before = toys.snapshot(one.root)
    inode = (one.root / "toy/a.py").stat().st_ino
    assert deliver.apply(toy.request(), one).done == "applied"
    assert b"line_3 = 33" in (one.root / "toy/a.py").read_bytes()
    assert (one.root / "toy/a.py").stat().st_mode & 0o777 == 0o755
    after = toys.snapshot(one.root)
    assert deliver.revert(toy.request(), one).done == "reverted"
    assert toys.snapshot(one.root) == before
    assert (one.root / "toy/a.py").stat().st_ino == inode, "the original file itself comes back, not a copy"
    assert not (one.root / one.state).exists() and not (one.root / "toy/extra").exists()
    deliver.apply(toy.request(), one)
    assert toys.snapshot(one.root) == after


def test_applying_twice_changes_nothing_and_says_so(made):
    toy, one, _ = made
    deliver.apply(toy.request(), one)
    times = {p: p.stat().st_mtime_ns for p in one.root.rglob("*")}
    assert deliver.apply(toy.request(), one).done == "unchanged"
    assert {p: p.stat().st_mtime_ns for p in one.root.rglob("*")} == times


def _child(toy, one, verb, step) -> int:
    """Run a verb in a fork that dies, as by kill -9, at the `step`-th call that changes the disk."""
    pid = os.fork()
    if pid == 0:
        tempfile.tempdir = str(toy.folder)  # where the shadow repository of a killed run is left
        left = [step]
        for name in STEPS:
            real = getattr(os, name)

            def dying(*args, _real=real, left=left, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return _real(*args, **kwargs)

            setattr(os, name, dying)
        try:
            getattr(deliver, verb)(toy.request(), one)
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_at_every_step_recover_leaves_pristine_or_locked(made, verb):
    toy, one, before = made
    after = applied_snapshot(toy, one)
    ends = set()
    for step in range(10_000):
        if verb == "revert":
            deliver.apply(toy.request(), one)
        code = _child(toy, one, verb, step)
        assert code in (0, 9), code
        deliver.recover(one)
        now = toys.snapshot(one.root)
        assert now in (before, after), f"in between after a kill at step {step}"
        ends.add(now == after)
        assert (one.root / one.state).exists() == (now == after), f"state folder disagrees at step {step}"
        if now == after:
            deliver.revert(toy.request(), one)
        if code == 0:
            break
    assert code == 0 and step > 20
    assert ends == {True, False}, "the sweep must reach both ends, or it kills too early or too late to test anything"


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_an_error_at_every_step_leaves_the_target_as_it_was(made, verb, code, monkeypatch):
    toy, one, before = made
    after = applied_snapshot(toy, one)
    start = before if verb == "apply" else after
    failed = 0
    for step in range(10_000):
        if verb == "revert" and toys.snapshot(one.root) == before:
            deliver.apply(toy.request(), one)
        with monkeypatch.context() as patched:
            left = [step]
            for name in ("replace", "link", "fsync"):  # once: what undoes the work must get through
                real = getattr(os, name)

                def failing(*args, _real=real, left=left, **kwargs):
                    left[0] -= 1
                    if left[0] == -1:
                        raise OSError(code, os.strerror(code))
                    return _real(*args, **kwargs)

                patched.setattr(os, name, failing)
            try:
                getattr(deliver, verb)(toy.request(), one)
                done = left[0] >= 0
            except NeedsWork as error:
                failed += 1
                done = False
                assert os.strerror(code) in error.message
                assert toys.snapshot(one.root) == start, f"step {step}"
                assert verb == "revert" or not (one.root / one.state).exists()
        if done:
            break
        deliver.recover(one)
        if verb == "apply" and toys.snapshot(one.root) == after:
            deliver.revert(toy.request(), one)
    assert failed > 5


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_ctrl_c_at_every_step_leaves_pristine_or_locked_and_nothing_to_recover(made, verb, monkeypatch):
    """Also while it clears up, when the stores are half gone and there is no way back."""
    toy, one, before = made
    after = applied_snapshot(toy, one)
    ends = set()
    for step in range(10_000):
        if verb == "revert":
            deliver.apply(toy.request(), one)
        with monkeypatch.context() as patched:
            left = [step]
            for name in STEPS:
                real = getattr(os, name)

                def interrupted(*args, _real=real, left=left, **kwargs):
                    left[0] -= 1
                    if left[0] == -1:
                        raise KeyboardInterrupt
                    return _real(*args, **kwargs)

                patched.setattr(os, name, interrupted)
            try:
                getattr(deliver, verb)(toy.request(), one)
                done = True
            except KeyboardInterrupt:
                done = False
        now = toys.snapshot(one.root)
        assert now in (before, after), f"in between after Ctrl-C at step {step}"
        assert deliver.status(toy.request(), one).done == ("applied" if now == after else "pristine"), step
        state = one.root / one.state
        assert {path.name for path in state.iterdir()} - {".gitignore"} == {"state.json", "pristine"} if now == after \
            else not state.exists(), step
        ends.add(now == after)
        if now == after:
            deliver.revert(toy.request(), one)
            assert toys.snapshot(one.root) == before, f"originals lost by Ctrl-C at step {step}"
        if done:
            break
    assert step > 20 and ends == {True, False}


def test_revert_after_a_failed_revert_still_restores_every_byte(toy, monkeypatch):
    one = target.tree(toy.upstream, toy.tree())
    before = toys.snapshot(one.root)
    deliver.apply(toy.request(), one)
    with monkeypatch.context() as patched:
        calls = []

        def failing(source, place, _real=os.replace):
            calls.append(place)
            if len(calls) == 3:
                raise OSError(errno.EIO, "planted")
            return _real(source, place)

        patched.setattr(os, "replace", failing)
        with pytest.raises(NeedsWork, match="planted"):
            deliver.revert(toy.request(), one)
    assert deliver.status(toy.request(), one).done == "applied"
    deliver.revert(toy.request(), one)
    assert toys.snapshot(one.root) == before


def test_without_hard_links_the_originals_are_copied(toy, monkeypatch):
    one = target.tree(toy.upstream, toy.tree())
    before = toys.snapshot(one.root)

    def refused(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    deliver.apply(toy.request(), one)
    deliver.revert(toy.request(), one)
    assert toys.snapshot(one.root) == before


def test_a_hard_linked_cache_is_not_written_through(toy):
    root = toy.site()
    cache = toy.folder / "cache-a.py"
    os.link(root / "toy/a.py", cache)
    one = target.site(toy.upstream, root)
    deliver.apply(toy.request(), one)
    assert cache.read_bytes() == toys.SOURCES["toy/a.py"]
    deliver.revert(toy.request(), one)
    assert cache.read_bytes() == toys.SOURCES["toy/a.py"]


def test_stale_compiled_files_go_and_come_back(toy):
    root = toy.tree()
    run = [sys.executable, "-c", "import toy.sub.b as b; print(b.f(3))"]
    env = {"PYTHONPATH": str(root)}
    assert subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout == "3\n"
    one = target.tree(toy.upstream, root)
    cached = {p: p.read_bytes() for p in (root / "toy").rglob("*.pyc")}
    deliver.apply(toy.request(), one)
    assert subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout == "6\n"
    deliver.revert(toy.request(), one)
    assert {p: p.read_bytes() for p in (root / "toy").rglob("*.pyc")} == cached
    assert subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout == "3\n"


def test_two_at_once_one_is_refused(toy):
    one = target.tree(toy.upstream, toy.tree())
    with one.locked(write=True), pytest.raises(NeedsWork, match="another apply.py"):
        deliver.apply(toy.request(), one)
    assert deliver.apply(toy.request(), one).done == "applied"


REFUSALS = {
    "edited": (DirtyTarget, "locally edited"),
    "missing": (DirtyTarget, "missing"),
    "half": (DirtyTarget, "half applied"),
    "partial": (DirtyTarget, "half applied"),
    "version": (LockMismatch, "wrong version"),
    "older": (LockMismatch, "another lock's tree"),
    "edited after": (DirtyTarget, "edited since"),
    "interrupted": (NeedsWork, "interrupted half way"),
    "link": (DirtyTarget, "symbolic link"),
    "folder": (DirtyTarget, "folder stands"),
    "overlay in the way": (DirtyTarget, "locally edited"),
}


def _kill_half_way(toy, one):
    """Kill apply at the first step at which some files, not all, are replaced."""
    for step in range(200):
        before = toys.snapshot(one.root)
        _child(toy, one, "apply", step)
        if toys.snapshot(one.root) != before and transaction.Transaction(one.root, one.root / one.state).open:
            return
        if deliver.recover(one).done == "recovered to applied":
            deliver.revert(toy.request(), one)
    raise AssertionError("no step left the target half way")


def _spoil(toy, root, case):
    one = target.tree(toy.upstream, root)
    a, b = root / "toy/a.py", root / "toy/sub/b.py"
    if case == "edited":
        a.write_bytes(a.read_bytes() + b"# mine\n")
    elif case == "missing":
        b.unlink()
    elif case == "half":
        b.write_bytes(b.read_bytes().replace(b"return x\n", b"return 2 * x\n", 1))
    elif case == "partial":
        a.write_bytes(a.read_bytes().replace(b"line_3 = 3\n", b"line_3 = 33\n"))
    elif case == "version":
        (root / "PKG-INFO").write_text("Name: toy\nVersion: 2.0\n")
    elif case == "older":
        deliver.apply(toy.request(), one)
        (toy.root / "overlays/toy/toy/extra/op.py").write_text("def op():\n    return 43\n")
        toy.write_lock()
    elif case == "edited after":
        deliver.apply(toy.request(), one)
        a.write_bytes(a.read_bytes() + b"# mine\n")
    elif case == "interrupted":
        _kill_half_way(toy, one)
    elif case == "link":
        b.rename(toy.folder / "elsewhere.py")
        b.symlink_to(toy.folder / "elsewhere.py")
    elif case == "folder":
        b.unlink()
        b.mkdir()
    elif case == "overlay in the way":
        toys.write_tree(root, {"toy/extra/op.py": b"mine\n"})
    return target.tree(toy.upstream, root)


@pytest.mark.parametrize("case", REFUSALS)
def test_each_bad_target_is_refused_with_its_own_message_and_nothing_is_written(toy, case):
    root = toy.tree()
    one = _spoil(toy, root, case)
    before = toys.snapshot(root)
    kind, message = REFUSALS[case]
    with pytest.raises(kind, match=message) as caught:
        deliver.apply(toy.request(), one)
    assert caught.value.rows, "a refusal names the paths"
    assert caught.value.remedy
    assert toys.snapshot(root) == before


def test_a_removed_overlay_file_is_called_missing(toy):
    one = target.tree(toy.upstream, toy.tree())
    deliver.apply(toy.request(), one)
    (one.root / "toy/extra/op.py").unlink()
    with pytest.raises(DirtyTarget) as caught:
        deliver.verify(toy.request(), one)
    assert [(row.path, row.found) for row in caught.value.rows] == [("toy/extra/op.py", "missing")]


def test_an_older_locks_tree_is_brought_up_to_date_by_revert_and_apply(toy):
    root = toy.tree()
    one = _spoil(toy, root, "older")
    deliver.revert(toy.request(), one)
    assert deliver.apply(toy.request(), one).done == "applied"
    assert "43" in (root / "toy/extra/op.py").read_text()


def test_revert_refuses_edits_and_moves_them_out_on_request(toy):
    root = toy.tree()
    before = toys.snapshot(root)
    one = _spoil(toy, root, "edited after")
    with pytest.raises(DirtyTarget, match="would lose the edits"):
        deliver.revert(toy.request(), one)
    deliver.revert(toy.request(edits_to=toy.folder / "saved"), one)
    assert b"# mine" in (toy.folder / "saved/toy/a.py").read_bytes()
    assert toys.snapshot(root) == before


def test_a_stale_lock_is_refused(toy):
    one = target.tree(toy.upstream, toy.tree())
    (toy.root / "overlays/toy/toy/extra/op.py").write_text("def op():\n    return 43\n")
    with pytest.raises(LockMismatch, match="changed since patchset.lock") as caught:
        deliver.apply(toy.request(), one)
    assert [row.path for row in caught.value.rows] == ["toy/extra/op.py"]


def test_a_lock_edited_by_hand_is_refused(toy):
    one = target.tree(toy.upstream, toy.tree())
    lock = toy.root / "patchset.lock"
    lock.write_text(lock.read_text().replace('"after": "', '"after": "0', 1))
    with pytest.raises(LockMismatch, match="edited by hand"):
        deliver.apply(toy.request(), one)


def test_leaving_out_a_patch_applies_the_rest_and_is_not_the_locked_tree(toy):
    one = target.tree(toy.upstream, toy.tree())
    before = toys.snapshot(one.root)
    deliver.apply(toy.request(without=("second",)), one)
    text = (one.root / "toy/a.py").read_bytes()
    assert b"line_3 = 33" in text and b"line_30 = 30\n" in text
    with pytest.raises(LockMismatch, match="without second"):
        deliver.verify(toy.request(), one)
    assert deliver.apply(toy.request(without=("second",)), one).done == "unchanged"
    deliver.revert(toy.request(), one)
    assert toys.snapshot(one.root) == before


def test_a_tree_built_from_patched_sources_verifies_but_cannot_be_reverted(toy):
    one = target.tree(toy.upstream, toy.tree())
    deliver.apply(toy.request(), one)
    files = {path: data for path, (data, _) in toys.snapshot(one.root).items()}
    copy = target.tree(toy.upstream, toys.write_tree(toy.folder / "copy", files))
    assert deliver.verify(toy.request(), copy).done == "applied"
    with pytest.raises(NeedsWork, match="no originals"):
        deliver.revert(toy.request(), copy)


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o000])
def test_the_umask_of_who_patches_shuts_nobody_out(made, umask):
    """A shared installation stays as readable as it was; revert leaves no trace of the umask either."""
    toy, one, before = made
    folders = {path: path.stat().st_mode for path in one.root.rglob("*") if path.is_dir()}
    old = os.umask(umask)
    try:
        deliver.apply(toy.request(), one)
        new = [path for path in one.root.rglob("*") if path not in folders]
        assert {path.name for path in new} >= {"extra", "op.py", "pristine", "state.json"}
        for path in new:
            assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
        deliver.revert(toy.request(), one)
    finally:
        os.umask(old)
    assert toys.snapshot(one.root) == before
    assert {path: path.stat().st_mode for path in one.root.rglob("*") if path.is_dir()} == folders


@pytest.mark.parametrize(("files", "said"), [
    ({}, "declares no project"), ({"pyproject.toml": b"[project]\n"}, "declares no project"),
    ({"pyproject.toml": b"project = 3\n"}, "declares no project"),
    ({"pyproject.toml": b"= \xff"}, "declares no project"),
    ({"pyproject.toml": b"[project]\nname = 3\n"}, "declares no project"),
    ({"pyproject.toml": b'[project]\nname = "other"\n'}, "declares other"),
    ({"PKG-INFO": b"\xff\xfe"}, "declares no project"), ({"PKG-INFO": b"Name: TOY\n\n"}, "holds no toy/ folder"),
    (None, "is no folder")])
def test_a_folder_that_is_no_source_tree_is_refused_by_what_it_declares(files, said, toy, tmp_path):
    folder = tmp_path / "some"
    if files is not None:
        folder.mkdir()
        toys.write_tree(folder, files)
    with pytest.raises(UsageError, match=said):
        target.identify(toy.pins, folder, ["toy"])


def test_a_source_tree_that_may_not_be_read_says_so(toy, monkeypatch):
    root = toy.tree()
    monkeypatch.setattr(type(root), "read_text", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))
    with pytest.raises(PermissionError):
        target.identify(toy.pins, root, ["toy"])


def test_record_lists_every_file_with_its_digest(toy):
    one = target.site(toy.upstream, toy.site())
    original = (one.root / one.record).read_bytes()
    deliver.apply(toy.request(), one)
    rows = {row[0]: row for row in csv.reader((one.root / one.record).read_text().splitlines())}
    on_disk = {str(p.relative_to(one.root)) for p in one.root.rglob("*") if p.is_file()}
    assert set(rows) == on_disk
    assert rows["toy/extra/op.py"][1] == "sha256=" + _b64(toys.OVERLAY["toy/extra/op.py"])
    deliver.revert(toy.request(), one)
    assert (one.root / one.record).read_bytes() == original


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_every_refusal_becomes_its_exit_code():
    codes = {cls.__name__: cls.exit_code for cls in PatchsetError.__subclasses__()}
    assert codes == {"NeedsWork": 1, "UsageError": 2, "ConflictError": 3, "DirtyTarget": 4, "LockMismatch": 5}
