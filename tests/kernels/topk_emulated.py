"""topk.cu compiled for the CPU, one thread after the other (see cuda_on_cpu.h), called like the kernel on a GPU."""
import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile

import torch

from vllm.zero_mismatch import topk_cuda

HERE = pathlib.Path(__file__).parent
ENTRY = """
extern "C" void emulate_{c}(const void* from, const void* to, int rows, unsigned seed, const Arguments* arguments) {{
  emulator::readable_from = static_cast<const char*>(from);
  emulator::readable_to = static_cast<const char*>(to);
  emulator::launch(rows * {c}, {c}, THREADS, sizeof(Shared), seed, [=] {{ topk_exact_{c}(*arguments); }});
}}
"""


def compiler():
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _library(bf16, **settings):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="topk-emulated-"))
    glue = folder / "topk.cpp"
    glue.write_text(f'#include "{topk_cuda.SOURCE}"\n' + "".join(ENTRY.format(c=c) for c in topk_cuda.CLUSTERS))
    defines = [f"-DBF16={str(bf16).lower()}", *(f"-D{name}={value}" for name, value in settings.items())]
    built = subprocess.run(
        [compiler(), "-std=c++20", "-O2", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC", *defines,
         "-include", HERE / "cuda_on_cpu.h", glue, "-o", folder / "topk.so"], capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(f"topk.cu does not compile for the CPU:\n{built.stderr}")
    library = ctypes.CDLL(str(folder / "topk.so"))
    shutil.rmtree(folder)
    return library, built.stderr


def warnings(**settings):
    return _library(False, **settings)[1]


def top_k(logits, lengths, out, starts=None, next_n=1, cluster=1, seed=0, **settings):
    """settings: those of topk_cuda.SETTINGS, or smaller ones that make small rows take the paths of long ones."""
    library, _ = _library(logits.dtype == torch.bfloat16, **(topk_cuda.SETTINGS | settings))
    storage = logits.untyped_storage()
    first = storage.data_ptr()
    arguments = topk_cuda.ARGUMENTS.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in (logits, starts, lengths, out)),
        logits.stride(0), out.stride(0), logits.shape[1], out.shape[1], next_n)
    getattr(library, f"emulate_{cluster}")(
        ctypes.c_void_p(first // 16 * 16), ctypes.c_void_p(-(-(first + storage.nbytes()) // 16) * 16),
        ctypes.c_int(logits.shape[0]), ctypes.c_uint(seed), ctypes.create_string_buffer(arguments))
    return out
