#!/usr/bin/env bash
# From raw texts to a table of minimal pairs within a budget of time; README.md explains it.
# Usage: TRAIN=DIR BUDGET=3h PAIRS=DIR tenmillion.sh   Run it again to resume: the budget counts all its runs.
#   TRAIN         folder of raw texts, or one file (with SMALL=1 by default a text from installed packages)
#   VALID, TEST   one file each, or neither (default: the last 2 % of the documents of TRAIN each)
#   PAIRS         folder of minimal pairs in BLiMP's format
#   KNOWN_WORDS   a text or list of words: a second accuracy, of the pairs whose words are all in it
#   OUT           folder of data, checkpoints, exports and tables (default: tenmillion)
#   BUDGET        time of training: 90m, 3h (default: 3h); or UPDATES, a number of updates
#   WORDS         words between checkpoints (default: 1M:10,10M)
#   BPE BATCH LENGTH STAGES SEED   subwords, rows a batch, tokens a row, stages, seed
#   ARCH          architecture with its own recipe (default: a modern decoder of 4 layers of width 256, with Muon)
#   PRECISION (fp32, bf16, fp16), EXTRA: further flags of fairseq-train, DRY_RUN=1, SMALL=1 as for the other recipes
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

out=${OUT:-tenmillion}
pairs=${PAIRS:-examples/babylm/pairs.jsonl}
known=(${KNOWN_WORDS:+--known-words "$KNOWN_WORDS"})
read -r -a extra <<<"${EXTRA:-}"
choose_precision "$(default_precision)"
bpe=$(whole BPE "$(full_or_small 8000 600)")
arch=${ARCH:-$(full_or_small transformer_lm_fast_demo transformer_lm_fast_tiny)}
batch=$(whole BATCH "$(full_or_small 32 8)") length=$(whole LENGTH "$(full_or_small 64 16)")
words=${WORDS:-$(full_or_small 1M:10,10M 2K)}
budget=${BUDGET:-$(full_or_small 3h 5s)}
[[ -z ${VALID:-} || -n ${TEST:-} ]] || fail "VALID=$VALID: without TEST there is no text to evaluate on; give TEST, too"
[[ -e $pairs ]] || fail "PAIRS=$pairs: file or folder not found; give JSON lines in BLiMP's format"
[[ -z ${KNOWN_WORDS:-} || -f $KNOWN_WORDS ]] || fail "KNOWN_WORDS=$KNOWN_WORDS: file not found; give a text or a list of words"
[[ $budget =~ ^([1-9][0-9]*)([smh])$ ]] || fail "BUDGET=$budget: must be a number of hours, minutes or seconds, such as 3h"
case ${BASH_REMATCH[2]} in h) seconds=$((BASH_REMATCH[1] * 3600)) ;; m) seconds=$((BASH_REMATCH[1] * 60)) ;; *) seconds=${BASH_REMATCH[1]} ;; esac

# 1. Byte-level subwords, learned on the training texts alone.
data=$out/data-bin
if [[ ! -e $data/dict.txt ]]; then
  train=${TRAIN:-}
  if [[ -n ${SMALL:-} && -z $train ]]; then
    train=$out/text/train.txt
    run python -m fairseq_cli.corpus pydoc "$out/text" --max-words 20000 --rare-words
  else
    [[ -n $train && -e $train ]] || fail "TRAIN=$train: file or folder not found; give raw texts"
  fi
  splits=(--valid-fraction 0.02 --test-fraction 0.02)
  [[ -z ${VALID:-} ]] || splits=(--validpref "$VALID" ${TEST:+--testpref "$TEST"})
  run python preprocess.py --trainpref "$train" "${splits[@]}" --bpe hf --learn-bpe "$bpe" --destdir "$data"
fi

