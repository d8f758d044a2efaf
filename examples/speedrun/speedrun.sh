#!/usr/bin/env bash
# A language model in the least time: the settings that reached a tuned baseline's perplexity first. docs/methods.md explains them.
#   DATA      folder of fairseq-preprocess (default: a corpus of Python's documentation, made here)
#   OUT       folder of the checkpoints (default: speedrun/model)
#   UPDATES   of training (default: 800); warm-up and decay are shares of them
#   BLOCK     tokens of a block (default: 64)
#   BATCH     tokens of an update (default: 1024)
#   RATE      of Adam (default: 4e-3)
#   ARCH      architecture (default: transformer_lm_fast_demo)
#   EXTRA, DRY_RUN=1, SMALL=1, PRECISION  as for the other scripts
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

read -r -a extra <<<"${EXTRA:-}"
choose_precision fp32
updates=$(whole UPDATES "$(full_or_small 800 20)")
block=$(whole BLOCK "$(full_or_small 64 16)")
batch=$(whole BATCH "$(full_or_small 1024 128)")
arch=${ARCH:-transformer_lm_fast_$(full_or_small demo tiny)}
out=${OUT:-speedrun/model}
data=${DATA:-speedrun/data-bin}

if [[ -z ${DATA:-} && ! -e $data/dict.txt ]]; then
  run python -m fairseq_cli.corpus pydoc speedrun/text
  run python preprocess.py --only-source --trainpref speedrun/text/train.txt \
    --validpref speedrun/text/valid.txt --testpref speedrun/text/test.txt --thresholdsrc 3 --destdir "$data"
fi
run python train.py "$data" --save-dir "$out" --arch "$arch" --tokens-per-sample "$block" --max-tokens "$batch" \
  --optimizer adam --lr "${RATE:-4e-3}" --adam-betas 0.9,0.99 --clip-norm 0.25 --dropout 0 --adaptive-softmax-dropout 0 \
  --lr-scheduler wsd --warmup-updates $((updates / 20)) --decay-updates $((updates * 7 / 10)) --decay-shape linear \
  --max-update "$updates" --distributed-world-size 1 --no-epoch-checkpoints ${precision[@]+"${precision[@]}"} ${extra[@]+"${extra[@]}"}
run fairseq-eval-lm "$data" --path "$out/checkpoint_best.pt" --gen-subset test
