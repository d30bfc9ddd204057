"""Upstream's sparse_attn_indexer, run over given scores with stand-ins for what needs a GPU."""
import types

import torch
from upstream_source import define

INDEXER = "vllm/model_executor/layers/sparse_attn_indexer.py"
CANDIDATES = "vllm/model_executor/kernels/attention/dsa/candidate_blocks.py"
K = 8


class Called(Exception):
    """A stock kernel was reached."""


def stops(name):
    def call(*args, **kwargs):
        raise Called(name)

    return call


def envs(batch_invariant):
    return types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=1)


class IndexerMetadata(types.SimpleNamespace):
    pass


def run_indexer(source, manager, metadata, logits, out, batch_invariant, chunk_width=64):
    """Upstream's sparse_attn_indexer over given scores; metadata None is the profiling run."""
    scope = {
        "torch": torch, "envs": envs(batch_invariant), "RADIX_TOPK_WORKSPACE_SIZE": 16,
        "DeepseekV32IndexerMetadata": IndexerMetadata,
        "CUDAGraphMode": types.SimpleNamespace(FULL="full"),
        "PrefillRowShard": types.SimpleNamespace(from_metadata=lambda *_: None),
        "current_platform": types.SimpleNamespace(fp8_dtype=lambda: torch.uint8, is_xpu=lambda: False),
        "current_workspace_manager": lambda: manager,
        "get_forward_context": lambda: types.SimpleNamespace(
            attn_metadata={"cache": metadata} if metadata else None, cudagraph_runtime_mode="none"),
        "_resolve_layer_name": lambda name: name,
        "_gather_workspace_shapes": lambda *_: (((64, 128), torch.uint8), ((64, 4), torch.uint8)),
        "_reserve_row_shard_exchange_transient": lambda *_: None,
        "sparse_attn_indexer_fake": lambda *_, **__: None,
        "_merge_dcp_topk_global": lambda *_, **__: None,
        "mqa_logits_mx_inputs": lambda q, scale, weights: (scale, weights),
        "mqa_logits_use_mx_scales": lambda: False,
        "fp8_fp4_mqa_logits": lambda *_, **__: logits,
        "as_fp32_logits": lambda x, ends: x,
        "ops": types.SimpleNamespace(cp_gather_indexer_k_quant_cache=lambda *_: None,
                                     top_k_per_row_prefill=stops("top_k_per_row_prefill")),
    }
    define(source, ["sparse_attn_indexer"], scope)
    rows = logits.shape[0]
    return scope["sparse_attn_indexer"](
        torch.zeros(rows, 4), "cache", None, torch.zeros(rows, 1, 128), None, None, torch.zeros(rows, 1), 128, None, K,
        128, 64, chunk_width, out, True, False, False, "")
