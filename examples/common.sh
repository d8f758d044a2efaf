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

# visible_gpus: how many of NVIDIA's GPUs a command may use; 0 with SMALL=1, which trains on the CPU.
visible_gpus() {
  local count=0 names
  if [[ -z ${SMALL:-} ]]; then
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
      IFS=, read -r -a names <<<"${CUDA_VISIBLE_DEVICES#-1}"
      ((${#names[@]} > count)) || count=${#names[@]}
    fi
  fi
  echo "$count"
}

# choose_gpus COUNT THINGS: sets $gpus, the processes that share the COUNT THINGS of an update: $GPUS, by default all GPUs,
# or as many of them as divide COUNT.
choose_gpus() {
  local number visible shares=()
  for ((number = 1; number <= $1; number++)); do
    (($1 % number)) || shares+=("$number")
  done
  if [[ -n ${GPUS:-} ]]; then
    gpus=$(whole GPUS 1)
    (($1 % gpus == 0)) || fail "GPUS=$gpus: the $1 $2 of an update cannot be divided by it; choose one of ${shares[*]}"
    return
  fi
  visible=$(visible_gpus)
  for number in "${shares[@]}"; do
    ((number > 1 && number > visible)) || gpus=$number
  done
  ((gpus >= visible)) || echo "$visible GPUs do not divide the $1 $2 of an update; $gpus of them train" >&2
}

# default_precision: fp16 on a GPU; on a CPU bf16 if it has bf16 instructions, else fp32.
default_precision() {
  if (($(visible_gpus))); then
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
