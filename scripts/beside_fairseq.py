"""Run fairseq 0.12.2 and this package on the same runs:
``python -m scripts.beside_fairseq BIN DATA``.

``BIN`` is the folder of fairseq's commands (Python 3.8:
``pip install fairseq==0.12.2 torch==1.12.1``), ``DATA`` a small binarised corpus. fairseq trains 20
updates of each run; from its checkpoint both go on for 20 more. Printed are the largest differences
of losses and gradient norms, which fairseq rounds to three decimals, and of learning rates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = """--task language_modeling --cpu --dropout 0 --tokens-per-sample 32 --max-tokens 256 --seed 8
    --log-format json --log-interval 1 --no-epoch-checkpoints --num-workers 0 --disable-validation"""
SMALL = """--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
    --attention-dropout 0"""
LM = f"--arch transformer_lm {SMALL}"
ADAM = f"{LM} --optimizer adam --lr 2e-3"
NARROW = "--decoder-input-dim 16 --decoder-output-dim 16"
LINES = "--max-tokens 512 --skip-invalid-size-inputs-valid-test --sample-break-mode"
ADAPTIVE = "--criterion adaptive_loss --adaptive-softmax-cutoff 200,600 --ddp-backend legacy_ddp"
OURS = {"adaptive": "--adaptive-loss-legacy-padding", "adaptive input": "--adaptive-loss-legacy-padding"}
RUNS = {
    "nag, cosine": f"{LM} --optimizer nag --lr 0.05 --lr-scheduler cosine --warmup-updates 5 --lr-period-updates 10",
    "cosine, minimum": f"{LM} --optimizer adam --lr 0.01 --lr-scheduler cosine --min-lr 1e-5 --lr-period-updates 10",
    "polynomial_decay": f"{ADAM} --lr-scheduler polynomial_decay --warmup-updates 5 --total-num-update 50 --power 2",
    "sgd, triangular": f"{LM} --optimizer sgd --lr 0.01 --max-lr 0.1 --lr-scheduler triangular --lr-period-updates 8",
    "tri_stage": f"{ADAM} --lr-scheduler tri_stage --warmup-steps 8 --hold-steps 10 --decay-steps 15",
    "inverse_sqrt, decay, clipping": f"{ADAM} --lr-scheduler inverse_sqrt --weight-decay 0.01 --clip-norm 0.1",
    "update-freq, annealed": f"{ADAM} --update-freq 2 --force-anneal 1 --lr-shrink 0.5",
    "adafactor": f"{LM} --optimizer adafactor --lr 0.01 --beta1 0.9 --weight-decay 0.01",
    "adagrad": f"{LM} --optimizer adagrad --lr 0.05",
    "sentence-avg": f"{ADAM} --sentence-avg {LINES} eos",
    "complete": f"{ADAM} {LINES} complete",
    "complete_doc": f"{ADAM} {LINES} complete_doc",
    "add-bos-token": f"{ADAM} --add-bos-token {LINES} eos",
    "curriculum": f"{ADAM} --curriculum 2 --batch-size 3 --update-freq 3,1",
    "learned positions": f"{ADAM} --decoder-normalize-before --decoder-learned-pos --activation-fn gelu {NARROW}",
    "no final norm": f"{ADAM} --decoder-normalize-before --no-decoder-final-norm --layernorm-embedding",
    "no positions": f"{ADAM} --no-token-positional-embeddings --no-scale-embedding --activation-fn gelu_accurate",
    "adaptive": f"{ADAM} {ADAPTIVE}",
    "adaptive input": f"""--arch transformer_lm_wiki103 {SMALL} {NARROW} {ADAPTIVE}
        --optimizer nag --lr 0.01 --clip-norm 0.1 --adaptive-input-cutoff 200,600 --activation-dropout 0
        --adaptive-softmax-dropout 0""",
    "transformer_lm_gpt": f"--arch transformer_lm_gpt {SMALL} --optimizer adam --lr 2e-3",
    "lstm_lm": """--arch lstm_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-hidden-size 16
        --decoder-out-embed-dim 16 --decoder-dropout-in 0 --decoder-dropout-out 0 --optimizer adam --lr 2e-3""",
}


def train(command: list[str], data: str, folder: Path, flags: str) -> list[dict[str, float]]:
    """The figures of the updates of a run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*command, data, "--save-dir", str(folder), *COMMON.split(), *flags.split()]
    run = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(words)}\n{run.stdout}")
    lines = re.findall(r"\| train_inner \| (\{.*\})$", run.stdout, re.MULTILINE)
    names = ("num_updates", "loss", "gnorm", "lr")
    return [{name: float(figures[name]) for name in names} for figures in map(json.loads, lines)]


def main() -> None:
    """Print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", help="folder of fairseq's commands")
    parser.add_argument("data", help="binarised corpus")
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)}")
    args = parser.parse_args()
    theirs, ours = [str(Path(args.bin, "fairseq-train"))], [sys.executable, "-m", "fairseq_cli.train"]
    print("run | updates | loss | gnorm | lr, relative")
    for name in args.runs or RUNS:
        with tempfile.TemporaryDirectory() as temporary:
            first, second = Path(temporary, "fairseq"), Path(temporary, "here")
            train(theirs, args.data, first, f"{RUNS[name]} --max-update 20")
            shutil.copytree(first, second)
            expected = train(theirs, args.data, first, f"{RUNS[name]} --max-update 40")
            got = train(ours, args.data, second, f"{RUNS[name]} --max-update 40 {OURS.get(name, '')}")
        same = [a["num_updates"] for a in expected] == [b["num_updates"] for b in got]
        pairs = list(zip(expected, got, strict=True)) if same else []
        loss, norm = (max((abs(a[key] - b[key]) for a, b in pairs), default=float("nan")) for key in ("loss", "gnorm"))
        rate = max((abs(a["lr"] - b["lr"]) / max(a["lr"], 1e-12) for a, b in pairs), default=float("nan"))
        print(f"{name} | {len(pairs)} | {loss:.4f} | {norm:.4f} | {rate:.1e}", flush=True)


if __name__ == "__main__":
    main()
