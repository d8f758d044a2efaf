#!/usr/bin/env bash
# GLUE over the updates of pre-training, as in the paper's figure: fine-tunes checkpoints that pretrain-*.sh kept with
# finetune-glue.sh, and averages the tasks. Prints a table; numbers are in OUT/results.json. Run it again to resume.
#   MODELS    folders of checkpoints (default: "bert-base tnf-bert-base"); the first is what the others are compared with
#   EVERY     updates between the checkpoints (default: 100000)
#   DATA_BIN  data folder of pre-training (default: data-bin/tnf)
#   OUT       folder of the results (default: glue-over-updates)
#   TASKS GLUE BPE_CODES SEEDS LRS EPOCHS GPUS PRECISION EXTRA  as of finetune-glue.sh
# DRY_RUN=1 prints the commands. SMALL=1 pre-trains two small models on the CPU first, unless MODELS names others.
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

out=${OUT:-glue-over-updates}
every=$(whole EVERY "$(full_or_small 100000 3)")
data_bin=${DATA_BIN:-data-bin/tnf}
read -r -a models <<<"${MODELS:-bert-base tnf-bert-base}"
if [[ -n ${SMALL:-} ]]; then
  export GLUE=${GLUE:-$out/glue}
  if [[ -z ${MODELS:-} ]]; then
    models=("$out/pretrained/bert-tiny" "$out/pretrained/tnf-bert-tiny") data_bin=$out/pretrained/data-bin/tnf-small
    for script in pretrain-bert.sh pretrain-tnf-bert.sh; do
      DATA='' SIZE='' UPDATES='' KEEP_EVERY='' SAVE_DIR=$out/pretrained bash "examples/tnf/$script"
    done
  fi
fi

folders=()
for model in "${models[@]}"; do
  folder=$out/$(basename "$model") updates=$every
  folders+=("$folder")
  while file=$(compgen -G "$model/checkpoint_*_$updates.pt"); do
    CHECKPOINT=${file%%$'\n'*} DATA_BIN=$data_bin SAVE_DIR=$folder/$updates bash examples/tnf/finetune-glue.sh
    ((updates += every))
  done
  ((updates > every)) ||
    fail "MODELS, EVERY: no $model/checkpoint_*_$every.pt; pre-train with KEEP_EVERY=$every, or change EVERY"
done
run python examples/tnf/glue_table.py "${folders[@]}" --output "$out/results.json"
