"""GPU tests run under batch invariance, whatever the shell says: vLLM reads the switch as it is imported, some of its
compiled code only once. What upstream does without it, a test asks for by itself.

They also run the cases of tests/kernels: the helper modules of both folders are importable here.
"""
import os
import pathlib
import sys

import pytest
import torch

GPU = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(GPU), str(GPU.parent / "kernels")]
if torch.cuda.is_available():
    os.environ["VLLM_BATCH_INVARIANT"] = "1"

import engine_mode  # noqa: E402 - of this folder


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind():
    """The next file would fail for it, at a place that says nothing of the cause."""
    yield
    found = engine_mode.left_behind()
    assert not found, f"this file of tests leaves the process {', '.join(found)}"


@pytest.fixture(scope="module")
def actor():
    """The engine's operators and settings in this process, as in an actor's."""
    pytest.importorskip("vllm.config", reason="needs the patched engine")
    with engine_mode.as_in_an_actor():
        yield
