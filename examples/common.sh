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

# whole VARIABLE DEFAULT: the value of VARIABLE, a positive whole number.
whole() {
  local value=${!1:-$2}
  [[ $value =~ ^[1-9][0-9]*$ ]] || fail "$1=$value: must be a whole number above 0"
  echo "$value"
}

# default_precision: fp16 on a GPU; on a CPU bf16 if it has bf16 instructions, else fp32.
default_precision() {
  if [[ -z ${SMALL:-} ]] && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo fp16
  elif grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo 2>/dev/null; then
    echo bf16
  else
    echo fp32
  fi
}

# choose_precision DEFAULT: sets $precision, the flags of PRECISION.
choose_precision() {
  case ${PRECISION:-$1} in
    fp16 | bf16) precision=("--${PRECISION:-$1}") ;;
    fp32) precision=() ;;
    *) fail "PRECISION=$PRECISION: choose fp32, bf16 or fp16" ;;
  esac
}
