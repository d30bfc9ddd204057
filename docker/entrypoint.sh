#!/usr/bin/env bash
# What a container of the image does:
#   serve RECIPE [FLAG...]            an engine with the recipe's flags and environment; FLAGs go to vllm serve
#   prove VERB ARGUMENT...            a proof (prove/README.md); records go to /evidence: mount a folder there
#   train RECIPE COMMAND...           COMMAND in the recipe's environment, after its start-up check
#   shell [COMMAND...]                a shell, or a command in one
#   manifest                          what is in the image
set -euo pipefail

ROOT=${ROOT:-/opt/zero-mismatch}
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
usage() { sed -n '2,/^set/{s/^#\( \|$\)//p}' "$0" >&2; }

command=${1:-}
shift || true
case $command in
  serve | train)
    [[ $# -gt 0 ]] || { usage; exit 2; }
    exec python3 -m launch "$command" "$@"
    ;;
  prove)
    own=()  # behind the verb, before the user's arguments, which win
    [[ ! -d ${EVIDENCE:-/evidence} ]] || own+=(--out "${EVIDENCE:-/evidence}")
    [[ -z ${REVISION:-} ]] || own+=(--commit "$REVISION")  # there is no history here to read it from
    [[ $# -eq 0 ]] || set -- "$1" "${own[@]}" "${@:2}"
    exec python3 -m prove "$@"
    ;;
  shell)
    [[ $# -gt 0 ]] || set -- -l
    exec bash "$@"
    ;;
  manifest) exec cat "$ROOT/image/manifest.json" ;;
  '' | help | -h | --help) usage; exit $((${#command} == 0 ? 2 : 0)) ;;
  *)
    printf 'no such command: %s\n' "$command" >&2
    usage
    exit 2
    ;;
esac
