#!/usr/bin/env bash
# Builds the source distribution, and from it the wheel, into DIR; installs the wheel into an empty environment, and
# runs commands from an empty folder, then the tests of golden numbers with the installed package.
# Usage: [TORCH=torch==VERSION] check_wheel.sh DIR [PYTHON]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
dist=$(cd "$1" && pwd)
python=${2:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin=$work/venv/bin

echo "1/5 Making an empty environment in $work …"
"$python" -m venv "$work/venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "2/5 Building the source distribution and the wheel …"
# Setuptools builds in the source folder, so it gets a copy of the tracked files.
git -C "$root" ls-files -z | (cd "$root" && xargs -0 tar -cf -) | (mkdir "$work/source" && tar -xf - -C "$work/source")
"$bin/pip" install -qq build
"$bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
echo "3/5 Installing PyTorch and the wheel; PyTorch is large, and this takes minutes …"
grep -v '^torch==' "$root/constraints.txt" >"$work/constraints.txt"
export PIP_CONSTRAINT=$work/constraints.txt
"$bin/pip" install -qq "${TORCH:-$(grep '^torch==' "$root/constraints.txt")}"
"$bin/pip" install -qq "$work"/dist/*.whl matplotlib pytest hypothesis
echo "4/5 Running commands outside the repository, about a minute …"
mkdir "$work/empty"
cd "$work/empty"
"$bin/python" -m fairseq | grep -q fairseq-train
"$bin/fairseq-corpus" pydoc . --max-words 15000
"$bin/fairseq-preprocess" --trainpref train.txt --validpref valid.txt --learn-bpe 1000
"$bin/fairseq-train" data-bin --arch shortformer_tiny --cpu --max-update 4 --save-dir own
"$bin/fairseq-eval-lm" own --text test.txt --cpu
"$bin/fairseq-analyze" curves own
echo "This function returns" | "$bin/fairseq-interactive" own --cpu --max-new-tokens 8
echo "5/5 Comparing with golden numbers …"
rm -r "$work/source/fairseq" "$work/source/fairseq_cli"
cd "$work/source"
"$bin/python" -m pytest -q -p no:cacheprovider tests/models/test_{bert,compile,golden_xl}.py \
  tests/training/test_{traces,release_formats}.py
cp "$work"/dist/* "$dist/"
echo "wheel: $(cd "$dist" && ls fairseq_short-*.whl | tail -1) runs outside the repository"
