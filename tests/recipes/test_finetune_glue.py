"""The fine-tuning recipes print commands that the parsers accept, and run end to end when small."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import runs

from fairseq import options

RECIPES = runs.ROOT / "examples" / "tnf"
VARIABLES = (
    "CHECKPOINT", "DATA_BIN", "BPE_CODES", "GLUE", "TASKS", "SAVE_DIR", "SEEDS", "LRS", "EPOCHS", "GPUS", "PRECISION",
    "EXTRA", "DRY_RUN", "SMALL", "GLUE_URL",
)  # fmt: skip


def run(script: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment |= {name: str(value) for name, value in variables.items()}
    command = ["bash", str(RECIPES / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)


def test_the_commands_are_those_of_fairseq_finetune() -> None:
    result = run(
        "finetune-glue.sh", DRY_RUN=1, CHECKPOINT="c.pt", DATA_BIN="bin", BPE_CODES="codes", TASKS="RTE MNLI", GPUS=4,
        PRECISION="bf16", EXTRA="--weight-decay 0.1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [shlex.split(line) for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["fairseq-finetune"] * 2
    args = options.parse_args_and_arch(options.get_finetune_parser(), lines[1][1:])
    assert (args.data, args.glue_task, args.path, args.data_bin) == ("examples/tnf/glue/MNLI", "MNLI", "c.pt", "bin")
    assert (args.bpe_codes, args.distributed_world_size, args.bf16, args.weight_decay) == ("codes", 4, True, 0.1)
    assert (len(args.seeds), args.lrs, args.batch_size) == (5, [1e-5, 3e-5, 5e-5], 32)


def test_preparing_prints_a_download_for_each_task_and_names_those_without() -> None:
    result = run("prepare-glue.sh", "there", DRY_RUN=1, GLUE_URL="http://127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("curl ") == 8 and "http://127.0.0.1:9/QNLIv2.zip" in result.stdout
    result = run("prepare-glue.sh", "there", DRY_RUN=1, TASKS="MRPC")
    assert result.returncode == 2 and "MRPC cannot be downloaded; put its train.tsv" in result.stderr


def test_wrong_variables_are_one_line() -> None:
    for variables, message in [
        ({}, "CHECKPOINT, DATA_BIN: name"),
        ({"GPUS": "two"}, "GPUS=two: must be"),
        ({"PRECISION": "fp8"}, "PRECISION=fp8: choose"),
    ]:
        result = run("finetune-glue.sh", **variables)
        assert result.returncode == 2 and result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_the_small_recipe_runs_from_text_to_results(tmp_path: Path) -> None:
    result = run("finetune-glue.sh", SMALL=1, SAVE_DIR=tmp_path, SEEDS="1", EXTRA="--log-format none")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "MR" / "results.json").read_text())
    assert len(report["runs"]) == 1 and 0 <= report["score"] <= 100
