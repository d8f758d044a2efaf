#!/usr/bin/env bash
# Shortformer without staged training: one stage at full length; segment-wise and token-wise evaluation.
# shellcheck source=examples/language_model/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train_shortformer shortformer-no-st "$(full_or_small 286000 12)" "$medium" --no-epoch-checkpoints

evaluate_shortformer shortformer-no-st
