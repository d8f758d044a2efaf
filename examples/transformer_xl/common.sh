# Shared by the scripts of this folder, which source it. README.md describes the variables.
# shellcheck shell=bash disable=SC2034
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# corpus NAME STAND_IN: sets $data; with SMALL, builds the small corpus of prepare-STAND_IN.sh.
corpus() {
  data=${DATA:-data-bin/$1}
  [[ -n ${SMALL:-} ]] || return 0
  data=${DATA:-${save_dir}data-bin/$1-small}
  local text=${save_dir}$1-small dictionary=()
  [[ -z ${DATA:-} && ! -e $data/dict.txt ]] || return 0
  case $2 in enwik8 | text8) dictionary=(--srcdict "$text/dict.txt") ;; esac
  run bash "examples/transformer_xl/prepare-$2.sh" "$text"
  run python preprocess.py --only-source --trainpref "$text/train.txt" --validpref "$text/valid.txt" \
    --testpref "$text/test.txt" ${dictionary[@]+"${dictionary[@]}"} --destdir "$data"
}

# train NAME ARCH ROWS UPDATES WARMUP FLAGS…: trains with adam, a cosine schedule from 0.00025 to nearly 0, and batches of ROWS,
# which all GPUs share.
train() {
  local rows updates warmup interval
  rows=$(whole ROWS "$(full_or_small "$3" 4)") updates=$(full_or_small "$4" 12) warmup=$(full_or_small "$5" 2)
  interval=$(full_or_small 4000 6)
  choose_gpus "$rows" rows
  run python train.py --task language_modeling "$data" --save-dir "$save_dir$1/" --arch "$2" \
    --criterion cross_entropy --optimizer adam --adam-torch-eps --lr 1e-09 --max-lr 0.00025 --lr-scheduler cosine \
    --warmup-updates "$warmup" --max-update "$updates" --clip-norm 0.25 --seed 1 ${precision[@]+"${precision[@]}"} \
    --sample-break-mode none --batch-size $((rows / gpus)) --batch-chunk "$batch_chunk" \
    --distributed-world-size "$gpus" --ddp-backend=no_c10d --required-batch-size-multiple 1 \
    --save-interval-updates "$interval" --keep-interval-updates 1 --no-epoch-checkpoints "${@:6}" \
    ${small_training[@]+"${small_training[@]}"} ${memory[@]+"${memory[@]}"} ${extra[@]+"${extra[@]}"}
}

# evaluate_windows NAME LENGTH STRIDE: evaluates a model without memory in windows of LENGTH tokens, STRIDE of them new.
evaluate_windows() {
  local length stride
  length=$(full_or_small "$2" 32) stride=$(full_or_small "$3" 8)
  run fairseq-eval-lm "$data" --path "$save_dir$1/checkpoint_best.pt" --gen-subset "${GEN_SUBSET:-test}" \
    --tokens-per-sample "$length" --context-window $((length - stride)) --batch-size "$(full_or_small 10 2)" \
    --required-batch-size-multiple 1 ${small_evaluation[@]+"${small_evaluation[@]}"}
}

# evaluate NAME SEGMENT MEMORY CLAMP: evaluates the best checkpoint with a longer memory than in training; CLAMP is optional.
evaluate() {
  local clamp=()
  [[ -z ${4:-} ]] || clamp=(--clamp-len "$(full_or_small "$4" 20)")
  run fairseq-eval-lm "$data" --path "$save_dir$1/checkpoint_best.pt" --gen-subset "${GEN_SUBSET:-test}" \
    --tokens-per-sample "$(full_or_small "$2" 8)" --mem-len "$(full_or_small "$3" 32)" \
    ${clamp[@]+"${clamp[@]}"} --same-length --batch-size "$(full_or_small 10 2)" --required-batch-size-multiple 1 \
    ${small_evaluation[@]+"${small_evaluation[@]}"}
}

read -r -a extra <<<"${EXTRA:-}"
choose_precision fp32
batch_chunk=$(whole BATCH_CHUNK 1)
save_dir=${SAVE_DIR:+${SAVE_DIR%/}/}
memory=() # overrides the length of the architecture and of SMALL=1
small_training=() small_evaluation=() small_bands=()
if [[ -n ${SMALL:-} ]]; then
  small_training=(
    --cpu --n-layer 2 --n-head 2 --d-model 32 --d-head 16 --d-embed 32 --d-inner 64 --tokens-per-sample 16 --mem-len 16
  )
  small_evaluation=(--cpu)
  small_bands=(--cutoffs "100,400") # for word-level corpora
fi
