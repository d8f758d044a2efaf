#!/usr/bin/env bash
# From raw texts to models that transformers loads as they were after every million words; docs/babylm.md explains it.
# Usage: TRAIN=DIR VALID=DIR babylm.sh   Run it again to resume; exports that are there are not written again. Paths begin at
# the root of the repository. DRY_RUN=1 prints the commands; the lengths of stages are known once data are there.
#   TRAIN, VALID  folders of raw texts, all files of which are read, or one file each, or folders that `datasets` saved
#   OUT           folder of data, checkpoints and exports (default: babylm)
#   MODELS        some of "shortformer transformer_xl electra" (default: all)
#   PAIRS         minimal pairs, JSON lines in BLiMP's format or a folder of them (default: the 18 of this folder)
#   TABLE         folder with train.tsv and dev.tsv, columns sentence and label, to fine-tune classifiers on (default: none)
#   EPOCHS        passes through the texts (default: 10, the most that the challenge allows)
#   SHORT_SHARE   per cent of the training that reads blocks of SHORT tokens; the rest reads LONG (default: 70, 32, 128)
#   POSITIONS     positions of ELECTRA (default: 512, which the challenge's fine-tuning reads)
#   WORDS         words between checkpoints (default: 1M:10,10M:10,100M, the challenge's)
#   BPE LAYERS WIDTH BATCH LR SEED   subwords, sizes, tokens an update, rate (default: 8000 6 384 4096 0.001 1)
#   NOTES=1       ELECTRA takes notes of rare words, in an OUT of its own: NOTE_COUNTS occurrences (default: 10:100)
#   ONE_BY_ONE=1  one model after the other (default with a GPU; on CPUs they share the cores, with logs in OUT/MODEL.log)
#   PRECISION (fp32, bf16, fp16), EXTRA: further flags of fairseq-train, SMALL=1: tiny models on TRAIN and VALID
# It ends with the wall time and the CPU time of each step, in seconds, which OUT/seconds.tsv keeps.
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

out=${OUT:-babylm}
pairs=${PAIRS:-examples/babylm/pairs.jsonl}
read -r -a models <<<"${MODELS:-shortformer transformer_xl electra}"
read -r -a extra <<<"${EXTRA:-}"
choose_precision "$(default_precision)"
epochs=$(whole EPOCHS "$(full_or_small 10 2)")
share=$(whole SHORT_SHARE 70)
short=$(whole SHORT "$(full_or_small 32 8)") long=$(whole LONG "$(full_or_small 128 32)")
positions=$(whole POSITIONS "$(full_or_small 512 32)")
bpe=$(whole BPE "$(full_or_small 8000 400)")
layers=$(whole LAYERS "$(full_or_small 6 1)") width=$(whole WIDTH "$(full_or_small 384 32)")
words=${WORDS:-$(full_or_small 1M:10,10M:10,100M 3K)}
batch=$(whole BATCH "$(full_or_small 4096 512)")
for model in "${models[@]}"; do
  [[ $model =~ ^(shortformer|transformer_xl|electra)$ ]] || fail "MODELS=$model: choose shortformer, transformer_xl or electra"
done
one_by_one=${ONE_BY_ONE:-}
[[ -n $one_by_one ]] || ! nvidia-smi -L 2>/dev/null | grep -q GPU || one_by_one=1
[[ -e $pairs ]] || fail "PAIRS=$pairs: file or folder not found; give JSON lines in BLiMP's format"
[[ -z ${TABLE:-} || (-f $TABLE/train.tsv && -f $TABLE/dev.tsv) ]] || fail "TABLE=$TABLE: has no train.tsv and dev.tsv"
python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("transformers") is None)' ||
  fail "transformers is not installed, and evaluates the exports: pip install transformers"
((bpe < 65000)) || fail "BPE=$bpe: must be below 65,000"
((share < 100)) || fail "SHORT_SHARE=$share: must be below 100 per cent"

# What is wrong in PAIRS or TABLE is found before hours of training.
[[ -n ${DRY_RUN:-} ]] || python examples/babylm/evaluate.py --pairs "$pairs" ${TABLE:+--table "$TABLE"}

# step NAME COMMAND…: run it, and note its seconds.
step() {
  if [[ -n ${DRY_RUN:-} ]]; then
    run "${@:2}"
  else
    local TIMEFORMAT="$1"$'\t%R\t%U' status=0
    { time run "${@:2}" 2>&3 || status=$?; } 3>&2 2>>"$out/seconds.tsv"
    return "$status"
  fi
}

