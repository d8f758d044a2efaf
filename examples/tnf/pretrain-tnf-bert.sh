#!/usr/bin/env bash
# BERT with centred notes of rare words; NOTE_FORM=literal gives the notes of the paper (Wu et al. 2021).
# NOTE_LAMBDA NOTE_GAMMA NOTE_HALF_WINDOW: settings of notes (default: 0.5 0.1 16, those of the paper).
# shellcheck source=examples/tnf/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pretrain tnf_bert masked_lm "${notes[@]}"
