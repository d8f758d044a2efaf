# Shared by all recipes; sourced by the common.sh of each folder.
# shellcheck shell=bash disable=SC2034
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  printf '%s\n' "$*" >&2
  exit 2
}

# Commands are printed as installed commands, and run from this checkout.
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
export PYTHON
python() { "$PYTHON" "$@"; }
fairseq-eval-lm() { "$PYTHON" eval_lm.py "$@"; }

# run COMMAND…: print it, and run it unless DRY_RUN is set.
run() {
  local word line=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,+-]+$ ]] || printf -v word '%q' "$word"
    line+=" $word"
  done
  printf '%s\n' "${line# }"
  [[ -n ${DRY_RUN:-} ]] || "$@"
}

# full_or_small FULL SMALL: prints SMALL if SMALL=1, else FULL.
full_or_small() {
  if [[ -n ${SMALL:-} ]]; then echo "$2"; else echo "$1"; fi
}