model=(--arch "$arch" --tokens-per-sample "$length" --batch-size "$batch" --distributed-world-size 1 --seed "${SEED:-1}")
if [[ -z ${ARCH:-} ]]; then # the best of settings.yaml at ten minutes of one core
  model+=(--optimizer muon --lr 0.004 --clip-norm 1.0 --dropout 0)
  model+=(--lr-scheduler wsd --warmup-ratio 0.05 --decay-ratio 0.7 --decay-shape linear)
  model+=(--rotary-fraction 1.0 --no-token-positional-embeddings --qk-norm --decoder-norm rms --decoder-biases none)
  model+=(--decoder-gated-ffn --activation-fn silu --decoder-ffn-embed-dim "$(full_or_small 704 176)")
  # Three hours read ten million words five times: notes of pairs would overfit.
  model+=(--ngram-notes "$(full_or_small 256000 2000)" --ngram-notes-dropout 0.5)
fi
model+=(${precision[@]+"${precision[@]}"} ${extra[@]+"${extra[@]}"})

# 2. Updates that fit the budget, by the speed of a few; the plan is kept, so that a resumed run has the same schedule.
plan=$out/updates
if [[ -n ${UPDATES:-} ]]; then
  updates=$(whole UPDATES 1)
elif [[ -e $plan ]]; then
  updates=$(<"$plan")
elif [[ -n ${DRY_RUN:-} ]]; then
  updates=1000
else
  run python train.py "$data" "${model[@]}" --max-update 40 --no-save --disable-validation --log-interval 10 \
    --metrics-file "$out/speed.jsonl" --save-dir "$out/speed"
  updates=$(python examples/tenmillion/tables.py updates "$out/speed.jsonl" --seconds "$seconds")
  echo "$updates" >"$plan"
fi

# 3. Training, with checkpoints by words. Stages, where there are any, are shares of the updates: LENGTH:SHARE,LENGTH.
if [[ -n ${STAGES:-} ]]; then
  [[ $STAGES =~ ^([1-9][0-9]*):0?\.([0-9]+),([1-9][0-9]*)$ ]] || fail "STAGES=$STAGES: must be LENGTH:SHARE,LENGTH such as 64:0.8,256"
  first=$((10#${BASH_REMATCH[2]} * updates / 10 ** ${#BASH_REMATCH[2]}))
  model+=(--stages "${BASH_REMATCH[1]}:$first,${BASH_REMATCH[3]}:$updates" --max-tokens $((batch * length)))
fi
run python train.py "$data" "${model[@]}" --max-update "$updates" --save-interval-words "$words" --no-epoch-checkpoints \
  --metrics-file "$out/model/metrics.jsonl" --save-dir "$out/model"

# 4. Every checkpoint: minimal pairs and bits per byte of the test split.
test=${TEST:-}
checkpoints=("$out/model/checkpoint_best.pt")
[[ -n ${DRY_RUN:-} ]] || checkpoints=("$out"/model/checkpoint_words_*.pt "$out/model/checkpoint_best.pt")
for checkpoint in "${checkpoints[@]}"; do
  [[ -n ${DRY_RUN:-} || -e $checkpoint ]] || continue
  name=$(basename "$checkpoint" .pt)
  results=$out/results/$name
  if [[ ! -e $results/pairs/results.json ]]; then
    run python -m fairseq_cli.harness "$checkpoint" --pairs "$pairs" ${known[@]+"${known[@]}"} --batch-size 32 \
      --results-path "$results/pairs"
  fi
  if [[ ! -e $results/text/results.json ]]; then
    score=("$data" --path "$checkpoint")
    [[ -z $test ]] || score=("$checkpoint" --text "$test")
    run python eval_lm.py "${score[@]}" --results-path "$results/text"
  fi
done

# 5. Tables, a curve, and a folder that transformers loads.
if [[ -z ${DRY_RUN:-} ]]; then
  python examples/tenmillion/tables.py report "$out/results" | tee "$out/table.md"
  ! "$PYTHON" -c 'import matplotlib' 2>/dev/null ||
    run python -m fairseq_cli.analyze curves "$out/model/metrics.jsonl" --over hours --results-path "$out/curve.png"
fi
revisions=(--revisions) # a run of fewer words than the first checkpoint's has none
[[ -n ${DRY_RUN:-} ]] || compgen -G "$out/model/checkpoint_words_*.pt" >/dev/null || revisions=()
[[ -e $out/exported ]] || run python -m fairseq_cli.export_model "$out/model" --to hf --out "$out/exported" ${revisions[@]+"${revisions[@]}"}
