# Shared by the recipes, which source it. README.md describes the variables.
# shellcheck shell=bash disable=SC2034
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

read -r -a extra <<<"${EXTRA:-}"
choose_precision "$(default_precision)" # on a GPU fp16, as the authors
save_dir=${SAVE_DIR:+${SAVE_DIR%/}/}
memory=0 # 1: rows continue from update to update

if [[ -n ${SMALL:-} ]]; then
  data=${DATA:-${save_dir}data-bin/pydoc-small}
  short=16 medium=32 long=64 stride=16 batch=192
  small_training=(
    --cpu --decoder-layers 2 --decoder-attention-heads 2 --decoder-embed-dim 32 --decoder-input-dim 32
    --decoder-output-dim 32 --decoder-ffn-embed-dim 64 --adaptive-input-cutoff "100,400"
    --adaptive-softmax-cutoff "100,400"
  )
  small_evaluation=(--cpu)
else
  data=${DATA:-data-bin/wikitext-103}
  short=128 medium=512 long=3072 stride=512 batch=9216
  small_training=() small_evaluation=()
fi

# batches LENGTH UPDATE_FREQ: sets $sizes, flags for the same global batch at any UPDATE_FREQ; higher values use less memory.
# With GPUS, the batch is that of the authors' 8 GPUs: GPUS must divide their batches.
# With $memory, an update reads one segment of each row: passes take a share of the rows.
batches() {
  local freq pieces
  freq=$(whole UPDATE_FREQ "$2")
  ((batch % ($1 * freq) == 0)) ||
    fail "UPDATE_FREQ=$freq: $batch tokens are not $freq batches of whole $1-token rows; choose 1 or 3"
  pieces=$freq
  if [[ -n ${GPUS:-} ]]; then
    choose_gpus $((8 * (memory ? 1 : freq))) batches
    pieces=$((8 * freq / gpus))
  fi
  if ((memory && pieces > 1)); then
    sizes=(--max-tokens $((batch / freq * pieces)) --update-freq 1 --batch-chunk "$pieces" --tokens-per-sample "$1")
  else
    sizes=(--max-tokens $((batch / freq)) --update-freq "$pieces" --tokens-per-sample "$1")
  fi
  [[ -z ${GPUS:-} ]] || sizes+=(--distributed-world-size "$gpus")
}

# train SAVE_DIR UPDATES LENGTH UPDATE_FREQ FLAGS…: trains one stage with the settings common to all models.
train() {
  batches "$3" "$4"
  run python train.py --task language_modeling "$data" --save-dir "$save_dir$1/" --arch transformer_lm_wiki103 \
    --max-update "$2" --max-lr 1.0 --t-mult 2 --lr-period-updates 270000 --lr-scheduler cosine --lr-shrink 0.75 \
    --warmup-updates 16000 --warmup-init-lr 1e-07 --min-lr 1e-09 --optimizer nag --lr 0.0001 --clip-norm 0.1 \
    --criterion adaptive_loss --seed 1 ${precision[@]+"${precision[@]}"} --sample-break-mode none \
    --skip-invalid-size-inputs-valid-test --ddp-backend=no_c10d "${sizes[@]}" "${@:5}" \
    ${small_training[@]+"${small_training[@]}"} ${extra[@]+"${extra[@]}"}
}

# train_shortformer SAVE_DIR UPDATES LENGTH FLAGS…: trains a stage with a cache as long as its input.
train_shortformer() {
  memory=1 train "$1" "$2" "$3" 1 --max-tokens-valid "$3" --tokens-from-prev "$3" --curriculum 1000 \
    --required-batch-size-multiple 1 "${@:4}"
}

# begin SAVE_DIR CHECKPOINT: sets $start, flags to start a stage from the previous one; empty after its first checkpoint.
begin() {
  start=(--restore-file "$save_dir$2")
  if [[ -n ${SMALL:-} ]]; then
    start+=(--reset-meters) # few updates may not improve on the previous stage, but evaluation needs a best checkpoint
  fi
  if [[ -z ${DRY_RUN:-} && -e $save_dir$1/checkpoint_last.pt ]]; then
    start=()
  elif [[ -z ${DRY_RUN:-} && ! -e $save_dir$2 ]]; then
    fail "$save_dir$2: not found; train the previous stage first" # training would begin anew
  fi
}

# evaluate SAVE_DIR FLAGS…: prints the perplexity of the best checkpoint.
evaluate() {
  run fairseq-eval-lm "$data" --path "$save_dir$1/checkpoint_best.pt" --sample-break-mode none \
    --gen-subset "${GEN_SUBSET:-valid}" --max-sentences 1 "${@:2}" ${small_evaluation[@]+"${small_evaluation[@]}"}
}

# evaluate_shortformer SAVE_DIR: evaluates segment by segment, then token by token; both perplexities agree.
evaluate_shortformer() {
  evaluate "$1"
  evaluate "$1" --sliding-inf 1 --context-window $((medium - 1)) --max-tokens "$medium"
}

# evaluate_baseline SAVE_DIR: evaluates segment by segment, then with a sliding window.
evaluate_baseline() {
  evaluate "$1"
  evaluate "$1" --context-window $((long - stride))
}

if [[ -n ${SMALL:-} && -z ${DATA:-} && ! -e $data/dict.txt ]]; then
  run python -m fairseq_cli.corpus pydoc "${save_dir}pydoc-small" --max-words 20000
  run python preprocess.py --only-source --trainpref "${save_dir}pydoc-small/train.txt" \
    --validpref "${save_dir}pydoc-small/valid.txt" --testpref "${save_dir}pydoc-small/test.txt" \
    --destdir "$data"
fi
