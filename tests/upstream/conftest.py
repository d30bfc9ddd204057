"""The tests of the hooks (test_*_patches.py) run on every pinned release of vLLM, each with its own patches."""
import pytest
import upstream_source

from patchset import pins

# What a release does not have yet, so that there is nothing to hook.
NOT_THERE = {"0.32.0": {"test_patched_specialised_decode_never_takes_the_approximate_kernel"}}


def pytest_generate_tests(metafunc):
    if not metafunc.module.__name__.rpartition(".")[2].endswith("_patches"):
        return
    releases = [release for release in pins.load(upstream_source.ROOT).upstream("vllm").releases
                if metafunc.function.__name__ not in NOT_THERE.get(release, ())]
    metafunc.fixturenames.append("vllm_release")
    metafunc.parametrize("vllm_release", releases, indirect=True)


@pytest.fixture
def vllm_release(request, monkeypatch) -> str:
    monkeypatch.setattr(upstream_source, "version", request.param)
    return request.param
