#!/usr/bin/env bash
# Text files of one paragraph per line, such as Wikipedia and books, to data for pre-training with notes: Moses tokens, BPE,
# dictionary, binary data, and the places of rare words.
# Usage: TRAIN=FILE[,FILE…] VALID=FILE[,FILE…] prepare-corpus.sh
#   OUT         folder of the data (default: data-bin/tnf)
#   BPE_MERGES  merges to learn (default: 32000)
#   NOTE_MIN_COUNT NOTE_MAX_COUNT  fewest and most occurrences of a rare word (default: 100 500, for billions of words;
#               choose them so that about 20 % of sentences have one: 4 20 for 13 million)
#   WORKERS     processes (default: all processors)
# DRY_RUN=1 prints the commands. SMALL=1 takes a small corpus of documentation instead of TRAIN and VALID.
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

out=${OUT:-data-bin/tnf}
train=${TRAIN:-} valid=${VALID:-}
if [[ -n ${SMALL:-} ]]; then
  run python -m fairseq_cli.corpus pydoc "$out/text" --max-words 20000
  train=$out/text/train.txt valid=$out/text/valid.txt
fi
[[ -n $train && -n $valid ]] || fail "TRAIN, VALID: name the text files for training and validation"
run python preprocess.py --only-source --trainpref "$train" --validpref "$valid" --destdir "$out" \
  --tokenizer moses --bpe subword_nmt --learn-bpe "$(whole BPE_MERGES "$(full_or_small 32000 300)")" \
  --workers "$(whole WORKERS "$(full_or_small "$(nproc)" 1)")" --notes \
  --note-min-count "$(whole NOTE_MIN_COUNT "$(full_or_small 100 3)")" \
  --note-max-count "$(whole NOTE_MAX_COUNT "$(full_or_small 500 30)")"
