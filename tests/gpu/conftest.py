"""GPU tests run the cases of tests/kernels: the helper modules of both folders are importable here."""
import pathlib
import sys

GPU = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(GPU), str(GPU.parent / "kernels")]
