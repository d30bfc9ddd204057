"""Compiles the Mamba-2 scan and state kernels for SM90, without a GPU, and prints what moves a chunk's state in each.

    TRITON_INTERPRET=0 python tests/kernels/compile_mamba2.py '[H, P, G, N]'

A program of its own, because kernels of the tests' process belong to the interpreter.
"""
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  makes the overlays importable without an installed engine
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vllm.zero_mismatch import mamba2_pieces, mamba2_replay, mamba2_scan, mamba2_state  # noqa: E402

INTEGERS = ("piece_ptr", "request_ptr", "slots_ptr")
UNHINTED = ("stride_slots", "first_group")
FLOATS = ("scratch_ptr", "ring_steps_ptr", "states_ptr", "ssm_ptr")


def _type(name: str) -> str:
    if not name.endswith("_ptr"):
        return "i32"
    return "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else "*bf16"


def compiled(kernel, fixed: dict, **options) -> dict[str, str]:
    names = kernel.arg_names
    types = {name: "constexpr" if name in fixed else _type(name) for name in names}
    hints = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names)
             if name not in fixed and name not in INTEGERS and name not in UNHINTED}
    source = ASTSource(kernel, types, constexprs=fixed, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def state_products(code: dict[str, str], channels: int, state: int) -> dict:
    """The dots whose result is a tile of S: the shapes they multiply, and what their accumulator starts from."""
    result = f"tensor<{channels}x{state}xf32"
    form = r"tt\.dot [^,]*, [^,]*, %([\w#]+)[^:]*: (tensor<\w+>) \* (tensor<\w+>) -> (tensor<\w+)"
    dots = re.findall(form, code["ttir"])
    return {"dots": sorted({(left, right, out) for _, left, right, out in dots if out == result}),
            "from_zero": [start for start, _, _, out in dots if out == result and start.startswith("cst")],
            "instructions": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w]+", code["ptx"])))}


if __name__ == "__main__":
    heads, head_dim, groups, state = json.loads(sys.argv[1])
    tile = min(mamba2_state.CHANNELS, head_dim)
    common = {"H": heads, "P": head_dim, "G": groups, "N": state, "Q": mamba2_replay.CHUNK,
              "C": mamba2_pieces.COHORTS, "BP": tile, "WIDEN": False}
    scan = {**common, "BM": mamba2_scan.TILE}
    codes = {"scan": compiled(mamba2_scan._scan_kernel, scan, num_warps=mamba2_scan.WARPS),
             "state": compiled(mamba2_state._state_kernel, common, num_warps=mamba2_state.WARPS,
                               num_stages=mamba2_state.STAGES)}
    print(json.dumps({name: state_products(code, tile, state) for name, code in codes.items()}))
