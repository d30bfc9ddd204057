#!/usr/bin/env python3
"""Every version that the image is built from, each read where it is decided; nothing is written down twice.

    image_pins.py python|arch|vllm|megatron|base     one value, for the shell steps
    image_pins.py engines|requirements               both engines; what docker/requirements.lock is resolved from
    image_pins.py locked [--only NAME] [--without NAME]...   the lock's own lines, of some packages
    image_pins.py unpack vllm DIR                    the pinned sdist, untouched
    image_pins.py upstream TREE                      the commits that vLLM's own sources name, as JSON

patchset.toml decides the engines, Python, the architectures and the trainer's packages; the Dockerfile the base image;
vLLM's and megatron-core's metadata every other package (resolved in docker/requirements.lock); vLLM's sources the
commits of the kernel libraries that it builds or asks for.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "docker/requirements.lock"
sys.path.insert(0, str(ROOT))

from patchset import archive, fetch, pins  # noqa: E402 - these scripts run by path, from any folder

# Name -> the file of vLLM's source tree that pins it and the pattern that finds the pin there.
TAG = r"GIT_TAG\s+\"?([0-9a-f]{40})\"?"
UPSTREAM = {
    "DeepGEMM": ("cmake/external_projects/deepgemm.cmake", r"_DEEPGEMM_UPSTREAM_TAG \"([0-9a-f]{40})\""),
    "FlashMLA": ("cmake/external_projects/flashmla.cmake", TAG),
    "DeepSelect": ("cmake/external_projects/deepselect.cmake", TAG),
    "FlashKDA": ("cmake/external_projects/flashkda.cmake", TAG),
    "flash-attention": ("cmake/external_projects/vllm_flash_attn.cmake", TAG),
    "qutlass": ("cmake/external_projects/qutlass.cmake", r"_QUTLASS_UPSTREAM_TAG \"([0-9a-f]{40})\""),
    "CUTLASS": ("CMakeLists.txt", r"CUTLASS_REVISION \"([^\"]+)\""),
    "DeepEP": ("tools/ep_kernels/install_python_libraries.sh", r"DEEPEP_COMMIT_HASH:-\"([0-9a-f]{40})\""),
    # What vLLM's own script would build DeepEP with; docker/steps/wheels.sh takes torch's NVSHMEM instead.
    "NVSHMEM of vLLM's script": ("tools/ep_kernels/install_python_libraries.sh", r"NVSHMEM_VER:-\"([0-9.]+)\""),
    "FlashInfer": ("requirements/cuda.txt", r"^flashinfer-python==(\S+)"),
    "TileLang": ("requirements/cuda.txt", r"^tilelang==(\S+)"),
    "Humming": ("requirements/cuda.txt", r"^humming-kernels\S*==(\S+)"),
    "torch": ("requirements/cuda.txt", r"^torch==(\S+)"),
    "Rust": ("rust-toolchain.toml", r"channel = \"([^\"]+)\""),
}


def upstream(tree: Path) -> dict[str, str]:
    """The versions that a vLLM source tree names. Raises ValueError if one is not found: another release moved it."""
    found = {}
    for name, (path, pattern) in UPSTREAM.items():
        match = re.search(pattern, (tree / path).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None:
            raise ValueError(f"{path} of {tree} does not name the version of {name}: mend UPSTREAM in {__file__}")
        found[name] = match[1]
    return found


def base(text: str | None = None) -> str:
    """The base image, the default of ARG BASE in the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8") if text is None else text
    return re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)[1]


def value(key: str) -> str:
    known = pins.load(ROOT)
    if key in known.upstreams:
        return known.upstream(key).version
    return {"python": known.image.python, "arch": " ".join(known.image.arch), "base": base()}[key]


def engines() -> list[str]:
    """Both engines at their pins, as pip takes them."""
    return [f"{one.distribution}=={one.version}" for one in pins.load(ROOT).standard()]


def requirements() -> list[str]:
    """The engines, and what the trainer needs beside them."""
    return engines() + list(pins.load(ROOT).image.trainer)


def lock() -> dict[str, str]:
    """Package -> its lines of the lock: version, markers, hashes."""
    found: dict[str, str] = {}  # a package has several versions where its markers tell platforms apart
    for block in re.split(r"^(?=[A-Za-z0-9])", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE):
        if block:
            name = re.match(r"[A-Za-z0-9._-]+", block)[0]
            found[name] = found.get(name, "") + block
    return found


def locked(only: list[str], without: list[str]) -> list[str]:
    """The lines of some packages of the lock; without `only`, of all."""
    known = lock()
    if unknown := sorted({*only, *without} - set(known)):
        raise ValueError(f"{LOCK.name} has no {', '.join(unknown)}")
    return [lines for name, lines in known.items() if name not in without and (not only or name in only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    listed = {"engines": engines, "requirements": requirements}
    for key in ("python", "arch", "vllm", "megatron", "base", *listed):
        verbs.add_parser(key)
    part = verbs.add_parser("locked")
    for option in ("--only", "--without"):
        part.add_argument(option, action="append", default=[], metavar="NAME")
    source = verbs.add_parser("unpack")
    source.add_argument("name")
    source.add_argument("folder", type=Path)
    verbs.add_parser("upstream").add_argument("tree", type=Path)
    args = parser.parse_args()
    if args.verb == "locked":
        print("".join(locked(args.only, args.without)), end="")
    elif args.verb == "unpack":
        one = pins.load(ROOT).upstream(args.name)
        archive.unpack(fetch.sdist(one, one.release()), args.folder)
    elif args.verb == "upstream":
        print(json.dumps(upstream(args.tree), indent=1))
    else:
        print("\n".join(listed[args.verb]()) if args.verb in listed else value(args.verb))


if __name__ == "__main__":
    main()