# texts VARIABLE: the files of a folder or the file, separated by commas.
texts() {
  local path=${!1:-} file files
  [[ -n $path && -e $path ]] || fail "$1=$path: file or folder not found; give raw texts"
  files=("$path")
  # What `datasets` saved, a folder with state.json, is one text.
  [[ ! -d $path || -f $path/state.json ]] || files=("${path%/}"/*)
  [[ -e ${files[0]} ]] || fail "$1=$path: the folder is empty; give raw texts"
  for file in "${files[@]}"; do
    [[ -f $file || -f $file/state.json ]] || fail "$1=$path: $file is not a file; give a folder with nothing but texts"
  done
  [[ ${files[*]} != *,* ]] || fail "$1=$path: a comma in the name of a file; rename it, because commas stand between names"
  local IFS=,
  echo "${files[*]}"
}

# sums FILE,FILE,…: the checksums and sizes of texts.
sums() {
  local files
  IFS=, read -r -a files <<<"$1"
  find -L "${files[@]}" -type f -print0 | sort -z | xargs -0 cksum | cut -d " " -f 1,2 | paste -s -d , -
}

if [[ -z ${DRY_RUN:-} ]]; then
  [[ $out != -* ]] && mkdir -p "$out" 2>/dev/null && [[ -w $out ]] || fail "OUT=$out: cannot be written; give another folder"
  # What is started here holds the lock, too: a training that outlives the script, after kill -9, keeps others out.
  exec 9>"$out/.lock"
  ! command -v flock >/dev/null || flock -n 9 || fail "OUT=$out: another babylm.sh, or what one started, is at work here"
  printf "" >"$out/seconds.tsv"
fi

# 1. Texts to byte-level subwords, which are learned on the training texts: no text has unknown symbols.
data=$out/data-bin notes=()
if [[ -n ${NOTES:-} ]]; then
  counts=${NOTE_COUNTS:-$(full_or_small 10:100 3:30)} data=$out/data-bin-notes
  [[ $counts =~ ^([1-9][0-9]*):([1-9][0-9]*)$ ]] && ((BASH_REMATCH[1] <= BASH_REMATCH[2])) ||
    fail "NOTE_COUNTS=$counts: must be two whole numbers, the fewest and the most occurrences, such as 10:100"
  notes=(--notes --note-min-count "${counts%:*}" --note-max-count "${counts#*:}")
fi
if [[ ! -e $data/dict.txt || -n ${TRAIN:-}${VALID:-} ]]; then
  train=$(texts TRAIN)
  valid=$(texts VALID)
fi
if [[ -n ${train:-} && -z ${DRY_RUN:-} ]]; then # other texts or subwords may not go on in the same folder
  made=$(printf '%s\n' "BPE=$bpe" "NOTE_COUNTS=${counts:-}" "TRAIN=$(sums "$train")" "VALID=$(sums "$valid")")
  if [[ ! -e $data/dict.txt ]]; then
    printf '%s\n' "$made" >"$data.made-from"
  elif [[ -e $data.made-from ]] && changed=$(grep -vxF -f "$data.made-from" <<<"$made"); then
    fail "OUT=$out: $data was made with other ${changed%%=*}; give another OUT, or what it was made with"
  fi
fi
if [[ ! -e $data/dict.txt ]]; then
  step subwords python preprocess.py --trainpref "$train" --validpref "$valid" --bpe hf --learn-bpe "$bpe" --destdir "$data" \
    ${notes[@]+"${notes[@]}"}
fi

# 2. Training: short blocks first. An epoch has this many updates; the last one of the last epoch ends the run.
tokens=$(($( (cat "$data"/train*.bin 2>/dev/null || true) | wc -c) / 2)) # of two bytes each
each=$((tokens / batch + 2))
stages=$short:$((each * epochs * share / 100)),$long:$((each * (epochs + 1)))
training=(
  --stages "$stages" --max-epoch "$epochs" --max-tokens "$batch" --required-batch-size-multiple 1
  --optimizer adam --adam-betas "(0.9, 0.98)" --clip-norm 1.0 --lr "${LR:-0.001}" --lr-scheduler polynomial_decay
  --warmup-updates $((each * epochs / 20 + 1)) --total-num-update $((each * epochs)) --end-learning-rate 1e-05
  --weight-decay 0.1 --dropout 0.1 --seed "${SEED:-1}" --save-interval-words "$words"
  --no-epoch-checkpoints --distributed-world-size 1
)
bands=$((bpe / 8)),$((bpe / 2)) # of the softmax: frequent subwords are cheap to predict
heads=$((width >= 64 ? width / 64 : 1))
decoder=(--decoder-layers "$layers" --decoder-embed-dim "$width" --decoder-ffn-embed-dim $((4 * width)))
decoder+=(--decoder-input-dim "$width" --decoder-output-dim "$width" --decoder-attention-heads "$heads")
encoder=(--encoder-layers "$layers" --encoder-embed-dim "$width" --encoder-ffn-embed-dim $((4 * width)))
encoder+=(--encoder-attention-heads "$heads" --max-positions "$positions")

# Commands of one model, whose checkpoints and exports are named after it.

train() { # train ARCH FLAGS…
  step "$model training" python train.py "$data" --save-dir "$out/$model" --arch "$@" "${training[@]}" \
    ${precision[@]+"${precision[@]}"} ${extra[@]+"${extra[@]}"}
}

export_as() { # export_as CHECKPOINT NAME FLAGS…
  local exported=$out/exported/$2
  # After more EPOCHS the former export is moved aside, not removed: it may have become a repository.
  if [[ -e $exported && -n $(find "$1" -name "*.pt" -newer "$exported/config.json") ]]; then
    run mv "$exported" "$exported.until-$(date +%Y%m%d-%H%M%S)"
  fi
  [[ -e $exported ]] || step "$2 export" python -m fairseq_cli.export_model "$1" --to hf --out "$exported" "${@:3}"
}

revisions() { # sets $revisions: none if the texts end before the first of WORDS
  revisions=(--revisions)
  if [[ -z ${DRY_RUN:-} && -z $(find "$out/$1" -name "checkpoint_words_*.pt" -print -quit) ]]; then
    revisions=()
    echo "$out/$1: no checkpoints by words: what was read is less than the first of WORDS=$words" >&2
  fi
}

# 3. Checkpoints as revisions; minimal pairs; a classifier; and both again with transformers alone.
all_of() { # all_of MODEL
  local model=$1 reads=("$out/exported/$1") revisions=()
  local starts=(--no-start) # as the challenge's pipeline and evaluate.py score decoders
  case $model in
    shortformer)
      train shortformer "${decoder[@]}" --adaptive-softmax-cutoff "$bands" --criterion adaptive_loss
      revisions "$model"
      export_as "$out/$model" "$model" ${revisions[@]+"${revisions[@]}"}
      ;;
    transformer_xl)
      train transformer_xl --n-layer "$layers" --d-model "$width" --n-head "$heads" --d-head $((width / heads)) \
        --d-inner $((4 * width)) --mem-len "$long" --cutoffs "$bands"
      revisions "$model"
      export_as "$out/$model" "$model" ${revisions[@]+"${revisions[@]}"}
      ;;
    electra)
      starts=()
      train "${NOTES:+tnf_}electra" "${encoder[@]}" --generator-size 0.5 ${NOTES:+--task tnf_masked_lm}
      revisions "$model"
      export_as "$out/$model" "$model" ${revisions[@]+"${revisions[@]}"} # the discriminator, to be fine-tuned
      export_as "$out/$model" "$model-generator" ${revisions[@]+"${revisions[@]}"} --half generator # predicts masked words
      reads+=("$out/exported/$model-generator")
      if [[ -n ${TABLE:-} ]]; then
        step "$model classifier" python -m fairseq_cli.finetune "$TABLE" --path "$out/$model/checkpoint_best.pt" \
          --save-dir "$out/finetuned" --lrs 1e-4 --seeds 1 --max-epoch 3 --tokens-per-sample "$long"
        export_as "$out/finetuned/lr0.0001-seed1" "$model-classifier"
      fi
      ;;
  esac
  step "$model pairs" python -m fairseq_cli.harness "$out/$model" --pairs "$pairs" ${starts[@]+"${starts[@]}"} \
    --results-path "$out/pairs/$model"
  step "$model in transformers" python examples/babylm/evaluate.py "${reads[@]}" --pairs "$pairs" ${TABLE:+--table "$TABLE"}
}

if [[ -n $one_by_one || -n ${DRY_RUN:-} || ${#models[@]} == 1 ]]; then
  for model in "${models[@]}"; do all_of "$model"; done
else
  cores=$(getconf _NPROCESSORS_ONLN)
  share=$((cores / ${#models[@]}))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
  echo "${models[*]} side by side; the logs are $out/MODEL.log" >&2
  set -m # each has a process group, so that an interrupted script ends all that it started
  jobs=() status=0
  trap 'for job in "${jobs[@]}"; do kill -- "-$job" 2>/dev/null || true; done' EXIT
  for model in "${models[@]}"; do
    all_of "$model" >"$out/$model.log" 2>&1 &
    jobs+=($!)
  done
  for number in "${!jobs[@]}"; do
    wait "${jobs[number]}" || status=$?
    cat "$out/${models[number]}.log"
  done
  trap - EXIT
  ((status == 0)) || exit "$status"
fi
[[ -n ${DRY_RUN:-} ]] || { printf 'step\tseconds\tof CPU time\n' && cat "$out/seconds.tsv" && echo "whole: $SECONDS s"; }
