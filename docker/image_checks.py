#!/usr/bin/env python3
"""Does this interpreter hold what the image promises? Imports, commit, compiled architectures, one NVSHMEM, one NCCL.

    image_checks.py             everything the image has
    image_checks.py --partial   outside it: what is not installed is named and left out

Prints a line a check; exit 1 if one failed. It runs in the interpreter that it checks. An image is built where there is
no GPU: a module that then stops for want of the driver, and says so, has not failed.
"""
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import image_arch
import image_pins

SITE = Path(sysconfig.get_paths()["platlib"])
ENGINES = ("vllm", "vllm.zero_mismatch.policy", "vllm.model_executor.models.registry",
           "vllm.models.deepseek_v4.nvidia.model", "vllm.model_executor.models.nemotron_h", "vllm.entrypoints.cli.main",
           "vllm.third_party.deep_gemm", "megatron.core", "megatron.core.transformer", "megatron.zero_mismatch.ste")
COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._flashmla_C")  # these need libcuda.so.1
BESIDE = ("flashinfer", "tilelang", "humming", "deep_ep", "transformer_engine.pytorch", "modelopt.torch")
NEED_DRIVER = (*COMPILED, "deep_ep", "transformer_engine.pytorch")
NO_DRIVER = re.compile(r"libcuda\.so\.1|(NVIDIA|CUDA) driver|no CUDA-capable device|CUDA_ERROR_(NO_DEVICE|STUB)", re.I)
DRIVER = Path("/dev/nvidiactl")
# What runs on every GPU of patchset.toml. The rest of vLLM's libraries serve one architecture each, by their design.
EVERY_ARCH = ("vllm/_C_stable_libtorch*.so", "vllm/_moe_C_stable_libtorch*.so", "vllm/_flashmla_C*.so",
              "vllm/_flashmla_extension_C*.so", "deep_ep/_C*.so")
ONCE = ("libnvshmem_host.so*", "libnccl.so*")  # a second copy would be loaded or not by the order of imports

MARK = "zero-mismatch-import "
TRY = f"""
import importlib, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
        said = "ok"
    except Exception as error:
        said = type(error).__name__ + ": " + " ".join(str(error).split())
    print({MARK!r} + module, said, flush=True)
"""

Check = tuple[str, bool, str]  # name, whether it holds, what was seen


def imports(partial: bool) -> Iterator[Check]:
    """Three processes: what one package does when it is imported cannot help or harm another group's."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, [_stub(folder),
                                                                               os.environ.get("LD_LIBRARY_PATH")]))}
        for group in (ENGINES, COMPILED, BESIDE):
            absent = [one for one in group if partial and not (SITE / one.split(".")[0]).is_dir()]
            yield from ((f"import {one}", True, "not installed, left out") for one in absent)
            present = [one for one in group if one not in absent]
            done = subprocess.run([sys.executable, "-c", TRY, *present], env=environment, capture_output=True,
                                  text=True, cwd=folder, check=False)
            said = dict(line.removeprefix(MARK).split(" ", 1) for line in done.stdout.splitlines()
                        if line.startswith(MARK))
            yield from (_imported(one, said.get(one, f"the process ended first: exit {done.returncode}"))
                        for one in present)


def _imported(module: str, said: str) -> Check:
    if module in NEED_DRIVER and not DRIVER.exists() and NO_DRIVER.search(said):
        return f"import {module}", True, "needs a driver, and there is none"
    return f"import {module}", said == "ok", said


def _stub(folder: str) -> str:
    """A folder with libcuda.so.1: the toolkit's stub, under the name that libraries ask for. '' without a toolkit."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    for stub in (cuda / "lib64/stubs/libcuda.so", *cuda.glob("targets/*/lib/stubs/libcuda.so")):
        if stub.exists():
            (Path(folder) / "libcuda.so.1").symlink_to(stub)
            return folder
    return ""


def commit(text: str, pinned: str) -> Check:
    """vllm/_version.py records the commit it was built from; a build from the sdist may record none."""
    found = next((line.split("=")[-1].strip().strip("'\"") for line in text.splitlines()
                  if line.startswith("__commit_id__ =")), "None")
    return "vLLM's commit", found in ("None", f"g{pinned}"), f"{found}, pinned {pinned}"


def architectures(site: Path, needed: list[str], partial: bool) -> Iterator[Check]:
    for pattern in EVERY_ARCH:
        paths = sorted(site.glob(pattern))
        if not paths:
            yield pattern, partial, "not there"
        for path in paths:
            try:
                found = image_arch.architectures(path)
            except image_arch.BadLibrary as error:
                yield path.name, False, str(error)
                continue
            lacks = image_arch.lacking(found, needed) if found else needed
            yield path.name, not lacks, " ".join(found) + (f"; lacks {', '.join(lacks)}" if lacks else "")


def once(site: Path) -> Iterator[Check]:
    for pattern in ONCE:
        found = [path for path in site.rglob(pattern) if path.is_file() and not path.is_symlink()]
        yield pattern, len(found) == 1, ", ".join(str(path.relative_to(site)) for path in found) or "not there"


def run(partial: bool) -> Iterator[Check]:
    pinned = image_pins.pins.load(image_pins.ROOT)
    yield commit((SITE / "vllm/_version.py").read_text(encoding="utf-8"), pinned.upstream("vllm").release().commit)
    yield from architectures(SITE, list(pinned.image.arch), partial)
    yield from once(SITE)
    yield from imports(partial)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partial", action="store_true", help="leave out what is not installed")
    failed = 0
    for name, holds, seen in run(parser.parse_args().partial):
        failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {seen}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
