#!/usr/bin/env bash
# text8, 24 layers, 277 M parameters.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus text8 text8
train text8-large transformer_xl_text8_large 64 400000 0
evaluate text8-large 128 3800 1000
