#!/usr/bin/env bash
# Trains a small Shortformer in two stages, evaluates it segment by segment and token by token, writes a sample and draws the
# loss: a few minutes on two cores. Started again, it goes on where it stopped. DRY_RUN=1 and SMALL=1 as for the other scripts.
# Usage: demo.sh [DIR]        (default: demo)
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out=${1:-demo}
data=$out/data-bin
cutoffs=$(full_or_small 1000,4000 100,300)
first=$(full_or_small 220 2) last=$(full_or_small 560 4) every=$(full_or_small 70u 1u)
words=() # all of the documentation
[[ -z ${SMALL:-} ]] || words=(--max-words 15000)

if [[ ! -e $data/dict.txt ]]; then
  run python -m fairseq_cli.corpus pydoc "$out/corpus" ${words[@]+"${words[@]}"}
  run python preprocess.py --trainpref "$out/corpus/train.txt" --validpref "$out/corpus/valid.txt" \
    --testpref "$out/corpus/test.txt" --destdir "$data"
fi
run python train.py "$data" --arch shortformer_demo --criterion adaptive_loss --cpu --seed 1 \
  --adaptive-input-cutoff "$cutoffs" --adaptive-softmax-cutoff "$cutoffs" --stages "32:$first,128:$last" --max-tokens 1024 \
  --optimizer adam --clip-norm 0.25 --lr-scheduler cosine --lr 1e-5 --max-lr 2e-3 --warmup-updates "$(full_or_small 55 1)" \
  --warmup-init-lr 1e-7 --max-update "$last" --sample-break-mode none --required-batch-size-multiple 1 --curriculum 1000 \
  --validate-every "$every" --save-every "$every,0ep" --keep 1u --save-dir "$out"
evaluation=("$data" --path "$out/checkpoint_last.pt" --sample-break-mode none --max-sentences 1 --cpu)
run fairseq-eval-lm "${evaluation[@]}"
run fairseq-eval-lm "${evaluation[@]}" --sliding-inf 1 --context-window 127 --max-tokens 128
run python interactive.py "$out" --cpu --sampling-topk 40 --temperature 0.8 <<<"This function returns"
run python -m fairseq_cli.analyze curves "$out"
