#!/usr/bin/env bash
# One Billion Word, 24 layers, 0.8 G parameters; sentences in another order each epoch.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus lm1b lm1b
train lm1b-large transformer_xl_lm1b_large 512 1200000 30000 --shuffle-lines ${small_bands[@]+"${small_bands[@]}"}
evaluate lm1b-large 32 128
