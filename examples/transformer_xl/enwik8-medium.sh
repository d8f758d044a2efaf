#!/usr/bin/env bash
# enwik8, 18 layers, 88 M parameters. The paper gives no more of its sizes; width and inner width are choices of this
# project, the other settings those of enwik8-large.sh.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus enwik8 enwik8
train enwik8-medium transformer_xl_enwik8_medium 64 400000 4000
evaluate enwik8-medium 128 3800 1000
