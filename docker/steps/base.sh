#!/usr/bin/env bash
# Python, the virtual environment, and what the JIT compilers need, on an Ubuntu CUDA development image. Needs root.
# shellcheck source=SCRIPTDIR/lib.sh
source "$(dirname "$0")/lib.sh"

BASE=${BASE:?the base image, as the Dockerfile names it}
[[ $BASE =~ @sha256:[0-9a-f]{64}$ ]] || refuse "the base image is $BASE, a name without a digest: it means another image from day to day" \
  "name it with its digest: docker buildx imagetools inspect NAME prints it"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[[ -x $nvcc ]] || refuse "$BASE has no nvcc: DeepGEMM, TileLang and FlashInfer compile kernels when they run" \
  "take a CUDA development image (…-devel-…)"
"$nvcc" --version | grep -q 'release 13\.' || refuse "$BASE is not CUDA 13, which the pinned vLLM is built for" \
  "take a CUDA 13 development image"

version=$(sed -n 's/^python = "\([0-9.]*\)".*/\1/p' "$ROOT/patchset.toml")  # there is no python3 yet to read it with
say "Python $version, git and the JIT's compilers"
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends "python$version" "python$version-dev" "python$version-venv" \
  build-essential ca-certificates git libibverbs1 libnuma1 ninja-build numactl
rm -rf /var/lib/apt/lists/*
"python$version" -m venv "$VENV"
