#!/usr/bin/env bash
# Whether notes carry information on words: a synthetic corpus in which only a rare word's other lines tell what stands beside it;
# small BERTs without notes and with each form, and what is left when the notes end before the training does.
# note_1 of the figures is the loss beside a rare word. The tables have it with notes, with notes of other words, and without.
#   OUT      folder of corpus and runs (default: entities)
#   SEEDS    seeds (default: "1 2 3")
#   FORMS    none, centred, literal, or a form and λ, as literal:0.1 (default: "none centred literal")
#   TYPES    hidden types of names, 0: every name has properties of its own (default: 0)
#   UPDATES  updates of 256 lines (default: 700)
#   UNTIL    update from which on no notes are read or taken, below UPDATES (default: four sevenths of UPDATES)
#   EXTRA, DRY_RUN=1, SMALL=1  as for the other scripts
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

read -r -a extra <<<"${EXTRA:-}"
out=${OUT:-entities}
updates=$(whole UPDATES "$(full_or_small 700 7)")
until=$(whole UNTIL $((updates * 4 / 7)))
((until < updates)) || fail "UNTIL=$until, UPDATES=$updates: notes must end before the training; lower UNTIL"
types=${TYPES:-0}
[[ $types =~ ^(0|[1-9][0-9]*)$ ]] || fail "TYPES=$types: must be a whole number"
read -r -a seeds <<<"${SEEDS:-$(full_or_small "1 2 3" 1)}"
read -r -a forms <<<"${FORMS:-none centred literal}"
flags=(
  --task tnf_masked_lm --criterion masked_lm --sample-break-mode eos --mask-prob 0.33 --mask-whole-words
  --leave-unmasked-prob 0 --random-token-prob 0 --encoder-layers 2 --encoder-embed-dim 64 --encoder-ffn-embed-dim 256
  --encoder-attention-heads 2 --max-positions 16 --init-std 0.125 --dropout 0 --attention-dropout 0 --cpu
  --optimizer adam --adam-betas "(0.9, 0.98)" --clip-norm 1.0 --lr 0.004 --lr-scheduler inverse_sqrt --warmup-updates 50
  --batch-size 256 --no-epoch-checkpoints --disable-validation
)

run python -m scripts.entity_corpus "$out/text" --entities "$(full_or_small 1500 200)" --types "$types"
run python preprocess.py --only-source --trainpref "$out/text/train" --validpref "$out/text/valid" --destdir "$out/data" \
  --notes --note-min-count 16 --note-max-count 16

for seed in "${seeds[@]}"; do
  for form in "${forms[@]}"; do
    folder=$out/$form-$seed
    train=(python train.py "$out/data" --seed "$seed" --save-dir "$folder" "${flags[@]}" ${extra[@]+"${extra[@]}"})
    losses=(python validate.py "$out/data" --path "$folder/checkpoint_last.pt" --valid-subset valid --cpu)
    if [[ $form == none ]]; then
      run "${train[@]}" --arch bert_tiny --max-update "$until"
      run "${losses[@]}" --rare-words
      run "${train[@]}" --arch bert_tiny --max-update "$updates"
    else
      notes=(--arch tnf_bert_tiny --note-form "${form%:*}")
      [[ $form != *:* ]] || notes+=(--note-lambda "${form#*:}")
      run "${train[@]}" "${notes[@]}" --max-update "$until"
      run "${losses[@]}" --keep-notes
      run "${train[@]}" "${notes[@]}" --note-until "$until" --max-update "$updates"
    fi
    run "${losses[@]}" --rare-words
  done
done
