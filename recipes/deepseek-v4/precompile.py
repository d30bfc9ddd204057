"""The JIT kernels of DeepSeek-V4 that take longest to compile, as jobs for prove/precompile.py (tiny model's shapes).

DeepGEMM compiles a binary a (shape, tile), and the tile follows the number of tokens; TileLang compiles one a variant.
Nothing here is imported by the engine. Shapes are of tiny/config.json; read against vLLM 0.33.0.
"""
import functools
import os
import types

TOKENS = (1, 4, 8, 16, 32, 64, 65, 96, 128, 129, 192, 256, 257, 320, 512, 513, 640, 1024, 1500, 2048, 3000, 4096, 8192)
HIDDEN, STREAMS, EXPERTS = 4096, 4, 256
DENSE = {  # name: (N, K) of each block-FP8 linear layer
    "qkv_a": (1536, 4096), "q_b": (32768, 1024), "o_b": (4096, 8192), "indexer_q": (8192, 1024),
    "shared_up": (1024, 4096), "shared_down": (4096, 512)}
GROUPED = {"experts_up": (1024, 4096), "experts_down": (4096, 512)}
HEIGHTS = (16, 32, 64, 128)  # of the experts' tiles: zero_mismatch/experts_deepgemm.py


def _fp8(*shape):
    import torch

    return torch.zeros(shape, device="cuda", dtype=torch.float8_e4m3fn)


def _fp32(*shape):
    import torch

    return torch.ones(shape, device="cuda", dtype=torch.float32)


def _bf16(*shape):
    import torch

    return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)


def _dense(n, k):
    from vllm.utils.deep_gemm import fp8_gemm_nt

    weight = (_fp8(n, k), _fp32(n // 128, k // 128))
    for m in TOKENS:
        fp8_gemm_nt((_fp8(m, k), _fp32(m, k // 128)), weight, _bf16(m, n))


def _grouped(n, k, height):
    """The routed experts: a binary a tile height, whatever the number of tokens."""
    import torch
    from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous, mk_alignment_scope

    weight = (_fp8(EXPERTS, n, k), _fp32(EXPERTS, n // 128, k // 128))
    ends = torch.zeros(EXPERTS, device="cuda", dtype=torch.int32)
    with mk_alignment_scope(height):
        m_grouped_fp8_gemm_nt_contiguous(
            (_fp8(height, k), _fp32(height, k // 128)), weight, _bf16(height, n), ends, use_psum_layout=True,
            expected_m_for_psum_layout=height)


def _prenorm(k):
    from vllm.model_executor.kernels.mhc.tilelang_kernels import compute_num_split
    from vllm.utils.deep_gemm import tf32_hc_prenorm_gemm

    mixes = STREAMS * (STREAMS + 2)
    for tokens in TOKENS:
        splits = compute_num_split(64, k, -(-tokens // 64))
        tf32_hc_prenorm_gemm(_bf16(tokens, k), _fp32(mixes, k), _fp32(splits, tokens, mixes), _fp32(splits, tokens),
                             splits)


def _o_a():
    from vllm.utils.deep_gemm import fp8_einsum

    groups, rank, width = 8, 1024, 4096
    weight = (_fp8(groups, rank, width), _fp32(groups, rank // 128, width // 128))
    for m in TOKENS:
        fp8_einsum("bhr,hdr->bhd", (_fp8(m, groups, width), _fp32(m, groups, width // 128)), weight,
                   _bf16(m, groups, rank), recipe=(1, 128, 128))


def _mqa_logits():
    import torch
    from vllm.utils.deep_gemm import (
        fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
    )

    rows, keys, heads, dim, block = 64, 2048, 64, 128, 64
    start, end = (torch.full((rows,), v, device="cuda", dtype=torch.int32) for v in (0, keys))
    fp8_fp4_mqa_logits((_fp8(rows, heads, dim), None), (_fp8(keys, dim), _fp32(keys)), _fp32(rows, heads), start, end,
                       keys)
    lengths = torch.full((rows, 1), keys, device="cuda", dtype=torch.int32)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cache = torch.zeros((keys // block, block, 1, dim + 4), device="cuda", dtype=torch.uint8)
    table = torch.arange(keys // block, device="cuda", dtype=torch.int32).expand(rows, -1).contiguous()
    fp8_fp4_paged_mqa_logits((_fp8(rows, 1, heads, dim), None), cache, _fp32(rows, heads), lengths, table,
                             get_paged_mqa_logits_metadata(lengths, block, sms), keys)


def _mhc(kind, tokens):
    """The mHC variant that a step of so many tokens launches: it follows the split of the projection before it."""
    from vllm.model_executor.kernels.mhc import tilelang_kernels as kernels

    config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8192))
    shape = {"hidden_size": HIDDEN, "hc_mult": STREAMS}
    if kind in ("pre", "broadcast"):
        kernel = kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL
        keys = kernel.get_warmup_keys(
            config, **shape, use_norm_weight=True, include_pre_gemm_splits=True, include_broadcast_splits=True,
            rms_eps=1e-6, hc_pre_eps=1e-6, hc_sinkhorn_eps=1e-6, hc_post_mult_value=2.0, sinkhorn_repeat=20,
            norm_eps=(1e-6, 1e-6), broadcast_norm_eps=1e-6)
        width = HIDDEN * (STREAMS if kind == "pre" else 1)
        splits = kernels.compute_num_split(64, width, -(-tokens // 64))
        keys = [key for key in keys if key.is_broadcast == (kind == "broadcast") and key.n_splits == splits]
    else:
        kernel, arguments = {
            "post": (kernels._MHC_POST_TILELANG_KERNEL, {**shape}),
            "fused": (kernels._MHC_FUSED_TILELANG_KERNEL, {"vllm_config": config, **shape}),
            "head": (kernels._HC_HEAD_FUSED_TILELANG_KERNEL, {**shape, "rms_eps": 1e-6, "hc_eps": 1e-6})}[kind]
        keys = kernel.get_warmup_keys(**arguments)
    for key in dict.fromkeys(keys):
        kernel.compile(key)


# One token count for each split that 132 SMs give; batch invariant there is one split, so one count is enough.
SPLITS = (64, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 1024, 1152, 1408, 1664, 2112, 2816, 4224,
          8192)
INVARIANT = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
STEPS = SPLITS[-1:] if INVARIANT else SPLITS
JOBS = {
    **{f"mhc-{kind}-{tokens}": functools.partial(_mhc, kind, tokens) for tokens in reversed(STEPS)
       for kind in ("pre", "broadcast") if kind == "pre" or tokens == 64 or tokens > 512},
    **{f"mhc-{kind}": functools.partial(_mhc, kind, 0) for kind in ("post", "fused", "head")},
    **{f"grouped-{name}-{height}": functools.partial(_grouped, *shape, height) for name, shape in GROUPED.items()
       for height in HEIGHTS if INVARIANT},  # without batch invariance the experts are Triton's
    "prenorm": functools.partial(_prenorm, STREAMS * HIDDEN),
    "prenorm-broadcast": functools.partial(_prenorm, HIDDEN),
    **{f"dense-{name}": functools.partial(_dense, *shape) for name, shape in DENSE.items()},
    "o_a": _o_a,
    "mqa-logits": _mqa_logits,
}
