#!/usr/bin/env bash
# Build the image, then label it with its own manifest.
#
#   docker/build.sh [TAG] [DOCKER OPTION...]      e.g. docker/build.sh zero-mismatch --build-arg VLLM_FROM=source
#
# A plain `docker build .` makes the same image without the labels that come from the manifest.
set -euo pipefail
cd "$(dirname "$0")/.."

tag=${1:-zero-mismatch}
shift || true
revision=$(git rev-parse HEAD)
[[ -z $(git status --porcelain) ]] || revision+=+  # edited: the image is of no commit
docker build --build-arg "REVISION=$revision" --tag "$tag" "$@" .
manifest=$(mktemp)
trap 'rm -f "$manifest"' EXIT
docker run --rm "$tag" manifest > "$manifest"
labels=()
while IFS= read -r line; do labels+=(--label "$line"); done < <(python3 docker/image_manifest.py labels "$manifest")
printf 'FROM %s\n' "$tag" | docker build --tag "$tag" "${labels[@]}" -
docker image inspect --format '{{json .Config.Labels}}' "$tag"
