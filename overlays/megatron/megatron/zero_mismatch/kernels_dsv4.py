"""DeepSeek-V4's table: which function computes each operator's values. `kernels` has what it shares with Nemotron-H.

`from_vllm` calls what the rollout engine calls under VLLM_BATCH_INVARIANT and refuses to run without it. `reference` is
for CPU tests: the deployment's quantisers and the places of rounding, not the bits. `exact` leaves out quantisers and
roundings, in any dtype: what the backwards differentiate.
"""
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from . import (
    attention_inputs,
    attention_sparse,
    compressor,
    grouped_fp8,
    indexer,
    kernels,
    linear_fp8,
    mhc_kernels,
    o_proj_fp8,
    router_dsv4,
    swiglu,
)


@dataclass(frozen=True)
class Kernels:
    shared: kernels.Kernels  # embedding's head, fp32 products, the last norm, the logprob
    linear: linear_fp8.Fp8Kernels
    experts: grouped_fp8.ExpertKernels
    mhc: mhc_kernels.MhcKernels
    inputs: attention_inputs.InputKernels
    attend: object
    compress: object
    indexer: indexer.IndexerKernels
    o_proj: o_proj_fp8.OProjKernels
    swiglu: object
    router: router_dsv4.RouterKernels


def from_vllm() -> Kernels:
    return Kernels(
        shared=kernels.from_vllm(page=0),  # its paged attention is not DeepSeek-V4's
        linear=linear_fp8.VLLM, experts=grouped_fp8.VLLM, mhc=mhc_kernels.VLLM, inputs=attention_inputs.VLLM,
        attend=attention_sparse.vllm, compress=compressor.vllm, indexer=indexer.vllm_kernels(linear_fp8.VLLM),
        o_proj=o_proj_fp8.VLLM, swiglu=swiglu.vllm, router=router_dsv4.VLLM,
    )


def _plain(linear, experts, o_proj) -> Kernels:
    return Kernels(
        shared=kernels.reference(), linear=linear, experts=experts, mhc=mhc_kernels.REFERENCE,
        inputs=attention_inputs.REFERENCE, attend=attention_sparse.reference, compress=compressor.reference,
        indexer=indexer.reference_kernels(linear), o_proj=o_proj, swiglu=swiglu.reference, router=router_dsv4.REFERENCE,
    )


def reference() -> Kernels:
    return _plain(linear_fp8.REFERENCE, grouped_fp8.REFERENCE, o_proj_fp8.REFERENCE)


def exact() -> Kernels:
    return _plain(linear_fp8.EXACT, grouped_fp8.EXACT, o_proj_fp8.EXACT)


def rotary_tables(config: dict) -> dict[int, torch.Tensor]:
    """Cosines and sines by compression ratio (0, 4, 128): [positions, rotated] fp32, as the engine's layers hold."""
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v4.common.rope import build_deepseek_v4_rope

    tables = {}
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))):
        for ratio in (0, 4, 128):
            rope = build_deepseek_v4_rope(
                SimpleNamespace(**config), head_dim=config["head_dim"], rope_head_dim=config["qk_rope_head_dim"],
                max_position_embeddings=config["max_position_embeddings"], compress_ratio=max(1, ratio),
            )
            tables[ratio] = rope.cos_sin_cache.float().cuda()
    return tables
