"""Inputs of the experts' permutation, for its tests on the CPU and on the GPU."""
import torch

from vllm.zero_mismatch.experts_permute import permute, places_reference

EXPERTS, TOP_K, HIDDEN = 24, 6, 272
KINDS = ["uniform", "one expert", "empty slots", "mapped"]


def routing(tokens: int, kind: str, experts: int = EXPERTS, top_k: int = TOP_K, seed: int = 0):
    """(experts of each slot, experts of this rank, map from global to local experts or None)"""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)
    if kind == "one expert":
        ids = torch.full_like(ids, 5)
    if kind == "empty slots":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    if kind != "mapped":
        return ids, experts, None
    local = experts // 2
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(experts, generator=generator)[:local]] = torch.arange(local, dtype=torch.int32)
    return ids.long(), local, expert_map


def capacity(slots: int, experts: int, alignment: int) -> int:
    """compute_aligned_M_and_alignment's bound."""
    most = slots + min(slots, experts) * (alignment - 1)
    return -(-most // alignment) * alignment


def rows_of(tokens: int, hidden: int = HIDDEN):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 127, (tokens, hidden), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, torch.rand(tokens, -(-hidden // 128), generator=generator)


def check_against_reference(tokens: int, kind: str, alignment: int, device: str = "cpu", column_major: bool = True,
                            experts: int = EXPERTS, top_k: int = TOP_K, hidden: int = HIDDEN) -> None:
    """Places, ends, rows and scales are the reference's; rows in the gaps stay as they were."""
    ids, local, expert_map = routing(tokens, kind, experts, top_k)
    codes, scales = rows_of(tokens, hidden)
    want_place, want_ends = places_reference(ids, local, alignment, expert_map)
    out = torch.full((capacity(ids.numel(), local, alignment), hidden), 7, dtype=torch.uint8, device=device)
    got_scales, ends, place = permute(
        codes.to(device), scales.to(device), ids.to(device), local, out.view(torch.float8_e4m3fn), alignment=alignment,
        expert_map=None if expert_map is None else expert_map.to(device), column_major=column_major)
    assert torch.equal(place.cpu(), want_place), "places"
    assert torch.equal(ends.cpu(), want_ends), "ends"
    want = torch.full(out.shape, 7, dtype=torch.uint8)
    live = want_place >= 0
    token = torch.arange(tokens)[:, None].expand_as(want_place)[live]
    want[want_place[live].long()] = codes.view(torch.uint8)[token]
    assert torch.equal(out.cpu(), want), "rows"
    assert torch.equal(got_scales.cpu()[want_place[live].long()], scales[token]), "scales"
    assert got_scales.stride() == ((1, -(-len(out) // 4) * 4) if column_major else (scales.shape[1], 1))
