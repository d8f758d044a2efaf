#!/usr/bin/env bash
# Shortformer: position-infused attention with a cache, trained in two stages; segment-wise and token-wise evaluation.
# shellcheck source=examples/language_model/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

first=checkpoints128e100 second=shortformer

train_shortformer "$first" "$(full_or_small 140100 12)" "$short" --save-interval 100
begin "$second" "$first/$(full_or_small checkpoint100.pt checkpoint_last.pt)"
train_shortformer "$second" "$(full_or_small 286000 20)" "$medium" --no-epoch-checkpoints ${start[@]+"${start[@]}"}

evaluate_shortformer "$second"
