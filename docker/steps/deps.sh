#!/usr/bin/env bash
# Every package of docker/requirements.lock but the two engines and what has to be compiled against torch: a layer that
# no patch and no change of an engine's build makes anew.
# shellcheck source=SCRIPTDIR/lib.sh
source "$(dirname "$0")/lib.sh"

mkdir -p "$WORK"
pin locked --without vllm --without megatron-core --without transformer-engine-torch > "$WORK/deps.txt"
say "$(grep -c '==' "$WORK/deps.txt") packages, each by its hash"
locked_install "$WORK/deps.txt"

# One NVSHMEM and one NCCL: torch's. DeepEP is built against these very files (wheels.sh), and no other may come later.
for library in libnvshmem_host.so libnccl.so; do
  count=$(find "$VENV" -name "$library*" -type f | wc -l)
  [[ $count == 1 ]] || refuse "$count copies of $library in $VENV: the first one loaded would decide" \
    "find which package brought the other: find $VENV -name '$library*'"
done
