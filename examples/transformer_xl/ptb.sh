#!/usr/bin/env bash
# Penn Treebank, 24 M parameters: variational dropout, and from update 40,000 on the average of the weights.
# The paper does not give its settings; batch, updates and evaluation lengths are ours.
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus ptb ptb
train ptb transformer_xl_ptb 20 60000 0 --average-weights-from "$(full_or_small 40000 6)"
evaluate ptb 64 256 200
