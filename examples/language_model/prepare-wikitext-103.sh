#!/usr/bin/env bash
# Downloads WikiText-103 (190 MB, 0.5 GB unpacked) to DIR/wikitext-103; resumes when run again.
# Usage: prepare-wikitext-103.sh [DIR]        (default: this script's folder)
# WIKITEXT_URL: alternative URL of the archive.
set -euo pipefail

folder=${1:-$(dirname "${BASH_SOURCE[0]}")}
corpus=$folder/wikitext-103
archive=$folder/wikitext-103-v1.zip
sha256=242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590
urls=(https://wikitext.smerity.com/wikitext-103-v1.zip https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip)
[[ -z ${WIKITEXT_URL:-} ]] || urls=("$WIKITEXT_URL")

fail() {
  printf 'prepare-wikitext-103.sh: %s\n' "$*" >&2
  exit 1
}

intact() {
  [[ -f $archive.part ]] || return 1
  if command -v sha256sum >/dev/null; then
    sha256sum "$archive.part"
  else
    shasum -a 256 "$archive.part"
  fi | grep -q "^$sha256 "
}

download() {
  if command -v curl >/dev/null; then
    curl --fail --location --silent --connect-timeout 20 --continue-at - --output "$archive.part" "$1"
  elif command -v wget >/dev/null; then
    wget --quiet --timeout=20 --tries=3 --continue --output-document="$archive.part" "$1"
  else
    fail "neither curl nor wget is installed; install one of them"
  fi
}

if [[ -f $corpus/wiki.train.tokens && -f $corpus/wiki.valid.tokens && -f $corpus/wiki.test.tokens ]]; then
  echo "$corpus is there already"
  exit 0
fi

mkdir -p "$folder"
if ! intact; then
  reached=
  for url in "${urls[@]}"; do
    echo "Downloading $url …"
    if download "$url"; then
      reached=yes
      break
    fi
  done
  [[ -n $reached ]] || fail "the download failed; check the network and run this again (it resumes; delete $archive.part to begin anew)"
  if ! intact; then
    rm -f "$archive.part"
    fail "what came from $url is not the WikiText-103 archive (wrong SHA-256; removed); run this again or set WIKITEXT_URL"
  fi
fi

unpacked=$(mktemp -d "$folder/unpack.XXXXXX")
trap 'rm -rf "$unpacked"' EXIT
"${PYTHON:-python3}" -m zipfile -e "$archive.part" "$unpacked"
rm -rf "$corpus"
mv "$unpacked/wikitext-103" "$corpus"
rm -f "$archive.part"
echo "$corpus: $(wc -w <"$corpus/wiki.train.tokens") words for training"
