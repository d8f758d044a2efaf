#!/usr/bin/env bash
# All of babylm.sh on the first million words of a text, with three models of two layers: three to six minutes on two cores.
# Usage: million.sh TRAIN VALID TABLE [OUT]   Paths begin at the root of the repository.
#   TRAIN, VALID  files of raw text, also .gz and .xz; the first million and 20,000 words are read
#   TABLE         folder with train.tsv and dev.tsv, columns sentence and label; 2,000 and 500 sentences are read
#   OUT           folder for all that is written (default: babylm-million)
#   TOTAL         words, if not a million; other variables as for babylm.sh
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

(($# == 3 || $# == 4)) || fail "usage: examples/babylm/million.sh TRAIN VALID TABLE [OUT]"
out=${4:-babylm-million} total=$(whole TOTAL 1000000)
for file in "$1" "$2" "$3/train.tsv" "$3/dev.tsv"; do
  [[ -f $file ]] || fail "$file: file not found; give TRAIN, VALID and TABLE"
done

first() { # first WORDS FILE: whole lines
  case $2 in *.xz) xz -dc "$2" ;; *.gz) gzip -dc "$2" ;; *) cat "$2" ;; esac 2>/dev/null |
    awk -v left="$1" '{ print; left -= NF; if (left <= 0) exit }' || true # whatever reads on is ended by a signal
}

mkdir -p "$out/texts" "$out/table"
first "$total" "$1" >"$out/texts/train.txt"
first $((total / 50)) "$2" >"$out/texts/valid.txt"
head -n $((total / 500 + 1)) "$3/train.tsv" >"$out/table/train.tsv"
head -n $((total / 2000 + 1)) "$3/dev.tsv" >"$out/table/dev.tsv"
export TRAIN=$out/texts/train.txt VALID=$out/texts/valid.txt TABLE=$out/table OUT=$out
export EPOCHS=${EPOCHS:-1} LAYERS=${LAYERS:-2} WIDTH=${WIDTH:-128} WORDS=${WORDS:-$((total / 2))}
exec bash examples/babylm/babylm.sh
