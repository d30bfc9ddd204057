# shellcheck shell=bash
# Sourced by every step. The steps run in the image's build and, in the tests, in a plain folder: nothing is fixed but
# what the variables here say.
set -euo pipefail

ROOT=${ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}  # the checkout
VENV=${VENV:-/opt/venv}      # where both engines are installed
WHEELS=${WHEELS:-/wheels}    # what a build stage leaves for the next
WORK=${WORK:-/tmp/image-build}
PYTHON=$VENV/bin/python

say() { printf '== %s\n' "$*" >&2; }

# refuse WHAT REMEDY: the step ends, the build with it.
refuse() {
  printf 'refused: %s\nwhat to do: %s\n' "$1" "$2" >&2
  exit 1
}

# pin KEY: a version, from where it is decided. Any python3 will do.
pin() { python3 "$ROOT/docker/image_pins.py" "$@"; }

# locked_install FILE: the packages of a part of docker/requirements.lock, as wheels, each with its hash.
locked_install() {
  "$PYTHON" -m pip install --disable-pip-version-check --no-input --require-hashes --no-deps --only-binary :all: -r "$1"
}
