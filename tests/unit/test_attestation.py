"""The digests of what a process imported, against a lock's."""
import hashlib
import importlib
import pathlib
import sys

from vllm.zero_mismatch import attestation

POLICY = "vllm/zero_mismatch/policy.py"


def _locked():
    importlib.import_module("vllm.zero_mismatch.policy")
    return attestation.digests()


def test_imported_modules_are_digested_by_their_bytes():
    found = _locked()
    file = sys.modules["vllm.zero_mismatch.policy"].__file__
    assert found[POLICY] == hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
    assert "vllm/zero_mismatch/__init__.py" in found


def test_a_process_that_runs_the_lock_has_no_difference():
    locked = _locked()
    assert attestation.differences({**locked, "vllm/never/imported.py": "0" * 64}) == {}


def test_other_bytes_than_the_locks_are_named():
    locked = _locked()
    assert attestation.differences({**locked, POLICY: "0" * 64}) == {POLICY: (locked[POLICY], "0" * 64)}


def test_a_module_that_the_lock_does_not_know_is_named():
    locked = _locked()
    digest = locked.pop(POLICY)
    assert attestation.differences(locked) == {POLICY: (digest, "not in the lock")}
