"""K rows on their way through the FP8 cache: what a query reads is not what was computed, but what was stored.

A row of 512 is stored as 448 e4m3 values with one power-of-two scale per 64, and 64 turned values in BF16 (584 bytes a
token). The trainer keeps no cache between calls, but every row makes the same trip: vLLM's own kernel writes it into a
private cache, vLLM's own dequantisation reads it back (first article, section 4.2). Reading back is exact, a code times
a power of two being a BF16 number, so the trip rounds where the engine rounds and nowhere else.

Rows lie one after another: the private cache is one request whose pages follow each other, so a row's slot is its
index in the tensor read back. `round_trip` is the same in plain PyTorch.
Upstream: csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu:370-410, common/ops/cache_utils.py:499.
"""
import torch

from . import quant_fp8
from .packing import wide

GROUP = 64  # columns that share a scale
ROW_BYTES = 584
# Rows of a page: the engine's own pages (256 tokens of compressed rows, 64 of the window), so that the kernels that
# are compiled for a page size and stride are the engine's binaries. Where a row lies does not change it.
WINDOW_PAGE = 64
PAGE_TOKENS = 256
ALIGNMENT = 576  # bytes; a page starts at a multiple of it
FLOOR = 1e-4  # of a group's largest magnitude


def round_trip(row: torch.Tensor, turned: int) -> torch.Tensor:
    """row: [..., D] in the wide type, its last `turned` columns rotated already -> [..., D] bf16 as read back.

    The columns without rotation are rounded to BF16 before they are quantised, as both of the engine's writers do.
    """
    head, tail = row.to(torch.bfloat16).split([row.shape[-1] - turned, turned], -1)
    stored = quant_fp8.quantise_rows(head, min(GROUP, head.shape[-1]), FLOOR)
    return torch.cat([quant_fp8.dequantise_rows(*stored).to(torch.bfloat16), tail], -1)


def private_cache(rows: int, device: torch.device, ratio: int = 0, row_bytes: int = ROW_BYTES) -> torch.Tensor:
    """Room for `rows` rows: [pages, page, row_bytes] uint8, zeros (a row that nobody wrote reads as zeros).

    ratio 0: the window's rows; 4 or 128: compressed ones.
    """
    page = PAGE_TOKENS // ratio if ratio else WINDOW_PAGE
    pages, stride = max(1, -(-rows // page)), -(-page * row_bytes // ALIGNMENT) * ALIGNMENT
    flat = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
    return flat.as_strided((pages, page, row_bytes), (stride, row_bytes, 1))


def read_back(cache: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """The first `rows` rows of a private cache by vLLM's dequantisation: [rows, dim] bf16."""
    from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache

    pages, page, _ = cache.shape
    out = torch.empty(1, pages * page, dim, dtype=torch.bfloat16, device=cache.device)
    length = torch.full((1,), pages * page, dtype=torch.int32, device=cache.device)
    table = torch.arange(pages, dtype=torch.int32, device=cache.device)[None]
    dequantize_and_gather_k_cache(
        out, cache, seq_lens=length, gather_lens=None, block_table=table, block_size=page, offset=0
    )
    return out[0, :rows]


def through_cache(row: torch.Tensor, turned: int) -> torch.Tensor:
    """`round_trip` where the engine computes in BF16; unchanged in fp64, where gradients are checked."""
    return row if row.dtype == torch.float64 else round_trip(wide(row), turned)
