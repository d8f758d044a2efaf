#!/usr/bin/env bash
# enwik8, 12 layers, 41 M parameters.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus enwik8 enwik8
train enwik8-base transformer_xl_enwik8_base 22 400000 0
evaluate enwik8-base 80 2100 820
