#!/usr/bin/env bash
# Fine-tunes BERT or ELECTRA, pre-trained with or without notes, on GLUE: five seeds, three learning rates, the best
# chosen by development score. Prints one table a task; numbers are in SAVE_DIR/TASK/results.json.
# Usage: CHECKPOINT=FILE DATA_BIN=DIR finetune-glue.sh
#   BPE_CODES  subword-nmt codes of pre-training, if DATA_BIN has no tokenizer (tokenization.json)
#   GLUE       folder of prepare-glue.sh (default: examples/tnf/glue)
#   TASKS      tasks (default: RTE MRPC CoLA STS-B SST-2 QNLI QQP MNLI)
#   SAVE_DIR   folder of the results (default: glue-results)
#   SEEDS LRS EPOCHS GPUS PRECISION (fp32, bf16 or fp16), EXTRA: further flags of fairseq-finetune
# DRY_RUN=1 prints the commands. SMALL=1 makes a small corpus, model and task first, on the CPU.
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

fairseq-finetune() { "$PYTHON" -m fairseq_cli.finetune "$@"; }

read -r -a extra <<<"${EXTRA:-}"
choose_precision fp32
rows=$(full_or_small 32 8)
choose_gpus "$rows" rows
glue=${GLUE:-examples/tnf/glue}
save_dir=${SAVE_DIR:-glue-results}
checkpoint=${CHECKPOINT:-} data_bin=${DATA_BIN:-}
device=()

if [[ -n ${SMALL:-} ]]; then
  device=(--cpu)
  glue=${GLUE:-$save_dir/glue}
  GLUE='' SMALL=1 TASKS='' bash examples/tnf/prepare-glue.sh "$glue"
  if [[ -z $checkpoint ]]; then
    checkpoint=$save_dir/bert-small/checkpoint_last.pt data_bin=$save_dir/data-bin
    run python -m fairseq_cli.corpus pydoc "$save_dir/pydoc" --max-words 5000
    run python preprocess.py --only-source --trainpref "$save_dir/pydoc/train.txt" --destdir "$data_bin"
    run python train.py --task masked_lm "$data_bin" --arch bert_tiny --criterion masked_lm --cpu --optimizer adam \
      --lr 0.001 --encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --max-positions 32 \
      --tokens-per-sample 32 --max-tokens 1024 --max-update 4 --disable-validation --no-epoch-checkpoints \
      --save-dir "$(dirname "$checkpoint")"
  fi
fi
[[ -n $checkpoint && -n $data_bin ]] || fail "CHECKPOINT, DATA_BIN: name the checkpoint and the data folder of pre-training"
codes=()
[[ -z ${BPE_CODES:-} ]] || codes=(--bpe-codes "$BPE_CODES")
read -r -a tasks <<<"${TASKS:-$(full_or_small "RTE MRPC CoLA STS-B SST-2 QNLI QQP MNLI" MR)}"

for task in "${tasks[@]}"; do
  run fairseq-finetune "$glue/$task" --glue-task "$task" --path "$checkpoint" --data-bin "$data_bin" \
    ${codes[@]+"${codes[@]}"} --seeds "${SEEDS:-$(full_or_small 1,2,3,4,5 1,2)}" \
    --lrs "${LRS:-$(full_or_small 1e-5,3e-5,5e-5 0.001)}" --max-epoch "${EPOCHS:-$(full_or_small 10 2)}" \
    --batch-size "$rows" --distributed-world-size "$gpus" --save-dir "$save_dir/$task" \
    ${device[@]+"${device[@]}"} ${precision[@]+"${precision[@]}"} ${extra[@]+"${extra[@]}"}
done
