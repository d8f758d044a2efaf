#!/usr/bin/env bash
# ELECTRA with notes of rare words (Wu et al. 2021).
# NOTE_LAMBDA NOTE_GAMMA NOTE_HALF_WINDOW: settings of notes (default: 0.5 0.1 16, those of the paper).
# NOTE_FORM: centred (default), or literal, the paper's. NOTE_READERS: generator (default) or both.
# shellcheck source=examples/tnf/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# A discriminator that reads notes learns that their words are original, and misses them after pre-training.
pretrain tnf_electra electra "${notes[@]}" --note-readers "${NOTE_READERS:-generator}"
