# Shared by entities.sh and documentation.sh, which source it. They describe the variables.
# shellcheck shell=bash disable=SC2154
# shellcheck source=examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

read -r -a extra <<<"${EXTRA:-}"
read -r -a seeds <<<"${SEEDS:-$(full_or_small "1 2 3" 1)}"
read -r -a forms <<<"${FORMS:-none centred literal}"

# choose_until DEFAULT: sets $until, the update from which on no notes are read or taken, to UNTIL.
choose_until() {
  until=$(whole UNTIL "$1")
  ((until < updates)) || fail "UNTIL=$until, UPDATES=$updates: notes must end before the training; lower UNTIL"
}

# compare_forms: models of each form and seed on $data, trained with $flags and $plain, or $noted with notes, which end after
# $until of $updates updates; their losses by distance to a rare word at both.
compare_forms() {
  local seed form folder train losses notes
  for seed in "${seeds[@]}"; do
    for form in "${forms[@]}"; do
      folder=$out/$form-$seed
      train=(
        python train.py "$data" --seed "$seed" --save-dir "$folder" --metrics-file "$folder.jsonl" --no-epoch-checkpoints
        "${flags[@]}" ${extra[@]+"${extra[@]}"}
      )
      losses=(python validate.py "$data" --path "$folder/checkpoint_last.pt" --valid-subset valid --rare-words)
      if [[ $form == none ]]; then
        run "${train[@]}" "${plain[@]}" --max-update "$until"
        run "${losses[@]}"
        run "${train[@]}" "${plain[@]}" --max-update "$updates"
      else
        notes=("${noted[@]}" --note-form "${form%:*}")
        [[ $form != *:* ]] || notes+=(--note-lambda "${form#*:}")
        run "${train[@]}" "${notes[@]}" --max-update "$until"
        run "${losses[@]}" --keep-notes
        run "${train[@]}" "${notes[@]}" --note-until "$until" --max-update "$updates"
      fi
      run "${losses[@]}"
    done
  done
}
