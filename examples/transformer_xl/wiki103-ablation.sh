#!/usr/bin/env bash
# In the manner of table 10 of the paper: systems that need about the same memory, WikiText-103, 128 M parameters.
# SYSTEM: recurrence (default), recurrence-half, no-recurrence, no-recurrence-half; "half" trains on the second half of
# each segment. Lengths and widths are ours; dropout, batch and updates are those of wiki103-base.sh.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

system=${SYSTEM:-recurrence}
flags=()
case $system in
  recurrence) ;;
  recurrence-half) flags=(--loss-positions half) ;;
  no-recurrence) flags=(--tokens-per-sample 176) memory=(--mem-len 0 --streams) ;;
  no-recurrence-half) flags=(--tokens-per-sample 172 --loss-positions half) memory=(--mem-len 0 --streams) ;;
  *) fail "SYSTEM=$system: choose recurrence, recurrence-half, no-recurrence or no-recurrence-half" ;;
esac
name=wiki103-ablation-$system
corpus wikitext-103 ptb
train "$name" transformer_xl_wiki103_ablation 60 200000 0 ${flags[@]+"${flags[@]}"} \
  ${small_bands[@]+"${small_bands[@]}"}
case $system in
  recurrence) evaluate "$name" 64 500 ;;
  recurrence-half) evaluate "$name" 64 460 ;;
  no-recurrence) evaluate_windows "$name" 400 64 ;;
  no-recurrence-half) evaluate_windows "$name" 120 64 ;;
esac
