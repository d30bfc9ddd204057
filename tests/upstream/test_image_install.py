"""The image's way to both engines, for real but for their dependencies: the published wheels, installed and patched.

Steps vllm.sh and engines.sh, in a fresh virtual environment of the image's Python. No index is used: pip finds the two
pinned wheels in the archive cache and checks their hashes against docker/requirements.lock.
"""
import os
import pathlib
import shutil
import subprocess
import sys

import delivery
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "docker"), str(ROOT / "tests" / "image")]

import image_pins  # noqa: E402 - the path comes first
from image_stage import staged  # noqa: E402

from patchset import pins  # noqa: E402


def image_python() -> str | None:
    """An interpreter of the version that the image has: megatron-core's wheel is for that one alone."""
    version = image_pins.value("python")
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    named = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))]
    for found in filter(None, named):
        if subprocess.run([found, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
            return found
    return None


@pytest.fixture
def links(tmp_path) -> pathlib.Path:
    """A folder with both wheels, as pip's --find-links takes it."""
    folder = tmp_path / "links"
    folder.mkdir()
    for one in pins.load(ROOT).standard():
        archive = delivery.wheel(one)
        (folder / archive.name).symlink_to(archive)
    return folder


def test_both_wheels_are_installed_and_patched_into_the_locked_trees(tmp_path, links):
    python = image_python()
    if python is None:
        pytest.skip(f"no Python {image_pins.value('python')} here")
    made = staged("megatron", tmp_path)
    shutil.rmtree(made.venv)
    subprocess.run([python, "-m", "venv", made.venv], check=True)
    for step in ("vllm.sh", "finish.sh"):  # of the stages before and after
        shutil.copy(ROOT / "docker/steps" / step, made.root / "docker/steps")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": os.devnull}
    for step in ("vllm.sh", "engines.sh"):
        done = made.run(step, VLLM_FROM="wheel", **offline)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verified, exactly the locked tree") == 2
    folder, = made.venv.glob("lib/python*/site-packages")
    libraries = [str(path) for path in sorted(folder.glob("vllm/_*_C*.so"))]
    said = subprocess.run([sys.executable, ROOT / "docker/image_arch.py", *libraries], capture_output=True, text=True,
                          check=True).stdout
    assert len(libraries) >= 5 and said.count("sm_100") >= 5
    edited = folder / "vllm/zero_mismatch/topk.py"
    edited.write_text(edited.read_text() + "# edited\n")
    refused = made.run("finish.sh")
    assert refused.returncode == 4 and "vllm/zero_mismatch/topk.py" in refused.stderr  # no image of an edited tree
