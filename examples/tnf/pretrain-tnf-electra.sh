#!/usr/bin/env bash
# ELECTRA with notes of rare words (Wu et al. 2021).
# NOTE_LAMBDA NOTE_GAMMA NOTE_HALF_WINDOW: settings of notes (default: 0.5 0.1 16, those of the paper).
# NOTE_FORM: centred (default), or literal, the paper's.
# shellcheck source=examples/tnf/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pretrain tnf_electra electra "${notes[@]}"
