"""The last step: what it looks at is found wrong when it is wrong. The manifest and the labels say what is there."""
import json
import sys

import image_checks
import image_manifest
import image_pins
import pytest
from fat_binary import container, elf, entry
from image_stage import ROOT

from patchset import pins
from patchset.lock import Lock

BOTH = container(entry(2, 90), entry(2, 100))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """What the checks look at, in order; modules that import are empty files."""
    for pattern in image_checks.EVERY_ARCH:
        path = tmp_path / pattern.replace("*", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(elf(nv_fatbin=BOTH))
    for pattern in image_checks.ONCE:
        (tmp_path / pattern.replace("*", ".9")).write_text("")
    monkeypatch.setattr(image_checks, "SITE", tmp_path)
    return tmp_path


def failed(checks) -> list[str]:
    return [name for name, holds, _ in checks if not holds]


def test_a_complete_site_passes(site):
    assert failed(image_checks.architectures(site, ["9.0", "10.0"], partial=False)) == []
    assert failed(image_checks.once(site)) == []


def test_a_library_that_lacks_an_architecture_fails(site):
    path = site / "vllm/_flashmla_C.so"
    for fat in (container(entry(2, 90)), container(entry(2, 90), entry(1, 100))):
        path.write_bytes(elf(nv_fatbin=fat))
        assert failed(image_checks.architectures(site, ["9.0", "10.0"], partial=False)) == ["_flashmla_C.so"]
    path.write_bytes(elf(text=b"no GPU code at all"))
    assert failed(image_checks.architectures(site, ["9.0"], partial=True)) == ["_flashmla_C.so"]


def test_a_library_that_is_not_there_fails_only_in_the_image(site):
    (site / "deep_ep/_C.so").unlink()
    assert failed(image_checks.architectures(site, ["9.0"], partial=False)) == ["deep_ep/_C*.so"]
    assert failed(image_checks.architectures(site, ["9.0"], partial=True)) == []


def test_two_nvshmems_or_none_fail(site):
    (site / "deep_ep/libnvshmem_host.so.3").write_text("")
    assert failed(image_checks.once(site)) == ["libnvshmem_host.so*"]
    (site / "deep_ep/libnvshmem_host.so.3").unlink()
    (site / "libnvshmem_host.so.9").unlink()
    assert failed(image_checks.once(site)) == ["libnvshmem_host.so*"]


@pytest.mark.parametrize("text, holds", [("__commit_id__ = commit_id = 'g4ba787ec9'\n", True),
                                         ("__commit_id__ = commit_id = None\n", True),
                                         ("__commit_id__ = commit_id = 'gdeadbeef0'\n", False)])
def test_another_commit_than_the_pinned_one_fails(text, holds):
    assert image_checks.commit(text, "4ba787ec9")[1] is holds


def test_what_cannot_be_imported_is_named_and_the_rest_is_still_tried(site, monkeypatch):
    for name, text in (("good", ""), ("bad", "raise RuntimeError('no\\nway')"), ("nodriver", "raise ImportError("
                       "'libcuda.so.1: cannot open shared object file')"), ("dies", "import os; os._exit(3)")):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(image_checks, "ENGINES", ("bad", "good"))
    monkeypatch.setattr(image_checks, "COMPILED", ("nodriver",))
    monkeypatch.setattr(image_checks, "BESIDE", ("dies", "absent"))
    monkeypatch.setattr(image_checks, "NEED_DRIVER", ("nodriver",))
    monkeypatch.setattr(image_checks, "DRIVER", site / "nvidiactl")
    said = {name: (holds, seen) for name, holds, seen in image_checks.imports(partial=True)}
    assert said["import good"] == (True, "ok") and said["import bad"] == (False, "RuntimeError: no way")
    assert said["import nodriver"] == (True, "needs a driver, and there is none")
    assert said["import dies"] == (False, "the process ended first: exit 3")
    assert said["import absent"] == (True, "not installed, left out")
    assert "import absent" in failed(image_checks.imports(partial=False))


def test_a_missing_driver_excuses_only_what_needs_one_and_only_where_there_is_none(tmp_path, monkeypatch):
    said = "ImportError: libcuda.so.1: cannot open shared object file"
    monkeypatch.setattr(image_checks, "DRIVER", tmp_path / "nvidiactl")
    assert image_checks._imported("deep_ep", said)[1] and not image_checks._imported("vllm", said)[1]
    assert not image_checks._imported("deep_ep", "AttributeError: module 'torch' has no attribute 'cuda'")[1]
    (tmp_path / "nvidiactl").write_text("")
    assert not image_checks._imported("deep_ep", said)[1]


def test_the_toolkits_stub_stands_in_for_the_driver(tmp_path, monkeypatch):
    stub = tmp_path / "cuda/lib64/stubs/libcuda.so"
    stub.parent.mkdir(parents=True)
    stub.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert image_checks._stub(str(tmp_path)) == str(tmp_path)
    assert (tmp_path / "libcuda.so.1").resolve() == stub
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert image_checks._stub(str(tmp_path)) == ""


@pytest.fixture
def manifest(site, monkeypatch):
    known = pins.load(ROOT)
    packages = {one.distribution: one.version for one in known.standard()} | {"torch": "2.1"}
    monkeypatch.setattr(image_manifest, "installed", lambda: packages)
    for name, value in (("BASE", image_pins.base()), ("REVISION", "a" * 40), ("VLLM_FROM", "wheel")):
        monkeypatch.setenv(name, value)
    return image_manifest.manifest()


def test_the_manifest_names_both_engines_as_they_are_locked(manifest):
    known, lock = pins.load(ROOT), Lock.load(ROOT)
    for one in known.standard():
        entry = lock.target(one.name, one.version, "all")
        said = manifest["engines"][one.name]
        assert (said["version"], said["lock"], said["tree"]) == (one.version, entry.digest, entry.tree)
    assert manifest["architectures"]["vllm/_flashmla_C.so"] == ["sm_90", "sm_100"]
    assert manifest["base"] == image_pins.base() and manifest == image_manifest.manifest()


def test_an_engine_that_is_not_pinned_has_no_manifest(manifest, monkeypatch):
    monkeypatch.setattr(image_manifest, "installed", lambda: {"vllm": "0.1.0", "megatron-core": "0.19.2"})
    with pytest.raises(pins.UsageError, match="vllm 0.1.0 is not pinned"):
        image_manifest.manifest()


def test_labels_are_the_manifests_short_form(manifest, tmp_path, monkeypatch, capsys):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(sys, "argv", ["image_manifest.py", "labels", str(tmp_path / "manifest.json")])
    image_manifest.main()
    labels = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert labels["zero-mismatch.vllm.tree"] == manifest["engines"]["vllm"]["tree"]
    assert labels["org.opencontainers.image.base.digest"] == image_pins.base().partition("@")[2]
    assert labels["org.opencontainers.image.revision"] == "a" * 40 and all(labels.values())


def test_the_bill_has_the_patches_as_pedigree_and_every_package_once(manifest):
    bill = image_manifest.bill(manifest)
    names = [one["name"] for one in bill["components"]]
    assert len(names) == len(set(names)) and {"vllm", "megatron-core", "torch"} <= set(names)
    vllm = bill["components"][names.index("vllm")]
    assert len(vllm["pedigree"]["patches"]) == len(manifest["engines"]["vllm"]["patches"])
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(references) == len(set(references))
