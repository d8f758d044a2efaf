#!/usr/bin/env bash
# Whether notes carry information on words: a synthetic corpus in which only a rare word's other lines tell what stands beside it;
# small BERTs without notes and with each form, and what is left when the notes end before the training does.
# note_1 of the figures is the loss beside a rare word. The tables have it with notes, with notes of other words, and without.
#   OUT      folder of corpus and runs (default: entities)
#   SEEDS    seeds (default: "1 2 3")
#   SUBWORDS first, and last, subwords of names (default: 64)
#   TYPES    hidden types of names, 0: every name has properties of its own (default: 0)
#   UPDATES  updates of 256 lines (default: 700)
#   FORMS, UNTIL, EXTRA, DRY_RUN=1, SMALL=1  as of documentation.sh; UNTIL by default four sevenths of UPDATES
# shellcheck source=examples/tnf/forms.sh
source "$(dirname "${BASH_SOURCE[0]}")/forms.sh"

out=${OUT:-entities}
data=$out/data
updates=$(whole UPDATES "$(full_or_small 700 7)")
choose_until $((updates * 4 / 7))
subwords=$(whole SUBWORDS 64)
types=${TYPES:-0}
[[ $types =~ ^(0|[1-9][0-9]*)$ ]] || fail "TYPES=$types: must be a whole number"
flags=(
  --task tnf_masked_lm --criterion masked_lm --sample-break-mode eos --mask-prob 0.33 --mask-whole-words
  --leave-unmasked-prob 0 --random-token-prob 0 --encoder-layers 2 --encoder-embed-dim 64 --encoder-ffn-embed-dim 256
  --encoder-attention-heads 2 --max-positions 16 --init-std 0.125 --dropout 0 --attention-dropout 0 --cpu
  --optimizer adam --adam-betas "(0.9, 0.98)" --clip-norm 1.0 --lr 0.004 --lr-scheduler inverse_sqrt --warmup-updates 50
  --batch-size 256 --disable-validation
)
# The paper's window of 32 tokens and the word would be the whole line here, and the name itself half of it.
plain=(--arch bert_tiny) noted=(--arch tnf_bert_tiny --note-half-window 1 --note-context)

run python -m scripts.entity_corpus "$out/text" --entities "$(full_or_small 1500 200)" --types "$types" --subwords "$subwords"
run python preprocess.py --only-source --trainpref "$out/text/train" --validpref "$out/text/valid" --destdir "$data" \
  --notes --note-min-count 16 --note-max-count 16

compare_forms
