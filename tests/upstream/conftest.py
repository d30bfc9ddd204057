"""The tests of vLLM's hooks (test_*_patches.py) run on every pinned release of vLLM, each with its own patches.

The tests of the delivery (test_deliver_*.py) get the real releases as targets: see delivery.py.
"""
import shutil

import delivery
import pytest
import upstream_source

from patchset import pins

# What a release does not have yet, so that there is nothing to hook.
NOT_THERE = {"0.32.0": {"test_patched_specialised_decode_never_takes_the_approximate_kernel",
                        "test_blocks_are_aligned_to_chunks"}}  # otherwise done there: test_variants_0_32.py


def pytest_generate_tests(metafunc):
    name = metafunc.module.__name__.rpartition(".")[2]
    if not name.endswith("_patches") or name == "test_verl_patches":
        return
    releases = [release for release in pins.load(upstream_source.ROOT).upstream("vllm").releases
                if metafunc.function.__name__ not in NOT_THERE.get(release, ())]
    metafunc.fixturenames.append("vllm_release")
    metafunc.parametrize("vllm_release", releases, indirect=True)


@pytest.fixture
def vllm_release(request, monkeypatch) -> str:
    monkeypatch.setattr(upstream_source, "version", request.param)
    return request.param


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """The releases unpacked once. That no test wrote through a hard link into them is checked at the end."""
    folder = tmp_path_factory.mktemp("store")
    made = delivery.Store(folder)
    yield made
    made.check()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> delivery.Checkout:
    """A copy of this checkout that no test changes."""
    return delivery.Checkout(tmp_path_factory.mktemp("checkout") / "zero-mismatch")


@pytest.fixture
def vllm_tree(store, tmp_path):
    return delivery.link_copy(store.tree("vllm"), tmp_path / "vllm")


@pytest.fixture
def megatron_tree(store, tmp_path):
    return delivery.link_copy(store.tree("megatron"), tmp_path / "megatron")


@pytest.fixture
def site(store, tmp_path):
    return delivery.link_copy(store.site(), tmp_path / "site")


@pytest.fixture
def manager(monkeypatch):
    """vLLM's workspaces, on the CPU."""
    from topk_cases import stub_workspaces

    return stub_workspaces(monkeypatch, slots=2)
