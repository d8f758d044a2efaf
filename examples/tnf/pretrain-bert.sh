#!/usr/bin/env bash
# BERT, the model without notes of pretrain-tnf-bert.sh: the same data, batches and settings.
# shellcheck source=examples/tnf/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pretrain bert masked_lm
