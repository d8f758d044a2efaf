#!/usr/bin/env bash
# Tables 6 and 10 of the paper: WikiText-103, 128 M parameters, evaluated at the attention length of training and at the best one.
# SYSTEM, of table 6: recurrence (default), recurrence-shaw, recurrence-half; no-recurrence, no-recurrence-half,
#   no-recurrence-shaw, no-recurrence-shaw-half, no-recurrence-absolute-half, no-recurrence-learned-half.
# "half" trains on the second half of each segment of 128 tokens. Of table 10, longer segments that take the memory of
#   recurrence: same-memory, same-memory-half.
# The widths are ours; dropout, batch and updates are those of wiki103-base.sh.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

system=${SYSTEM:-recurrence}
segment=128 best=120 flags=()
case $system in
  recurrence) best=500 ;;
  recurrence-shaw) best=256 ;;
  recurrence-half) best=460 ;;
  no-recurrence) best=260 ;;
  no-recurrence-half | no-recurrence-shaw | no-recurrence-shaw-half) ;;
  no-recurrence-absolute-half | no-recurrence-learned-half) ;;
  same-memory) segment=176 best=400 flags=(--tokens-per-sample 176) ;;
  same-memory-half) segment=172 flags=(--tokens-per-sample 172) ;;
  *) fail "SYSTEM=$system: choose a system that this script names, such as recurrence or no-recurrence-half" ;;
esac
case $system in *-shaw*) flags+=(--position-encoding shaw) ;; esac
case $system in *-absolute*) flags+=(--position-encoding absolute) ;; esac
case $system in *-learned*) flags+=(--position-encoding learned) ;; esac
case $system in *-half) flags+=(--loss-positions half) ;; esac
case $system in recurrence*) ;; *) memory=(--mem-len 0 --streams) ;; esac
name=wiki103-ablation-$system
corpus wikitext-103 ptb
train "$name" transformer_xl_wiki103_ablation 60 200000 0 ${flags[@]+"${flags[@]}"} \
  ${small_bands[@]+"${small_bands[@]}"}
for length in "$segment" "$best"; do
  case $system in
    recurrence*) evaluate "$name" 64 "$length" ;;
    *) evaluate_windows "$name" "$length" 64 ;;
  esac
done
