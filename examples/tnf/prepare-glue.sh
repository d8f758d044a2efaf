#!/usr/bin/env bash
# GLUE's tasks as published: DIR/TASK/{train,dev,test}.tsv. Existing tasks are kept.
# Usage: prepare-glue.sh [DIR]        (default: examples/tnf/glue)
# TASKS: tasks to prepare (default: all but MRPC, which has no archive: put its train.tsv and dev.tsv in DIR/MRPC).
# GLUE_URL: alternative URL of the archives. DRY_RUN=1 prints the commands; SMALL=1 makes a small task offline.
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

folder=${1:-examples/tnf/glue}
url=${GLUE_URL:-https://dl.fbaipublicfiles.com/glue/data}
read -r -a tasks <<<"${TASKS:-$(full_or_small "CoLA SST-2 STS-B QQP MNLI QNLI RTE WNLI" MR)}"

# small FILE FIRST LAST: sentences that end in "true" (class 1) or "false" (class 0).
small() {
  run mkdir -p "$(dirname "$1")"
  echo "seq $2 $3 | awk … >$1"
  [[ -n ${DRY_RUN:-} ]] || {
    printf 'sentence\tlabel\n'
    seq "$2" "$3" | awk '{ printf "the value %d is %s\t%d\n", $1, $1 % 2 ? "true" : "false", $1 % 2 }'
  } >"$1"
}

for task in "${tasks[@]}"; do
  if [[ -f $folder/$task/train.tsv ]]; then
    echo "$folder/$task is there already"
    continue
  fi
  if [[ -n ${SMALL:-} ]]; then
    small "$folder/$task/dev.tsv" 1 8
    small "$folder/$task/train.tsv" 1 24
    continue
  fi
  case $task in
    QQP) archive=QQP-clean ;;
    QNLI) archive=QNLIv2 ;;
    CoLA | SST-2 | STS-B | MNLI | RTE | WNLI) archive=$task ;;
    *) fail "TASKS: $task cannot be downloaded; put its train.tsv and dev.tsv in $folder/$task" ;;
  esac
  run mkdir -p "$folder"
  run curl --fail --location --silent --connect-timeout 20 --output "$folder/$task.zip" "$url/$archive.zip" ||
    fail "$url/$archive.zip cannot be downloaded; check the network or set GLUE_URL"
  run python -m zipfile -e "$folder/$task.zip" "$folder"
  run rm -f "$folder/$task.zip"
done
