# Shared by the prepare scripts: resumable downloads with checksums.
# shellcheck shell=bash
# shellcheck source=examples/transformer_xl/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

stop() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# sum_of ALGORITHM FILE: its checksum.
sum_of() {
  case $1 in
    sha256) if command -v sha256sum >/dev/null; then sha256sum "$2"; else shasum -a 256 "$2"; fi ;;
    md5) if command -v md5sum >/dev/null; then md5sum "$2"; else md5 -r "$2"; fi ;;
  esac | cut -d ' ' -f 1
}

# intact FILE ALGORITHM:CHECKSUM
intact() {
  [[ -f $1 && $(sum_of "${2%%:*}" "$1") == "${2#*:}" ]]
}

download() {
  local quiet=--progress-bar
  [[ -t 2 ]] || quiet=--silent
  if command -v curl >/dev/null; then
    run curl --fail --location "$quiet" --connect-timeout 20 --continue-at - --output "$1" "$2"
  elif command -v wget >/dev/null; then
    run wget --quiet --timeout=20 --tries=3 --continue --output-document="$1" "$2"
  else
    stop "neither curl nor wget is installed; install one of them"
  fi
}

# fetch FILE ALGORITHM:CHECKSUM VARIABLE URL…: downloads FILE from the first URL that responds, resuming a partial file.
# VARIABLE: environment variable with an alternative URL, for the error message.
fetch() {
  local file=$1 checksum=$2 variable=$3 url reached=
  shift 3
  [[ ! -f $file ]] || return 0
  if [[ -n ${DRY_RUN:-} ]]; then
    download "$file.part" "$1"
    return
  fi
  mkdir -p "$(dirname "$file")"
  if ! intact "$file.part" "$checksum"; then
    for url in "$@"; do
      if download "$file.part" "$url"; then
        reached=$url
        break
      fi
    done
    [[ -n $reached ]] ||
      stop "the download failed; check the network and run this again (it resumes; delete $file.part to begin anew)"
    if ! intact "$file.part" "$checksum"; then
      rm -f "$file.part"
      stop "what came from $reached is not $(basename "$file") (wrong ${checksum%%:*} checksum; removed); run this again or set $variable"
    fi
  fi
  mv "$file.part" "$file"
}

# begin FOLDER: sets $folder; exits if it already has all texts.
begin() {
  folder=$1
  if [[ -f $folder/train.txt && -f $folder/valid.txt && -f $folder/test.txt ]]; then
    echo "$folder is there already"
    exit 0
  fi
}

# stand_in: the corpus of SMALL=1 in place of a download: 20,000 words, in $folder/source/*.txt.
stand_in() {
  run python -m fairseq_cli.corpus pydoc "$folder/source" --max-words 20000
}

# stand_in_words: writes its texts to $folder, for a word-level corpus.
stand_in_words() {
  local split
  stand_in
  for split in valid test train; do
    run cp "$folder/source/$split.txt" "$folder/$split.txt"
  done
}
