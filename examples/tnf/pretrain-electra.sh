#!/usr/bin/env bash
# ELECTRA, the model without notes of pretrain-tnf-electra.sh: the same data, batches and settings.
# shellcheck source=examples/tnf/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pretrain electra electra
