"""Make the overlays importable on a CPU machine, where vLLM's compiled package is not installed.

With the real, patched engine on the path (a GPU machine) the tests import it. Without it, `vllm` becomes a bare
package whose path is the overlay folder, so `vllm.zero_mismatch.<operator>` loads the same source file either way.
"""
import importlib.util
import os
import pathlib
import signal
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit"), str(ROOT / "tests" / "kernels")]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and the processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _cuda_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if not _cuda_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is first imported


def _overlay_as_package(name: str, folder: pathlib.Path) -> None:
    if importlib.util.find_spec(name) is None:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


_overlay_as_package("vllm", ROOT / "overlays" / "vllm" / "vllm")
_overlay_as_package("megatron", ROOT / "overlays" / "megatron" / "megatron")
_overlay_as_package("verl", ROOT / "overlays" / "verl" / "verl")
