#!/usr/bin/env bash
# The One Billion Word benchmark (1.8 GB to download, 4.2 GB of text): train.txt, 30 million sentences; test.txt, the
# piece heldout-00000-of-00050, on which results are published; valid.txt, the piece after it. Resumes
# when run again.
# Usage: prepare-lm1b.sh [DIR]        (default: examples/transformer_xl/lm1b)
# LM1B_URL: alternative URL of the archive.
# shellcheck source=examples/transformer_xl/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"
begin "${1:-examples/transformer_xl/lm1b}"

if [[ -n ${SMALL:-} ]]; then
  stand_in_words
  exit
fi

name=1-billion-word-language-modeling-benchmark-r13output
heldout=$name/heldout-monolingual.tokenized.shuffled/news.en.heldout
training=$name/training-monolingual.tokenized.shuffled/news.en
archive=$folder/$name.tar.gz
urls=("https://www.statmt.org/lm-benchmark/$name.tar.gz" "http://www.statmt.org/lm-benchmark/$name.tar.gz")
[[ -z ${LM1B_URL:-} ]] || urls=("$LM1B_URL")

# extract TEXT PIECE…: concatenates pieces of the archive to one text, written atomically.
extract() {
  local text=$1
  shift
  echo "tar -xzOf $archive $1$( (($# == 1)) || echo " … ${*: -1}") >$text"
  if [[ -z ${DRY_RUN:-} && ! -f $text ]]; then
    tar -xzOf "$archive" "$@" >"$text.part" || stop "$archive cannot be unpacked; free some space and run this again"
    mv "$text.part" "$text"
  fi
}

# Checksum from TensorFlow Datasets (lm1b/checksums.tsv); the archive has 1,792,209,805 bytes.
fetch "$archive" sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e LM1B_URL "${urls[@]}"
extract "$folder/test.txt" "$heldout-00000-of-00050"
extract "$folder/valid.txt" "$heldout-00001-of-00050"
pieces=()
for number in {1..99}; do
  printf -v piece '%s-%05d-of-00100' "$training" "$number"
  pieces+=("$piece")
done
extract "$folder/train.txt" "${pieces[@]}"
run rm -f "$archive"
