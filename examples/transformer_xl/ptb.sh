#!/usr/bin/env bash
# Penn Treebank, 24 M parameters: variational dropout, weight averaging from update 40,000.
# The paper does not give its settings; batch, updates and evaluation lengths are choices of this project.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus ptb ptb
train ptb transformer_xl_ptb 20 60000 0 --average-weights-from "$(full_or_small 40000 6)"
evaluate ptb 64 256 200
