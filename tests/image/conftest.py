"""Puts docker/ and the helpers of these tests on the path."""
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "docker"), str(ROOT / "tests" / "image")]


@pytest.fixture
def stage(tmp_path):
    from image_stage import staged

    return lambda name: staged(name, tmp_path)
