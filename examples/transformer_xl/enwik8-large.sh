#!/usr/bin/env bash
# enwik8, 24 layers, 277 M parameters.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus enwik8 enwik8
train enwik8-large transformer_xl_enwik8_large 64 400000 4000
evaluate enwik8-large 128 3800 1000
