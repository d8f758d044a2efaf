#!/usr/bin/env bash
# WikiText-103, 18 layers, 285 M parameters (257 M by the paper).
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus wikitext-103 ptb
train wiki103-large transformer_xl_wiki103_large 128 4000000 16000 ${small_bands[@]+"${small_bands[@]}"}
evaluate wiki103-large 128 1600 1000
