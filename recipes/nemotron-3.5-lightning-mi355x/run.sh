#!/usr/bin/env bash
# Generated from recipe.toml by `python3 -m launch write`; edit that, not this.
# nemotron-3.5-lightning-mi355x: status planned: something it needs is not here: it refuses to start
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

export VLLM_USE_V2_MODEL_RUNNER=1
export VLLM_USE_FLASHINFER_SAMPLER=0
export VLLM_USE_BREAKABLE_CUDAGRAPH=1
export VLLM_BATCH_INVARIANT=1

PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" python3 -m launch check --here nemotron-3.5-lightning-mi355x
exec vllm serve nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4 \
  --dtype bfloat16 \
  --kv-cache-dtype fp8 \
  --generation-config vllm \
  --enable-prefix-caching \
  --mamba-ssm-cache-dtype float32 \
  --max-num-seqs 256 \
  --max-num-batched-tokens 8192 \
  --cudagraph-capture-sizes 1 4 16 32 64 128 256 \
  --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE"}' \
  --kernel-config '{"enable_jit_warmup":false,"enable_cutedsl_warmup":false}' \
  --no-enable-flashinfer-autotune \
  --attention-backend TRITON_ATTN \
  --linear-backend cutlass \
  --moe-backend humming \
  "$@"
