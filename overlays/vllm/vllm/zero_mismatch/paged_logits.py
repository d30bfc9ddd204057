"""Lengths for DeepGEMM's paged MQA logits that leave no row empty.

The indexer's decode logits come from `fp8_paged_mqa_logits`, whose CTAs walk a range of (row, KV split) tasks. The
scheduler steps over rows of length 0 (DeepGEMM scheduler/sm90_paged_mqa_logits.cuh, fetch_next_task), but the thread
that loads queries prefetches row + 1 whatever its length (impls/sm90_fp8_paged_mqa_logits.cuh, issue_tma_q(...,
q_idx + 1)), so the row after an empty one is multiplied with the empty row's query. A DeepSeek-V4 request has no
compressed row before its fourth token: the neighbour's choice of 512 rows is then wrong, and depends on the batch.

Invariant: with every length at least 1 the two threads walk the same rows, each task gets its own row's query, and a
row's logits depend on that row alone. A row of no entries computes one page that nobody reads: Top-K gets the true
length.
"""
import torch


def rows_with_work(context_lens: torch.Tensor) -> torch.Tensor:
    """context_lens: [rows] or [requests, next_n] int32. The same shape with every length at least 1; no host sync."""
    return context_lens.clamp(min=1)
