"""Where vLLM's sparse indexer meets `topk`: the workspace, and the calls of prefill, decode and candidate blocks.

Invariant: both phases call the same `top_k` on the row's own scores, with positions inside the request, so the chosen
rows and their order do not depend on the phase. The workspace is sized by the model's longest row while vLLM profiles
its memory, before any graph is captured; afterwards nothing is allocated and its address does not change.
"""
import torch

from vllm.zero_mismatch import topk, topk_cuda

SLACK = 1024  # DeepGEMM may round the width of the scores up to its tile

class _Workspace:
    scratch: torch.Tensor | None = None


def _workspace() -> _Workspace:
    from vllm.v1.worker.workspace import current_workspace_manager

    return current_workspace_manager().get_persistent_resource("zero_mismatch.indexer_topk", _Workspace)


def _scratch() -> torch.Tensor:
    scratch = _workspace().scratch
    if scratch is None:
        raise ValueError("indexer Top-K: found no workspace, expected one from the profiling run; this model's indexer "
                         "does not call zero_mismatch.indexer_topk.reserve: run it without VLLM_BATCH_INVARIANT")
    return scratch


def reserve(width: int, k: int, device: torch.device) -> None:
    """Called by every indexer layer while profiling: room for rows of `width` scores, and the kernels compiled.

    Compiling loads a module, which a stream under capture refuses.
    """
    workspace = _workspace()
    if topk_cuda.supports(device):
        topk_cuda.prepare(device)
        workspace.scratch = torch.empty(0, 0, dtype=torch.int32, device=device)
        return
    shape = topk.scratch_shape(width + SLACK)
    if workspace.scratch is not None and workspace.scratch.shape[1] >= shape[1]:
        return
    workspace.scratch = torch.empty(shape, dtype=torch.int32, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.empty(1, k, dtype=torch.int32, device=device)
    for narrower in sorted({min(width, limit) for limit in topk.SAMPLE_LIMITS} | {width}):
        for columns in (topk.triton.cdiv(narrower, 16) * 16, narrower | 1):  # row strides with and without wide loads
            scores = torch.empty(1, columns, dtype=torch.float32, device=device)[:, :narrower]
            for split in (False, True):
                topk.top_k(scores, lengths, out, workspace.scratch, split=split)


def prefill_top_k(logits: torch.Tensor, starts: torch.Tensor | None, ends: torch.Tensor, out: torch.Tensor) -> None:
    """logits: [rows, width]. Row r's scores are columns starts[r]..ends[r], or 0..ends[r] if starts is None."""
    topk.top_k(logits, ends, out, _scratch(), starts=starts)


def decode_top_k(logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, out: torch.Tensor) -> None:
    """logits: [rows, max length]. seq_lens: one length a row, or one for the last of next_n draft rows."""
    if seq_lens.numel() == logits.shape[0]:
        next_n = 1
    topk.top_k(logits, seq_lens.reshape(-1), out, _scratch(), next_n=next_n, split=True)


def candidate_blocks(block_scores_kernel, logits: torch.Tensor, starts: torch.Tensor | None, ends: torch.Tensor,
                     block_size: int, out: torch.Tensor, row_repeat: int) -> None:
    """V4.1's first level: the blocks with the best scores, by upstream's own block scores (newest block first).

    logits: [rows, width]; out: [rows, blocks to keep] int32. starts and ends hold one bound for row_repeat rows.
    """
    rows, width = logits.shape
    if not rows:
        return
    blocks = topk.triton.cdiv(width, block_size)
    scores = logits.new_empty((rows, blocks))
    valid = torch.empty(rows, dtype=torch.int32, device=logits.device)
    block_scores_kernel[(rows, 32)](
        logits, starts, ends, scores, valid, *logits.stride(), starts.stride(0) if starts is not None else 0,
        ends.stride(0), scores.stride(0), width, blocks, block_size, starts is not None, row_repeat, TILE=128,
        FULL_WIDTH=False)
    topk.top_k(scores, valid, out, _scratch(), split=True)


def best_blocks(scores: torch.Tensor, starts: torch.Tensor | None, ends: torch.Tensor, width: int, block_size: int,
                out: torch.Tensor, row_repeat: int) -> None:
    """The same for scores that upstream has made already, of every block that fits in `width` (vLLM 0.32.0).

    scores: [rows, blocks]. A row's own blocks come first: those between its bounds, up to the width.
    """
    lengths = ends.clamp(max=width) if starts is None else ends.clamp(max=width) - starts
    valid = (lengths.clamp(min=0) + block_size - 1) // block_size
    valid = valid.to(torch.int32)[:, None].expand(-1, row_repeat).reshape(-1)
    topk.top_k(scores, valid, out, _scratch(), split=True)
