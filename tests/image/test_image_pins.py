"""The image's versions, each from where it is decided; the lock is the one that the pins ask for."""
import re
import subprocess
import sys

import image_pins
import pytest
from image_stage import ROOT

from patchset import pins


def test_the_lock_has_what_the_pins_ask_for_with_the_pinned_digests():
    known, lock = pins.load(ROOT), image_pins.lock()
    for one in known.standard():
        release = one.release()
        assert lock[one.distribution].startswith(f"{one.distribution}=={release.version} ")
        assert f"sha256:{release.sdist}" in lock[one.distribution]
        assert f"sha256:{release.wheel}" in lock[one.distribution]
    for line in image_pins.requirements():
        name, _, version = re.sub(r"\[.*\]", "", line).partition("==")
        assert lock[name].startswith(f"{name}=={version} ")


def test_every_line_of_the_lock_has_a_hash():
    lock = image_pins.lock()
    assert len(lock) > 150 and all("--hash=sha256:" in lines for lines in lock.values())
    assert "".join(lock.values()) == image_pins.LOCK.read_text()


def test_one_nvshmem_and_one_nccl_are_locked():
    """DeepEP is built against these: a second one in the image would be loaded or not by the order of imports."""
    names = [name for name in image_pins.lock() if name.startswith(("nvidia-nvshmem", "nvidia-nccl"))]
    assert names == ["nvidia-nccl-cu13", "nvidia-nvshmem-cu13"]


def test_the_architectures_are_those_of_the_profiles():
    known = pins.load(ROOT)
    for arch in known.image.arch:
        assert f"sm{arch.replace('.', '')}" in known.profile("all").arch


def test_parts_of_the_lock_add_up_and_an_unknown_name_is_refused():
    everything, engines = image_pins.locked([], []), ["vllm", "megatron-core"]
    assert sorted(image_pins.locked(engines, []) + image_pins.locked([], engines)) == sorted(everything)
    with pytest.raises(ValueError, match="has no vlm"):
        image_pins.locked([], ["vlm"])


def test_a_release_that_moved_a_pin_is_an_error(tmp_path):
    for path, _ in image_pins.UPSTREAM.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("nothing\n")
    with pytest.raises(ValueError, match="does not name the version of DeepGEMM"):
        image_pins.upstream(tmp_path)


@pytest.mark.parametrize("verb, expected", [
    ("python", r"3\.\d+"), ("arch", r"\d+\.\d( \d+\.\d)*"), ("vllm", r"[\d.]+"), ("megatron", r"[\d.]+"),
    ("base", r"\S+@sha256:[0-9a-f]{64}"), ("engines", r"vllm==[\d.]+\nmegatron-core==[\d.]+"),
    ("requirements", r"vllm==[\d.]+\n[\s\S]+"),
])
def test_each_value_is_printed_for_the_steps(verb, expected):
    done = subprocess.run([sys.executable, ROOT / "docker/image_pins.py", verb], capture_output=True, text=True,
                          check=True, cwd="/")
    assert re.fullmatch(expected, done.stdout.strip())
