#!/usr/bin/env bash
# Prints the section of CHANGELOG.md for a tag, such as v2.0.0; an error where that is not the package's version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1#v}
grep -qF "__version__ = \"$version\"" fairseq/system/version.py || {
  echo "$1: not the version of the package" >&2
  exit 1
}
awk -v heading="## [$version]" '/^## / { inside = index($0, heading) == 1; next } inside' CHANGELOG.md
