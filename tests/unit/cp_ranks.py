"""One rank of a context-parallel group on a CPU (gloo): python cp_ranks.py FOLDER RANK SIZE.

Computes logprobs and gradients of the small models with the group and alone, and writes both to FOLDER/RANK.pt, for
test_context_parallel.py to compare. Reference kernels stand for vLLM's: Nemotron-H's made invariant row by row,
DeepSeek-V4's, whose products are in fp64, as they are. Nemotron-H's scan is the engine's own kernel, by Triton's
interpreter: it cuts a head's chunks by the head's place in the model, of which a rank has a share.
"""
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import conftest  # noqa: F401 - makes the overlays importable
import small_deepseek_v4 as deepseek
import tiny_nemotron
import tiny_nemotron_quantised
import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.context_parallel import ALONE, Ranks, collect, to_heads, to_tokens
from megatron.zero_mismatch.packing import Packed, pack


def quantised_rows() -> kernels.Kernels:
    """Row by row, and for attention sequence by sequence."""
    table, made = kernels.reference().quantised, tiny_nemotron.row_by_row(kernels.reference())

    def attend(q, cache, scales, packed, scale):
        return torch.cat([table.attention.attend(q[a:b], [t[a:b] for t in cache], scales,
                                                 Packed((b - a,), packed.device), scale) for a, b in packed.bounds])

    def experts(x, up, down, weights, ids):
        return torch.cat([table.experts.experts(x[t:t + 1], up, down, weights[t:t + 1], ids[t:t + 1])
                          for t in range(len(x))])

    return dataclasses.replace(made, quantised=dataclasses.replace(
        table, attention=table.attention._replace(attend=attend), experts=table.experts._replace(experts=experts)))


def scanned() -> kernels.Kernels:
    """Row by row, and the engine's scan."""
    return dataclasses.replace(tiny_nemotron.row_by_row(kernels.reference()), mamba2=kernels._vllm_mamba2)


LENGTHS = (5, 33, 16, 1, 50)  # 105 tokens: two ranks are cut inside the third sequence, at no multiple of a chunk
MICRO = ((4,), (1, 3), (2, 0))
MODELS = {  # name -> (lengths, the model whose bits are compared, the one whose gradients are, in fp64)
    "nemotron": (LENGTHS, lambda: tiny_nemotron.model(table=scanned(), recompute=True),
                 lambda: tiny_nemotron.model(torch.float64)),
    "nemotron quantised": (
        (5, 33, 1, 20), lambda: tiny_nemotron_quantised.model(table=quantised_rows(), recompute=True),
        lambda: tiny_nemotron_quantised.model(torch.float64, kernels.exact())),
    # Cut inside the first sequence: behind its row of 128 tokens for the second group, inside a row of 4.
    "deepseek": ((142, 9, 1, 40), lambda: deepseek.quantised(recompute=True), deepseek.build),
}  # fmt: skip


def forward(model, sequences, ranks) -> torch.Tensor:
    tokens, packed = pack(sequences)
    return model(tokens % model.shape.vocab, dataclasses.replace(packed, ranks=ranks))


def logprobs(model, sequences, ranks) -> torch.Tensor:
    """And a loss of them, the same on every rank, is differentiated."""
    found = forward(model, sequences, ranks)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    (found * weight).sum().backward()
    return found.detach()


def gradients(model, summed: bool) -> dict:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if summed:
        for grad in found.values():
            torch.distributed.all_reduce(grad)
    return found


def of_models(group: Ranks) -> dict:
    found = {}
    for name, (lengths, bits, exact) in MODELS.items():
        sequences, model = tiny_nemotron.sequences(*lengths), bits()
        for who, ranks in (("group", group), ("alone", ALONE)):
            found[name, who, "logprobs"] = logprobs(model, sequences, ranks)
            made = exact()
            found[name, who, "exact"] = logprobs(made, sequences, ranks)
            found[name, who, "gradients"] = gradients(made, summed=ranks is group)
    return found


def of_nemotron(group: Ranks) -> dict:
    """Cut into micro-batches; and what the group is there for: one that took its own rows for whole sequences."""
    sequences, model = tiny_nemotron.sequences(*LENGTHS), MODELS["nemotron"][1]()
    cut = Packed((LENGTHS[4] // 2,), torch.device("cpu"))
    with torch.no_grad():
        return {"micro": [forward(model, [sequences[i] for i in batch], group) for batch in MICRO],
                "cut": model(sequences[4][-cut.tokens:], cut)}


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
    torch.save(of_models(group) | of_nemotron(group) | of_exchange(group), f"{folder}/{rank}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
