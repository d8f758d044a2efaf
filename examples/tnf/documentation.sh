#!/usr/bin/env bash
# What notes are worth on text with many names and terms, the documentation of Python, NumPy, SciPy, SymPy and PyTorch as
# installed: small models without notes and with each form, whose notes end before the training does. The tables have the
# losses by distance to a rare word: with notes, with notes of other words, without, and with the rare words hidden.
#   MODEL    bert (default) or shortformer
#   OUT      folder of corpus and runs (default: documentation-$MODEL)
#   SEEDS    seeds (default: "1 2 3")
#   FORMS    none, centred, literal, or a form and λ, as literal:0.1 (default: "none centred literal")
#   UPDATES  updates of 2,048 tokens (default: 1000, Shortformer 750)
#   UNTIL    update from which on no notes are read or taken, below UPDATES (default: three fifths of UPDATES)
#   PRECISION, EXTRA, DRY_RUN=1, SMALL=1  as for the other scripts
# shellcheck source=examples/tnf/forms.sh
source "$(dirname "${BASH_SOURCE[0]}")/forms.sh"

choose_precision "$(default_precision)"
model=${MODEL:-bert}
out=${OUT:-documentation-$model}
data=$out/data
tokens=$(full_or_small 2048 256)
flags=(
  ${precision[@]+"${precision[@]}"} --optimizer adam --adam-betas "(0.9, 0.98)" --clip-norm 1.0 --weight-decay 0.01
  --lr-scheduler inverse_sqrt --warmup-updates "$(full_or_small 100 2)" --dropout 0 --attention-dropout 0
  --required-batch-size-multiple 1 --distributed-world-size 1
)
case $model in
  bert)
    updates=$(whole UPDATES "$(full_or_small 1000 5)")
    flags+=(
      --task tnf_masked_lm --criterion masked_lm --lr 0.001 --mask-prob 0.2 --mask-whole-words --init-std 0.088
      --tokens-per-sample 63 --max-positions 64 --max-tokens "$tokens" --max-tokens-valid 4096
    )
    plain=(--arch bert_tiny) noted=(--arch tnf_bert_tiny)
    ;;
  shortformer)
    updates=$(whole UPDATES "$(full_or_small 750 5)")
    flags+=(
      --task language_modeling --arch transformer_lm_wiki103 --criterion adaptive_loss --lr 0.002 --decoder-layers 2
      --decoder-attention-heads 2 --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128
      --decoder-ffn-embed-dim 512 --adaptive-input-cutoff "$(full_or_small 1000 100)"
      --adaptive-softmax-cutoff "$(full_or_small 1000 100)" --activation-dropout 0 --adaptive-softmax-dropout 0
      --tokens-from-prev 64 --tokens-per-sample 64 --batch-size $((tokens / 64))
    )
    plain=() noted=(--notes)
    ;;
  *) fail "MODEL=$model: choose bert or shortformer" ;;
esac
choose_until $((updates * 3 / 5))
interval=$((updates > 8 ? updates / 8 : 1))
flags+=(--validate-interval-updates "$interval" --save-interval-updates "$interval" --keep-interval-updates 1)

corpus=(--packages numpy,scipy,sympy,torch --rare-words)
[[ -z ${SMALL:-} ]] || corpus=(--max-words 20000 --rare-words)
run python -m fairseq_cli.corpus pydoc "$out/text" "${corpus[@]}"
run bash -c "cat '$out'/text/{valid,test}.txt >'$out'/text/valid"
run python preprocess.py --only-source --trainpref "$out/text/train.txt" --validpref "$out/text/valid" --destdir "$data" \
  --bpe subword_nmt --learn-bpe "$(full_or_small 3000 300)" --notes --note-min-count 4 --note-max-count 20
compare_forms
