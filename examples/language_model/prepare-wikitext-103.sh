#!/usr/bin/env bash
# Downloads WikiText-103 (190 MB, 0.5 GB unpacked) to DIR/wikitext-103. Resumes when run again. DRY_RUN=1 prints the commands.
# Usage: prepare-wikitext-103.sh [DIR]        (default: examples/language_model)
# WIKITEXT_URL: alternative URL of the archive.
# shellcheck source=examples/transformer_xl/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/../transformer_xl/download.sh"

folder=${1:-examples/language_model}
corpus=$folder/wikitext-103
archive=$folder/wikitext-103-v1.zip
urls=(https://wikitext.smerity.com/wikitext-103-v1.zip https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip)
[[ -z ${WIKITEXT_URL:-} ]] || urls=("$WIKITEXT_URL")

if [[ -f $corpus/wiki.train.tokens && -f $corpus/wiki.valid.tokens && -f $corpus/wiki.test.tokens ]]; then
  echo "$corpus is there already"
  exit 0
fi
fetch "$archive" sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590 WIKITEXT_URL "${urls[@]}"
run python -m zipfile -e "$archive" "$folder/unpacked"
run rm -rf "$corpus"
run mv "$folder/unpacked/wikitext-103" "$corpus"
run rm -rf "$folder/unpacked" "$archive"
[[ -n ${DRY_RUN:-} ]] || echo "$corpus: $(wc -w <"$corpus/wiki.train.tokens") words for training"
