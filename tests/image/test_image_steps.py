"""Every step of the image, run in a folder that holds what its stage has copied, with a pip that only writes down."""
import image_pins
import pytest

DIGEST = "name@sha256:" + "0" * 64


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    def make(release: str) -> dict[str, str]:
        tool = tmp_path / "bin/nvcc"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        tool.chmod(0o755)
        for name in ("apt-get", "python3.12", "rm"):  # none of these may touch the machine of the test
            (tool.parent / name).write_text(f"#!/bin/sh\necho {name} \"$@\"\n")
            (tool.parent / name).chmod(0o755)
        return {"PATH": f"{tool.parent}:/usr/bin:/bin"}
    return make


@pytest.mark.parametrize("base, release, said", [
    ("nvidia/cuda:13.0.3-devel-ubuntu24.04", "13.0", "a name without a digest"),
    ("name@sha256:123", "13.0", "a name without a digest"),
    (DIGEST, "12.9", "is not CUDA 13"),
])
def test_a_base_that_is_not_pinned_or_not_cuda_13_is_refused(base, release, said, stage, nvcc):
    done = stage("base").run("base.sh", BASE=base, **nvcc(release))
    assert done.returncode == 1 and said in done.stderr and "what to do:" in done.stderr
    assert "apt-get" not in done.stdout


def test_the_base_gets_the_pinned_python(stage, nvcc):
    done = stage("base").run("base.sh", BASE=DIGEST, **nvcc("13.0"))
    assert done.returncode == 0, done.stderr
    python = image_pins.value("python")
    assert f"python{python} python{python}-dev python{python}-venv" in done.stdout
    assert f"python{python} -m venv" in done.stdout


def libraries(made, *names: str) -> None:
    for name in names:
        path = made.venv / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_deps_are_every_package_but_the_engines_and_what_is_compiled(stage):
    made = stage("deps")
    libraries(made, "a/libnvshmem_host.so.3", "b/libnccl.so.2")
    done = made.run("deps.sh")
    assert done.returncode == 0, done.stderr
    line, = made.pip
    assert "--require-hashes --no-deps --only-binary :all:" in line
    listed = (made.work / "build/deps.txt").read_text()
    assert listed.count("==") > 200 and "\nvllm==" not in listed and "\ntorch==" in listed


def test_a_second_nvshmem_ends_the_build(stage):
    made = stage("deps")
    libraries(made, "a/libnvshmem_host.so.3", "deep_ep/libnvshmem_host.so.3", "b/libnccl.so.2")
    done = made.run("deps.sh")
    assert done.returncode == 1 and "2 copies of libnvshmem_host.so" in done.stderr


def test_a_pip_that_fails_ends_the_step(stage):
    assert stage("deps").run("deps.sh", PIP_EXIT="1").returncode == 1


def test_the_published_wheel_is_taken_by_its_hash(stage):
    made = stage("vllm")
    done = made.run("vllm.sh", VLLM_FROM="wheel")
    assert done.returncode == 0, done.stderr
    line, = made.pip
    assert line.startswith("-m pip download") and "--require-hashes" in line
    assert (made.work / "build/vllm.txt").read_text() == image_pins.lock()["vllm"]


def test_an_unknown_source_of_vllm_is_refused(stage):
    done = stage("vllm").run("vllm.sh", VLLM_FROM="nightly")
    assert done.returncode == 1 and "say wheel or source" in done.stderr
