"""Runs the Top-K kernels once with the given forms, so that their binaries lie in Triton's and vLLM's caches.

    python tests/gpu/compile_topk.py '[[K, width, split], ...]'

An empty list means the CUDA kernel. The tests start one of these for each kernel, because one after the other they
take minutes to compile.
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  makes the overlays importable without an installed engine
import torch  # noqa: E402

from vllm.zero_mismatch import topk, topk_cuda  # noqa: E402


def main(forms: list) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not forms and topk_cuda.supports(device):
        topk_cuda.prepare(device)
    for k, width, split in forms:
        lengths = torch.zeros(1, dtype=torch.int32, device=device)
        scratch = torch.empty(1, topk.scratch_shape(width)[1], dtype=torch.int32, device=device)
        out = torch.empty(1, k, dtype=torch.int32, device=device)
        topk.triton_top_k(torch.empty(1, width, device=device), lengths, out, scratch, split=split)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
