#!/usr/bin/env bash
# Table 7 of the paper: One Billion Word, 20 layers, 0.3 B parameters, 400,000 updates.
# SYSTEM: relative (default), shaw (encodings of Shaw et al. 2018), no-recurrence. The inner width, which gives this number of
# parameters, is a choice of this project; the other settings are those of lm1b-base.sh.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

system=${SYSTEM:-relative}
flags=()
case $system in
  relative) ;;
  shaw) flags=(--position-encoding shaw) ;;
  no-recurrence) memory=(--mem-len 0 --streams) ;;
  *) fail "SYSTEM=$system: choose relative, shaw or no-recurrence" ;;
esac
name=lm1b-ablation-$system
corpus lm1b lm1b
train "$name" transformer_xl_lm1b_ablation 224 400000 20000 --shuffle-lines ${flags[@]+"${flags[@]}"} \
  ${small_bands[@]+"${small_bands[@]}"}
case $system in
  no-recurrence) evaluate_windows "$name" 64 32 ;;
  *) evaluate "$name" 32 128 ;;
esac
