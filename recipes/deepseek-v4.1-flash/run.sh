#!/usr/bin/env bash
# Generated from recipe.toml by `python3 -m launch write`; edit that, not this.
# deepseek-v4.1-flash: status planned: something it needs is not here: it refuses to start
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

export VLLM_USE_V2_MODEL_RUNNER=1
export VLLM_USE_FLASHINFER_SAMPLER=0
export VLLM_DEEP_GEMM_WARMUP=skip
export VLLM_BATCH_INVARIANT=1

PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" python3 -m launch check --here deepseek-v4.1-flash
exec vllm serve deepseek-ai/DeepSeek-V4.1-Flash \
  --dtype bfloat16 \
  --kv-cache-dtype fp8 \
  --linear-backend deep_gemm \
  --generation-config vllm \
  --enable-prefix-caching \
  --max-num-seqs 256 \
  --max-num-batched-tokens 8192 \
  --cudagraph-capture-sizes 1 4 16 32 64 128 256 \
  --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE"}' \
  --kernel-config '{"enable_jit_warmup":false,"enable_cutedsl_warmup":false}' \
  --no-enable-flashinfer-autotune \
  --all2all-backend deepep_low_latency \
  --data-parallel-size 4 \
  --enable-expert-parallel \
  "$@"
