"""One rank of a context-parallel group on a CPU (gloo): python cp_ranks.py FOLDER RANK SIZE.

Computes the tiny Nemotron-H's logprobs and gradients with the group and alone, and writes both to FOLDER/RANK.pt, for
test_context_parallel.py to compare. The reference kernels stand for vLLM's, made invariant row by row.
"""
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import conftest  # noqa: F401 - makes the overlays importable
import tiny_nemotron
import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.context_parallel import ALONE, Ranks, collect, to_heads, to_tokens
from megatron.zero_mismatch.packing import Packed, pack

LENGTHS = (5, 33, 16, 1, 50)  # 105 tokens: two ranks are cut inside the third sequence, at no multiple of a chunk
MICRO = ((4,), (1, 3), (2, 0))


def logprobs(model, sequences, ranks):
    """One micro-batch's logprobs; a loss of them, the same on every rank, is differentiated."""
    tokens, packed = pack(sequences)
    found = model(tokens, dataclasses.replace(packed, ranks=ranks))
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    (found * weight).sum().backward()
    return found.detach()


def gradients(model, summed: bool) -> dict:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if summed:
        for grad in found.values():
            torch.distributed.all_reduce(grad)
    return found


def of_model(group: Ranks) -> dict:
    sequences, found = tiny_nemotron.sequences(*LENGTHS), {}
    table = tiny_nemotron.row_by_row(kernels.reference())
    for name, ranks in (("group", group), ("alone", ALONE)):
        model = tiny_nemotron.model(table=table, recompute=True)
        found[f"{name} logprobs"] = logprobs(model, sequences, ranks)
        found[f"{name} micro"] = [logprobs(model, [sequences[i] for i in batch], ranks) for batch in MICRO]
        exact = tiny_nemotron.model(torch.float64)
        found[f"{name} fp64"] = logprobs(exact, sequences, ranks)
        found[f"{name} gradients"] = gradients(exact, summed=ranks is group)
    # What the group is there for: a rank that took its own rows for whole sequences would have other values.
    own = Packed((len(sequences[4]) // 2,), torch.device("cpu"))
    with torch.no_grad():
        found["cut"] = model(sequences[4][25:], own)
    return found


def of_exchange(group: Ranks) -> dict:
    """Rows 0..6 of two sections, 4 and 8 wide: dealt out, brought back, collected."""
    packed = Packed((7,), torch.device("cpu"), group)
    whole = torch.arange(7 * 12, dtype=torch.float64).view(7, 12)
    x = packed.own(whole).clone().requires_grad_()
    dealt = to_heads(x, [4, 8], packed)
    back = to_tokens(dealt[:, :2], packed)
    together = collect(x, packed)
    (dealt.sum() + (together * whole * (group.rank + 1)).sum()).backward()
    return {"whole": whole, "dealt": dealt.detach(), "back": back.detach(), "together": together.detach(),
            "own": packed.own(whole), "grad": x.grad}


def main(folder: str, rank: str, size: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=int(rank), world_size=int(size),
                                         init_method=f"file://{folder}/store")
    group = Ranks(torch.distributed.group.WORLD)
    torch.save(of_model(group) | of_exchange(group), f"{folder}/{rank}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
