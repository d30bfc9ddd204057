"""The image's steps that read vLLM's own sources, on the real sdist."""
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "docker"), str(ROOT / "tests" / "image")]

import image_pins  # noqa: E402 - the path comes first
from image_stage import staged  # noqa: E402

# Takes the place of git: writes down what is asked, and says that it is where it was last told to go.
GIT = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *rev-parse*) sed -n 's/.*--detach //p' {log} | tail -n 1 ;;
esac
"""


@pytest.fixture
def wheels(tmp_path):
    made = staged("wheels", tmp_path)
    tools, stubs = tmp_path / "tools", tmp_path / "cuda/lib64/stubs"
    for folder in (tools, stubs):
        folder.mkdir(parents=True)
    (stubs / "libcuda.so").write_text("")
    (tools / "git").write_text(GIT.format(log=tmp_path / "git.log"))
    (tools / "git").chmod(0o755)
    python = made.venv / "bin/python"  # its pip also writes down for which architectures
    python.write_text(python.read_text().replace('"$*" >>', '"$* [$TORCH_CUDA_ARCH_LIST]" >>'))
    made.environment = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_HOME": str(tmp_path / "cuda")}
    made.git = tmp_path / "git.log"
    return made


def test_deep_ep_is_built_at_vllms_own_commit_and_against_no_nvshmem_but_torchs(wheels):
    done = wheels.run("wheels.sh", **wheels.environment)
    assert done.returncode == 0, done.stderr
    named = image_pins.upstream(wheels.work / "build/vllm")
    assert f"checkout --quiet --detach {named['DeepEP']}\n" in wheels.git.read_text()
    deep_ep, engine = wheels.pip
    assert deep_ep.endswith("[9.0a 10.0a]") and "--no-build-isolation --no-deps" in deep_ep
    assert engine.endswith("[9.0 10.0]") and "--require-hashes" in engine
    step = (ROOT / "docker/steps/wheels.sh").read_text()
    assert "NVSHMEM_DIR" not in step and "NVSHMEM_ROOT" not in step  # these would overrule torch's wheel


def test_what_vllm_pins_itself_is_what_the_lock_has(wheels):
    """vLLM's sources and the metadata that the lock was resolved from say the same."""
    wheels.run("wheels.sh", **wheels.environment)
    named, lock = image_pins.upstream(wheels.work / "build/vllm"), image_pins.lock()
    for name, package in (("torch", "torch"), ("FlashInfer", "flashinfer-python"), ("TileLang", "tilelang"),
                          ("Humming", "humming-kernels")):
        assert lock[package].startswith(f"{package}=={named[name]} ")
    assert named["NVSHMEM of vLLM's script"] not in lock["nvidia-nvshmem-cu13"], "the two agree: drop the settlement"
