#!/usr/bin/env bash
# The last step: the image is what it says, or there is no image. Writes OUT/manifest.json and OUT/sbom.json.
# shellcheck source=SCRIPTDIR/lib.sh
source "$(dirname "$0")/lib.sh"

OUT=${OUT:-$ROOT/image}
mkdir -p "$OUT"
say "the trees, the imports, the architectures"
"$PYTHON" "$ROOT/apply.py" verify --installed "$PYTHON"
"$PYTHON" -m pip check --disable-pip-version-check
"$PYTHON" "$ROOT/docker/image_checks.py" "$@"
say "manifest and bill of materials"
"$PYTHON" "$ROOT/docker/image_manifest.py" write "$OUT"
