#!/usr/bin/env bash
# Baevski & Auli's model, trained in two stages; non-overlapping and sliding-window evaluation.
# shellcheck source=examples/language_model/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

first=checkpoints-st-128e50 second=st

train "$first" "$(full_or_small 70050 12)" "$short" 1 --required-batch-size-multiple 1 --save-interval 50
begin "$second" "$first/$(full_or_small checkpoint50.pt checkpoint_last.pt)"
train "$second" "$(full_or_small 286000 20)" "$long" 3 --no-epoch-checkpoints ${start[@]+"${start[@]}"}

evaluate_baseline "$second"
