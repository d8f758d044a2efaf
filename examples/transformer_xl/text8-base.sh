#!/usr/bin/env bash
# text8, 12 layers, 41 M parameters.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus text8 text8
train text8-base transformer_xl_text8_base 22 400000 0
evaluate text8-base 80 2100 820
