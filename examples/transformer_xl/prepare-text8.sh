#!/usr/bin/env bash
# text8, 100,000,000 letters and spaces of an English Wikipedia (31 MB to download): train.txt, valid.txt and test.txt,
# 90, 5 and 5 million characters, one symbol per line, and dict.txt. Resumes when run again.
# Usage: prepare-text8.sh [DIR]        (default: examples/transformer_xl/text8)
# TEXT8_URL: alternative URL of the archive.
# shellcheck source=examples/transformer_xl/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"
begin "${1:-examples/transformer_xl/text8}"
urls=(https://mattmahoney.net/dc/text8.zip http://mattmahoney.net/dc/text8.zip)
[[ -z ${TEXT8_URL:-} ]] || urls=("$TEXT8_URL")

if [[ -n ${SMALL:-} ]]; then
  stand_in
  text=$folder/source/text8
  prose=$folder/source/train.txt
  echo "tr A-Z a-z <$prose | tr -cs a-z ' ' >$text"
  [[ -n ${DRY_RUN:-} ]] || LC_ALL=C tr A-Z a-z <"$prose" | LC_ALL=C tr -cs a-z ' ' >"$text"
else
  # The file has 100,000,000 bytes, MD5 3bea1919949baf155f99411df5fada7e, as published at mattmahoney.net/dc/textdata.
  fetch "$folder/text8.zip" sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232 TEXT8_URL "${urls[@]}"
  run python -m zipfile -e "$folder/text8.zip" "$folder/unpacked"
  text=$folder/unpacked/text8
fi
run python -m fairseq_cli.corpus symbols "$text" "$folder" --kind letters
run rm -rf "$folder/unpacked" "$folder/text8.zip"
