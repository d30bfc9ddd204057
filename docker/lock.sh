#!/usr/bin/env bash
# Resolve docker/requirements.lock anew, after a change of patchset.toml. Needs uv and a package index.
set -euo pipefail
cd "$(dirname "$0")"
python3 image_pins.py requirements | uv pip compile --universal --python-version "$(python3 image_pins.py python)" \
  --generate-hashes --no-header --no-annotate --quiet - --output-file requirements.lock
