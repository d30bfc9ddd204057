#!/usr/bin/env bash
# Compile what no index has for this torch: DeepEP, at the commit that vLLM's own sources name, and TransformerEngine's
# torch part. DeepGEMM and FlashMLA are not here: vLLM's build compiles its own forks of both into its wheel.
#
# vLLM's script would build DeepEP against an NVSHMEM of its own (docker/README.md), beside the one that torch brings and
# loads, under the same file name. Here DeepEP finds torch's: deep_ep/utils/find_pkgs.py takes the nvidia-nvshmem wheel.
# shellcheck source=SCRIPTDIR/lib.sh
source "$(dirname "$0")/lib.sh"

arch=$(pin arch)
mkdir -p "$WORK" "$WHEELS"
pin unpack vllm "$WORK/vllm"
commit=$(pin upstream "$WORK/vllm" | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["DeepEP"])')

say "DeepEP at $commit"
git clone --quiet https://github.com/deepseek-ai/DeepEP "$WORK/DeepEP"
git -C "$WORK/DeepEP" checkout --quiet --detach "$commit"
git -C "$WORK/DeepEP" submodule update --quiet --init --recursive
have=$(git -C "$WORK/DeepEP" rev-parse HEAD)
[[ $have == "$commit" ]] || refuse "DeepEP is at $have, not $commit" "clone it again"
stubs=$(find -H "${CUDA_HOME:-/usr/local/cuda}" -path '*/stubs/libcuda.so' -print -quit)
[[ -n $stubs ]] || refuse "no stub of libcuda.so to link DeepEP with" "take a CUDA development image"
LIBRARY_PATH=$(dirname "$stubs")${LIBRARY_PATH:+:$LIBRARY_PATH}
export LIBRARY_PATH
# Its kernels are written for the architecture-specific instructions: 9.0a, 10.0a.
TORCH_CUDA_ARCH_LIST=${arch// /a }a "$PYTHON" -m pip wheel \
  --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$WHEELS" "$WORK/DeepEP"

say "TransformerEngine's torch part"
pin locked --only transformer-engine-torch > "$WORK/te.txt"
NVTE_FRAMEWORK=pytorch TORCH_CUDA_ARCH_LIST=$arch "$PYTHON" -m pip wheel --disable-pip-version-check \
  --no-build-isolation --no-deps --require-hashes --wheel-dir "$WHEELS" -r "$WORK/te.txt"
