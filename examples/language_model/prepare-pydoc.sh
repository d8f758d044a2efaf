#!/usr/bin/env bash
# A small corpus of real English without any download: the prose of Python's, NumPy's and PyTorch's own documentation.
# Usage: prepare-pydoc.sh [DIR]            (default: examples/language_model/pydoc)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
exec "$PYTHON" scripts/prepare_pydoc.py "${1:-examples/language_model/pydoc}"
