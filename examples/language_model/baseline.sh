#!/usr/bin/env bash
# Baevski & Auli's model trained at full length; non-overlapping and sliding-window evaluation.
# shellcheck source=examples/language_model/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train baseline "$(full_or_small 286000 12)" "$long" 3 --no-epoch-checkpoints

evaluate_baseline baseline
