"""Writes the tiny Nemotron-H as a BF16 checkpoint, loaded like any other: tiny-quantised before it is quantised.

[tiny] has the same sizes under the same rules, filled in place; here vLLM's own loader reads safetensors. Names, shapes
and values are in ../checkpoint.py.
"""
import pathlib

import torch

from prove.scripts import load

CHECKPOINT = load(pathlib.Path(__file__).parent.parent / "checkpoint.py")


def tensors(config: dict) -> dict[str, torch.Tensor]:
    """The whole checkpoint."""
    return {name: CHECKPOINT.unquantised(name, CHECKPOINT.value(name, shape))
            for name, shape in CHECKPOINT.shapes(config).items()}


def write(source: str, folder: str) -> None:
    """A checkpoint in `folder`, of the sizes in `source`/config.json. The same bytes every time."""
    config = CHECKPOINT.sizes(source)
    CHECKPOINT.save(config, tensors(config), folder)
