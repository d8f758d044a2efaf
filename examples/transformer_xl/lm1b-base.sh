#!/usr/bin/env bash
# One Billion Word, 18 layers, 0.36 G parameters; sentences in another order each epoch.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus lm1b lm1b
train lm1b-base transformer_xl_lm1b_base 224 500000 20000 --shuffle-lines ${small_bands[@]+"${small_bands[@]}"}
evaluate lm1b-base 32 128
