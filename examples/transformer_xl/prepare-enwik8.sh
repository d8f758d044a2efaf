#!/usr/bin/env bash
# enwik8, the first 100,000,000 bytes of an English Wikipedia (36 MB to download): train.txt, valid.txt and test.txt,
# 90, 5 and 5 million bytes, each as its number, and dict.txt. Resumes when run again.
# Usage: prepare-enwik8.sh [DIR]        (default: examples/transformer_xl/enwik8)
# ENWIK8_URL: alternative URL of the archive.
# shellcheck source=examples/transformer_xl/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"
begin "${1:-examples/transformer_xl/enwik8}"
urls=(https://mattmahoney.net/dc/enwik8.zip http://mattmahoney.net/dc/enwik8.zip https://data.deepai.org/enwik8.zip)
[[ -z ${ENWIK8_URL:-} ]] || urls=("$ENWIK8_URL")

if [[ -n ${SMALL:-} ]]; then
  stand_in
  text=$folder/source/train.txt
else
  # The file has 100,000,000 bytes, MD5 a1fa5ffddb56f4953e226637dabbb36a, as published at mattmahoney.net/dc/textdata.
  fetch "$folder/enwik8.zip" sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc ENWIK8_URL "${urls[@]}"
  run python -m zipfile -e "$folder/enwik8.zip" "$folder/unpacked"
  text=$folder/unpacked/enwik8
fi
run python -m fairseq_cli.corpus symbols "$text" "$folder" --kind bytes
run rm -rf "$folder/unpacked" "$folder/enwik8.zip"
