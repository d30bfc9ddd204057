"""Where each routed row goes in DeepGEMM's contiguous layout, and the copy there.

Invariant: the slot (token, k) goes to

    place = start of its expert + number of earlier slots of that expert, counted token by token, slot by slot
    start = end of the expert before, rounded up to `alignment`;  end = start + rows of the expert

Why it holds: a rank is a prefix count over the slots in their order and a start is a sum of integers; neither has an
order of arrival. Upstream takes the place from an atomic counter (fused_moe/deep_gemm_utils.py:236), so rows change
places from run to run. That moves no bit of the experts' output, as long as nothing reads a place; here nothing can.

Two kernels: one program an expert ranks its slots, one program a slot copies its row. Rows between an expert's end and
the next start are not written: the GEMMs and the activation take live rows from `ends`, and what a tile computes for
the others nobody reads. Scales leave in the layout that DeepGEMM's TMA takes on SM90, which saves its transposition.
"""
import torch
import triton
import triton.language as tl

SLOTS = 2048  # slots that a ranking program looks at in one go: a decode step of 256 tokens, top-6, is one
RANK_WARPS = 8
COPY_WARPS = 4


@triton.jit
def _rank_kernel(
    ids_ptr,  # [slots] global expert of each slot, negative where empty
    map_ptr,  # [global experts] local expert or -1; unused without MAPPED
    rank_ptr,  # [slots] int32, out: rank within the expert; not written where no expert of this GPU serves the slot
    count_ptr,  # [experts] int32, out
    slots, MAPPED: tl.constexpr, SLOTS: tl.constexpr,
):
    mine = tl.program_id(0)
    seen = 0
    for first in range(0, slots, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        expert = tl.load(ids_ptr + slot, mask=slot < slots, other=-1).to(tl.int32)
        if MAPPED:
            expert = tl.load(map_ptr + expert, mask=expert >= 0, other=-1).to(tl.int32)
        hit = (expert == mine).to(tl.int32)
        tl.store(rank_ptr + slot, seen + tl.cumsum(hit, axis=0) - 1, mask=hit > 0)
        seen += tl.sum(hit, axis=0)
    tl.store(count_ptr + mine, seen)


@triton.jit
def _copy_kernel(
    ids_ptr, map_ptr, rank_ptr, count_ptr,
    place_ptr,  # [slots] int32, out: -1 where no expert of this GPU serves the slot
    end_ptr,  # [experts] int32, out
    row_ptr, out_ptr,  # [tokens, WORDS] and [places, WORDS] int32
    scale_ptr, scale_out_ptr,  # [tokens, GROUPS] and [places, GROUPS] fp32
    slots, row_stride, scale_stride, scale_group_stride, scale_out_stride, scale_out_group_stride,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ALIGNMENT: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PADDED: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    MAPPED: tl.constexpr,
):
    slot = tl.program_id(0)
    number = tl.arange(0, EXPERTS_PADDED)
    counts = tl.load(count_ptr + number, mask=number < EXPERTS, other=0)
    aligned = tl.cdiv(counts, ALIGNMENT) * ALIGNMENT
    if slot < EXPERTS:
        tl.store(end_ptr + slot, tl.sum(tl.where(number < slot, aligned, 0) + tl.where(number == slot, counts, 0)))
    if slot < slots:
        expert = tl.load(ids_ptr + slot).to(tl.int32)
        if MAPPED:
            expert = tl.load(map_ptr + expert, mask=expert >= 0, other=-1).to(tl.int32)
        if expert < 0:
            tl.store(place_ptr + slot, -1)
        else:
            place = tl.load(rank_ptr + slot) + tl.sum(tl.where(number < expert, aligned, 0))
            tl.store(place_ptr + slot, place)
            token = (slot // TOP_K).to(tl.int64)
            place = place.to(tl.int64)
            word = tl.arange(0, WORDS_PADDED)
            row = tl.load(row_ptr + token * row_stride + word, mask=word < WORDS)
            tl.store(out_ptr + place * WORDS + word, row, mask=word < WORDS)
            group = tl.arange(0, GROUPS_PADDED)
            scale = tl.load(scale_ptr + token * scale_stride + group * scale_group_stride, mask=group < GROUPS)
            target = scale_out_ptr + place * scale_out_stride + group * scale_out_group_stride
            tl.store(target, scale, mask=group < GROUPS)


def _check(rows: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    if rows.element_size() != 1 or rows.shape[1] % 16 or rows.stride(1) != 1 or rows.stride(0) % 4:
        raise ValueError(f"expert rows: found {rows.dtype} {tuple(rows.shape)} with strides {rows.stride()}, expected "
                         "8-bit codes, contiguous along a hidden size in multiples of 16")
    if scales.dtype != torch.float32 or scales.ndim != 2 or len(scales) != len(rows) or len(ids) != len(rows):
        raise ValueError(f"expert rows: found scales {scales.dtype} {tuple(scales.shape)} and experts "
                         f"{tuple(ids.shape)} for {len(rows)} rows, expected fp32 scales and one list of experts a row")
    if not out.is_contiguous() or out.shape[1] != rows.shape[1]:
        raise ValueError(f"expert rows: found output {tuple(out.shape)} with strides {out.stride()}, expected "
                         f"contiguous rows of {rows.shape[1]}")


def permute(
    rows: torch.Tensor,  # [tokens, hidden] e4m3
    scales: torch.Tensor,  # [tokens, groups] fp32, any strides
    ids: torch.Tensor,  # [tokens, top_k] int: global expert of each slot, -1 where empty
    experts: int,  # on this GPU
    out: torch.Tensor,  # [places, hidden] e4m3, out
    *,
    alignment: int,
    expert_map: torch.Tensor | None = None,  # [global experts] int: local expert or -1
    column_major: bool = True,  # the layout of the scales
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills `out`; returns scales [places, groups], ends [experts] and places [tokens, top_k], -1 where empty."""
    _check(rows, scales, ids, out)
    ids = ids.contiguous()
    places, groups = len(out), scales.shape[1]
    if column_major:  # every column on a multiple of 16 bytes
        scales_out = torch.empty(groups, triton.cdiv(places, 4) * 4, dtype=torch.float32, device=rows.device).T[:places]
    else:  # DeepGEMM packs these itself, and reads the gaps as well
        scales_out = torch.zeros(places, groups, dtype=torch.float32, device=rows.device)
    place, rank, ends, counts = (torch.empty(shape, dtype=torch.int32, device=rows.device)
                                 for shape in (ids.shape, ids.shape, (experts,), (experts,)))
    mapped = ids if expert_map is None else expert_map
    _rank_kernel[(experts,)](
        ids, mapped, rank, counts, ids.numel(), MAPPED=expert_map is not None, SLOTS=SLOTS, num_warps=RANK_WARPS)
    words = rows.view(torch.int32)
    _copy_kernel[(max(ids.numel(), experts),)](
        ids, mapped, rank, counts, place, ends, words, out.view(torch.int32), scales, scales_out,
        ids.numel(), words.stride(0), *scales.stride(), *scales_out.stride(),
        TOP_K=ids.shape[1], EXPERTS=experts, EXPERTS_PADDED=triton.next_power_of_2(experts), ALIGNMENT=alignment,
        WORDS=words.shape[1], WORDS_PADDED=triton.next_power_of_2(words.shape[1]),
        GROUPS=groups, GROUPS_PADDED=triton.next_power_of_2(groups), MAPPED=expert_map is not None,
        num_warps=COPY_WARPS)
    return scales_out, ends, place


def places_reference(
    ids: torch.Tensor, experts: int, alignment: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: (place of each slot, end of each expert)."""
    local = ids.long()
    if expert_map is not None:
        local = torch.where(local >= 0, expert_map.long()[local.clamp(min=0)], -1)
    place, ends, start = torch.full(ids.shape, -1, dtype=torch.int32), [], 0
    for expert in range(experts):
        slots = (local.flatten() == expert).nonzero().flatten()
        place.view(-1)[slots] = torch.arange(start, start + len(slots), dtype=torch.int32)
        ends.append(start + len(slots))
        start = -(-ends[-1] // alignment) * alignment
    return place, torch.tensor(ends, dtype=torch.int32)
