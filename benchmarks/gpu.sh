#!/usr/bin/env bash
# Measures on a GPU what docs/results.md lacks, in under ten minutes, and writes one report: speed, share of the peak,
# memory and attention kernels of the published models, generation; the tests that need a GPU; two
# processes on one GPU.
# Without a GPU the same with small models on the CPU. Usage: benchmarks/gpu.sh [DIR]        (default: gpu-report)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpu-report}
mkdir -p "$out"
python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x .venv/bin/python ]] || python=.venv/bin/python
small=() device=(--device-id 0)
nvidia-smi -L 2>/dev/null | grep -q GPU || small=(--small) device=(--cpu)

section() { printf '\n## %s\n\n' "$1"; }

two_processes() {
  local data=tests/golden/language_model/data-bin port rank
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      "$python" train.py "$data" --arch shortformer_tiny --criterion adaptive_loss --train-subset valid \
      --valid-subset test --tokens-per-sample 16 --max-tokens 64 --required-batch-size-multiple 1 --optimizer adam \
      --lr 0.001 --max-update 20 --no-save --log-format simple --log-interval 10 \
      --distributed-backend gloo "${device[@]}" >"$out/rank$rank.log" 2>&1 &
  done
  wait
  grep -h "num_updates=20" "$out"/rank?.log || tail -n 3 "$out"/rank?.log
}

{
  echo "# Measured with benchmarks/gpu.sh"
  section "Training and generation"
  "$python" -m benchmarks.gpu ${small[@]+"${small[@]}"} --json "$out/gpu.json"
  section "Tests on the GPU"
  "$python" -m pytest -q -rs -k "gpu or cuda" tests/modules tests/distributed tests/training tests/models 2>&1 | tail -n 25 || true
  section "Two processes on one device, over gloo"
  two_processes
} | tee "$out/report.md"
