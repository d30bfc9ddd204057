"""`PrefillDecode`: the decode step of a DeepSeek-V4 / V4.1 sparse attention layer through the prefill kernel.

The row list and the dequantisation are `fp8_kv_gather.py`'s; this module is the part that knows the engine: sizes, the
workspace and the metadata of a step.

Graph-safe: the workspace is reserved while profiling and sized by model and scheduler limits only, a step reads nothing
back to the host, and the number of launches follows from the (captured) number of tokens. A step with more tokens than
the workspace holds runs in slices; queries are independent, so slices change no bit.
"""
import torch
from vllm.zero_mismatch.fp8_kv_gather import HEAD_DIM, TopK, Window, gather, list_width

# Upper bound of the BF16 workspace: 256 tokens of 2048 + 128 rows take 0.53 GiB.
WORKSPACE_BYTES = 1 << 30


class PrefillDecode:
    """Decode of one attention layer through the prefill kernel; built at start-up, when VLLM_BATCH_INVARIANT is set."""

    def __init__(self, layer, vllm_config, has_topk: bool) -> None:
        scheduler, spec = vllm_config.scheduler_config, vllm_config.speculative_config
        self.layer = layer
        self.has_topk = has_topk
        self.top_k = self._top_k(vllm_config.model_config.max_model_len) if has_topk else 0
        # The prefill widens its lists by the image span (flashmla.py, combined_topk); equal widths keep one kernel.
        self.width = list_width(self.top_k, layer.window_size + getattr(layer, "max_image_tokens", 0))
        per_request = 1 + (spec.num_speculative_tokens if spec else 0)
        wanted = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * per_request)
        row_bytes = self.width * HEAD_DIM * torch.bfloat16.itemsize
        self.slice_tokens = max(1, min(wanted, WORKSPACE_BYTES // row_bytes))

    def _top_k(self, max_model_len: int) -> int:
        if self.layer.compress_ratio != 128:
            return self.layer.topk_indices_buffer.shape[-1]
        return list_width(-(-max_model_len // 128), 0)  # every compressed row the context can hold

    def _workspace(self) -> list[torch.Tensor]:
        from vllm.v1.worker.workspace import current_workspace_manager

        shape = (self.slice_tokens, self.width)
        return current_workspace_manager().get_simultaneous(
            ((*shape, HEAD_DIM), torch.bfloat16), (shape, torch.int32), ((self.slice_tokens,), torch.int32)
        )

    def reserve(self) -> None:
        """Called while profiling; the manager is locked later, so serving and captured graphs find it large enough."""
        self._workspace()

    def _topk_part(self, part: slice, cache: torch.Tensor, metadata) -> TopK | None:
        if not self.has_topk:
            return None
        ratio = self.layer.compress_ratio
        local = None if ratio == 128 else self.layer.topk_indices_buffer[part]
        return TopK(cache, metadata.block_table, local, self.top_k, ratio)

    def run(
        self,
        q: torch.Tensor,  # [tokens, heads, 512] bf16
        positions: torch.Tensor,  # [tokens] int
        output: torch.Tensor,  # [tokens, heads, 512] bf16, out
        cache: torch.Tensor | None,  # compressed KV; None for a sliding-window layer
        metadata,  # the layer's own metadata; None for a sliding-window layer
        swa_metadata,
    ) -> None:
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

        layer = self.layer
        heads = getattr(layer, "_prefill_num_heads", q.shape[1])  # V4.1 drops padding heads in the prefill
        slots = swa_metadata.decode_swa_indices.flatten(1)
        if slots.shape[-1] != layer.window_size:
            raise ValueError(
                f"batch-invariant sparse decode takes a causal window of {layer.window_size}; found an index width of "
                f"{slots.shape[-1]} (DSpark drafts attend forward). Turn speculative decoding off."
            )
        rows, indices, lengths = self._workspace()
        for start in range(0, q.shape[0], self.slice_tokens):
            part = slice(start, min(start + self.slice_tokens, q.shape[0]))
            count = part.stop - part.start
            window = Window(layer.swa_cache_layer.kv_cache, slots[part], swa_metadata.decode_swa_lens[part])
            gather(
                rows[:count], indices[:count], lengths[:count], positions[part],
                swa_metadata.token_to_req_indices[part], window, self._topk_part(part, cache, metadata),
            )
            flash_mla_sparse_fwd(
                q=q[part, :heads], kv=rows.view(-1, 1, HEAD_DIM), indices=indices[:count].unsqueeze(1),
                sm_scale=layer.scale, attn_sink=layer.attn_sink[:heads], topk_length=lengths[:count],
                out=output[part, :heads],
            )
