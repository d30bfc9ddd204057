#!/usr/bin/env bash
# Generated from recipe.toml by `python3 -m launch write`; edit that, not this.
# kimi-k3.1: status planned: something it needs is not here: it refuses to start
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

export VLLM_USE_V2_MODEL_RUNNER=1
export VLLM_BATCH_INVARIANT=1

PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" python3 -m launch check --here kimi-k3.1
exec vllm serve moonshotai/Kimi-K3 \
  --dtype bfloat16 \
  --all2all-backend deepep_low_latency \
  --generation-config vllm \
  --data-parallel-size 4 \
  --enable-expert-parallel \
  "$@"
