"""Compiles bi_mm_fp32's kernel for SM90, without a GPU, and prints what its products became.

    TRITON_INTERPRET=0 python tests/kernels/compile_mm_fp32.py '[[N, K, dtype, height, aligned], ...]'

A program of its own, because kernels of the tests' process belong to the interpreter.
"""
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  makes the overlays importable without an installed engine
import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vllm.zero_mismatch import mm_fp32  # noqa: E402

ALIGNED = ("x_ptr", "w_ptr", "out_ptr", "stride_xm", "stride_wn")


def compiled(n: int, k: int, dtype: str, height: int, aligned: bool) -> dict[str, str]:
    kernel = mm_fp32._mm_fp32_kernel
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    tile = mm_fp32._tile(n, torch_dtype, torch_dtype)[1]
    slices, steps = mm_fp32._slices(k, tile)
    fixed = {"K": k, "BLOCK_M": height, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "SLICES": slices,
             "STEPS": steps, "BAND": mm_fp32._BAND, "WIDEN": dtype == "fp32", "EARLY": True}
    pointers = {"x_ptr": "*" + dtype, "w_ptr": "*" + dtype, "out_ptr": "*fp32"}
    types = {name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in kernel.arg_names}
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED
             if aligned or name == "out_ptr"}
    options = {"num_warps": height // tile.rows_per_warp, "num_stages": tile.stages}
    source = ASTSource(kernel, types, constexprs=fixed, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm | {"slices": slices}


def summary(code) -> dict:
    return {"slices": code["slices"],
            "accumulators": re.findall(r"tt\.dot [^,]*, [^,]*, %(\w+)", code["ttir"]),
            "products": re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w]+|fma\.rn\.f32", code["ptx"]),
            "additions": len(re.findall(r"add(?:\.rn)?\.f32", code["ptx"]))}


if __name__ == "__main__":
    print(json.dumps([summary(compiled(*case)) for case in json.loads(sys.argv[1])]))
