#!/usr/bin/env bash
# Prints the figures of README ("Quick start") and docs/first-model.md: runs README's commands, as they stand there, on a
# folder with train.txt, valid.txt and test.txt, in which it writes data-bin, own and sample.txt.
# Usage: benchmarks/own_text.sh DIR     (EXTRA: further flags of fairseq-train)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH=$root/.venv/bin:$PATH
TIMEFORMAT='%R s (%U s of CPU time)'
cd "$1"
for output in data-bin own sample.txt; do
  [[ ! -e $output ]] || { echo "$1/$output: exists; remove it, a run would go on from it" >&2; exit 2; }
done

timed() {
  printf '\n$ %s\n' "$*"
  time "$@"
}

git -C "$root" log -1 --format='commit %h, %cd' --date=short
sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | sort | uniq -c
commands=$(sed -n '/^## Quick start/,/^## What to ask/p' "$root/README.md" | sed -n '/^```bash/,/^```/p' | sed '/^```/d')
# shellcheck disable=SC2162,SC2086
while read -a words; do # without -r a backslash joins lines
  if [[ ${words[0]} == fairseq-train ]]; then
    timed "${words[@]}" --log-format simple ${EXTRA:-} >train.log 2>&1 </dev/null
    grep -E '^\$ | num_updates=(50|100|200|300|400|500),|\| valid \||done training|CPU time' train.log
  else
    timed "${words[@]}" </dev/null
  fi
done <<<"$commands"
timed fairseq-eval-lm own --text sample.txt --bf16
for seed in 1 2 3 4; do
  echo '"I do not know," said the old man,' | timed fairseq-interactive own --sampling --sampling-topk 40 --seed "$seed"
done
