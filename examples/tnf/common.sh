# Shared by the pre-training scripts of this folder, which source it. README.md describes the variables.
# shellcheck shell=bash disable=SC2034
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

read -r -a extra <<<"${EXTRA:-}"
choose_precision "$(default_precision)"
save_dir=${SAVE_DIR:+${SAVE_DIR%/}/}
data=${DATA:-$(full_or_small data-bin/tnf "${save_dir}data-bin/tnf-small")}
rows=$(full_or_small 256 8)
length=$(full_or_small 512 32)
size=${SIZE:-$(full_or_small base tiny)}
case $size in
  base | small | tiny) ;;
  *) fail "SIZE=$size: choose base, small or tiny" ;;
esac
small_model=()
if [[ -n ${SMALL:-} ]]; then
  small_model=(--cpu --encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --max-positions "$length")
  if [[ -z ${DATA:-} && ! -e $data/dict.txt ]]; then
    OUT=$data bash examples/tnf/prepare-corpus.sh
  fi
fi

# pretrain MODEL CRITERION FLAGS…: trains MODEL, bert or electra, or tnf_ before them, in batches of 256 rows of 512 tokens.
pretrain() {
  local updates warmup interval keep update_freq task=masked_lm
  updates=$(whole UPDATES "$(full_or_small 1000000 6)")
  warmup=$((updates < 100000 ? updates / 10 : 10000)) interval=$(full_or_small 10000 3)
  keep=$(whole KEEP_EVERY "$(full_or_small 100000 3)")
  [[ $1 != tnf_* ]] || task=tnf_masked_lm
  ((keep % interval == 0)) || fail "KEEP_EVERY=$keep: must be a multiple of $interval, the updates between checkpoints"
  choose_gpus "$rows" rows
  update_freq=$(whole UPDATE_FREQ $((rows / gpus > 32 ? rows / gpus / 32 : 1)))
  ((rows / gpus % update_freq == 0)) ||
    fail "UPDATE_FREQ=$update_freq: each GPU has $((rows / gpus)) rows of an update, which cannot be divided by it"
  run python train.py --task "$task" "$data" --save-dir "$save_dir${1//_/-}-$size/" --arch "$1_$size" \
    --criterion "$2" --optimizer adam --adam-betas "(0.9, 0.98)" --adam-eps 1e-06 --weight-decay 0.01 \
    --no-decay-on-norms-and-biases --clip-norm 1.0 --lr 0.0001 --lr-scheduler polynomial_decay --warmup-updates "$warmup" \
    --total-num-update "$updates" --max-update "$updates" --dropout 0.1 --attention-dropout 0.1 --seed 1 \
    --sample-break-mode complete --tokens-per-sample "$length" --mask-prob 0.15 \
    --batch-size $((rows / update_freq / gpus)) --update-freq "$update_freq" --distributed-world-size "$gpus" \
    --validate-interval-updates "$interval" --save-interval-updates "$interval" --keep-interval-updates 5 \
    --keep-interval-updates-pattern "$keep" --no-epoch-checkpoints ${precision[@]+"${precision[@]}"} \
    "${@:3}" ${small_model[@]+"${small_model[@]}"} ${extra[@]+"${extra[@]}"}
}

notes=(
  --note-form "${NOTE_FORM:-centred}" --note-lambda "${NOTE_LAMBDA:-0.5}" --note-gamma "${NOTE_GAMMA:-0.1}"
  --note-half-window "${NOTE_HALF_WINDOW:-$(full_or_small 16 4)}"
)
