#!/usr/bin/env bash
# WikiText-103, 16 layers, 151 M parameters.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus wikitext-103 ptb
train wiki103-base transformer_xl_wiki103_base 60 200000 0 ${small_bands[@]+"${small_bands[@]}"}
evaluate wiki103-base 64 640 400
