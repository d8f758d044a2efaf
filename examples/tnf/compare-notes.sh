#!/usr/bin/env bash
# What notes gain on your text: small models without and with notes, from the same seeds on the same batches; their losses on the
# validation text, and curves of both. Run it again to resume; with more UPDATES it continues.
#   DATA     data of prepare-corpus.sh (default: data-bin/tnf)
#   MODEL    bert (default) or electra
#   SEEDS    seeds, a pair of trainings each (default: "1 2")
#   UPDATES  updates of 4,096 tokens (default: 3200), the first 2,500 with rows of 32 tokens, the rest of 128
#   OUT      folder of the runs (default: compare-notes)
#   NOTE_FORM  centred (default) or literal, the paper's
#   PRECISION, EXTRA, DRY_RUN=1, SMALL=1  as for the other scripts
# shellcheck source=examples/tnf/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=${MODEL:-bert}
out=${OUT:-${save_dir}compare-notes}
updates=$(whole UPDATES "$(full_or_small 3200 4)")
short=$(full_or_small 2500 2) tokens=$(full_or_small 4096 256) interval=$(full_or_small 200 2)
read -r -a seeds <<<"${SEEDS:-1 2}"
flags=(
  --optimizer adam --adam-betas "(0.9, 0.98)" --clip-norm 1.0 --weight-decay 0.01 --lr 0.002 --lr-scheduler inverse_sqrt
  --distributed-world-size 1 --warmup-updates "$(full_or_small 500 2)" --init-std 0.088 --dropout 0 --attention-dropout 0 --max-tokens "$tokens"
  --max-positions "$(full_or_small 128 "$length")" --valid-subset valid --no-epoch-checkpoints --keep-interval-updates 1
  --validate-interval-updates "$interval" --save-interval-updates "$interval"
)
case $model in
  bert) flags+=(--criterion masked_lm) figures=(loss rare_loss) ;;
  electra) flags+=(--criterion electra --generator-size 1) figures=(generator_loss discriminator_loss) ;;
  *) fail "MODEL=$model: choose bert or electra" ;;
esac
((updates > short)) || fail "UPDATES=$updates: must be more than $short"
stages=$(full_or_small 32 16):$short,$(full_or_small 128 32):$updates

for seed in "${seeds[@]}"; do
  for arch in "$model" "tnf_$model"; do
    form=()
    [[ $arch == "$model" ]] || form=(--note-form "${NOTE_FORM:-centred}")
    run python train.py "$data" --task tnf_masked_lm --arch "${arch}_tiny" --seed "$seed" --stages "$stages" \
      --save-dir "$out/$arch-$seed" --metrics-file "$out/$arch-$seed.jsonl" "${flags[@]}" \
      ${form[@]+"${form[@]}"} ${small_model[@]+"${small_model[@]}"} ${precision[@]+"${precision[@]}"} ${extra[@]+"${extra[@]}"}
  done
done

# Each line of the validation text a row. The models as finished, without notes; those with notes also with them.
sentences=(--valid-subset valid --rare-words --model-overrides "{'sample_break_mode': 'eos'}")
for seed in "${seeds[@]}"; do
  run python validate.py "$data" --path "$out/$model-$seed/checkpoint_last.pt:$out/tnf_$model-$seed/checkpoint_last.pt" "${sentences[@]}"
  run python validate.py "$data" --path "$out/tnf_$model-$seed/checkpoint_last.pt" "${sentences[@]}" --keep-notes
done
without=$(printf ",$out/$model-%s.jsonl" "${seeds[@]}") with=$(printf ",$out/tnf_$model-%s.jsonl" "${seeds[@]}")
for figure in "${figures[@]}"; do
  run python -m fairseq_cli.analyze curves "without notes=${without#,}" "with notes=${with#,}" --figure "$figure" --results-path "$out/$figure.png"
done
