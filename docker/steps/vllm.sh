#!/usr/bin/env bash
# The vLLM wheel, one way or the other (VLLM_FROM):
#   wheel    the published wheel, by its hash; engines.sh patches it where it is installed
#   source   built from the pinned sdist with the patches in it, for the architectures of patchset.toml alone
# Both end in the same Python files (engines.sh verifies that); the compiled libraries are vLLM's own or ours.
# shellcheck source=SCRIPTDIR/lib.sh
source "$(dirname "$0")/lib.sh"

mkdir -p "$WORK" "$WHEELS"
case ${VLLM_FROM:-wheel} in
  wheel)
    say "vLLM $(pin vllm), the published wheel"
    pin locked --only vllm > "$WORK/vllm.txt"
    "$PYTHON" -m pip download --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
      --dest "$WHEELS" -r "$WORK/vllm.txt"
    ;;
  source)
    say "vLLM $(pin vllm), from the patched source"
    "$PYTHON" "$ROOT/apply.py" apply --upstream vllm
    "$PYTHON" "$ROOT/apply.py" verify --upstream vllm
    tree=$ROOT/build/vllm
    rust=$(pin upstream "$tree" | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["Rust"])')
    apt-get update && apt-get install -y --no-install-recommends rustup protobuf-compiler
    rustup toolchain install --profile minimal "$rust"
    "$PYTHON" -m pip install --disable-pip-version-check -r "$tree/requirements/build/cuda.txt"
    TORCH_CUDA_ARCH_LIST=$(pin arch) VLLM_TARGET_DEVICE=cuda MAX_JOBS=${MAX_JOBS:-8} NVCC_THREADS=${NVCC_THREADS:-4} \
      VLLM_REQUIRE_RUST_FRONTEND=1 "$PYTHON" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps \
      --wheel-dir "$WHEELS" "$tree"
    ;;
  *) refuse "VLLM_FROM=$VLLM_FROM" "say wheel or source" ;;
esac
