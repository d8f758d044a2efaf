#!/usr/bin/env bash
# Builds the wheel into DIR, installs it into an empty environment, and runs the demo, small, from an empty folder.
# Usage: check_wheel.sh DIR [PYTHON]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
dist=$(cd "$1" && pwd)
python=${2:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "1/4 Making an empty environment in $work …"
"$python" -m venv "$work/venv"
export PIP_CONSTRAINT=$root/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
echo "2/4 Building the wheel …"
# Setuptools builds in the source folder, so it gets a copy of the tracked files.
git -C "$root" ls-files -z | (cd "$root" && xargs -0 tar -cf -) | (mkdir "$work/source" && tar -xf - -C "$work/source")
PIP_CONSTRAINT='' "$work/venv/bin/pip" wheel -qq --no-deps --wheel-dir "$work/dist" "$work/source"
echo "3/4 Installing PyTorch and the wheel; PyTorch is large, and this takes minutes …"
"$work/venv/bin/pip" install -qq torch
"$work/venv/bin/pip" install -qq "$work"/dist/*.whl matplotlib
echo "4/4 Running the small demo outside the repository, about a minute …"
mkdir "$work/empty"
cd "$work/empty"
"$work/venv/bin/fairseq-demo" --output demo --max-words 15000 --updates 4 8 --cutoffs 100,300 >demo.log || {
  cat demo.log >&2
  exit 1
}
grep -q "This function returns" demo/report.txt
cp "$work"/dist/*.whl "$dist/"
echo "wheel: $(cd "$dist" && ls fairseq_short-*.whl | tail -1) runs the demo outside the repository"
