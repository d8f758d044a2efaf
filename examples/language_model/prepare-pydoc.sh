#!/usr/bin/env bash
# A small English corpus without a download: prose from the documentation of Python, NumPy and PyTorch.
# Usage: prepare-pydoc.sh [DIR]            (default: examples/language_model/pydoc)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
exec "$PYTHON" -m fairseq_cli.corpus pydoc "${1:-examples/language_model/pydoc}"
