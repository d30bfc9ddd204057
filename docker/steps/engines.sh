#!/usr/bin/env bash
# Install both engines and what was compiled for them, patch both where they lie, and check that they are the locked
# trees. The patched files of a vLLM built from source are there already; apply then finds nothing to do.
# shellcheck source=SCRIPTDIR/lib.sh
source "$(dirname "$0")/lib.sh"

mkdir -p "$WORK"
say "vLLM $(pin vllm), megatron-core $(pin megatron) and $(find "$WHEELS" -name '*.whl' | wc -l) wheels"
"$PYTHON" -m pip install --disable-pip-version-check --no-input --no-index --no-deps "$WHEELS"/*.whl
pin locked --only megatron-core > "$WORK/megatron.txt"
locked_install "$WORK/megatron.txt"
"$PYTHON" "$ROOT/apply.py" apply --installed "$PYTHON"
"$PYTHON" "$ROOT/apply.py" verify --installed "$PYTHON"
