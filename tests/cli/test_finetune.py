"""fairseq-finetune: runs for seeds and rates, mean and deviation, the best rate, predictions,
one-line errors."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import yaml
from mistakes import user_error
from sentences import write_dictionary, write_pretrained, write_task

from fairseq.config import options
from fairseq.data.glue import GLUE
from fairseq.evaluation import finetuning
from fairseq.evaluation.classifier import FinetunedRun, Predictions, as_table, best_rate, summarize
from fairseq_cli import finetune
from fairseq_cli.finetune import get_finetune_parser


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    write_dictionary(folder / "bin")
    write_task(folder / "MR")
    write_pretrained(folder / "bert.pt", folder / "bin", "--token-types 0", tnf=True)
    return folder


def arguments(home: Path, *flags: Any) -> argparse.Namespace:
    words = runs.words(
        home / "MR",
        "--glue-task MR --cpu --log-format none --path",
        home / "bert.pt",
        "--data-bin",
        home / "bin",
        *flags,
    )
    return options.parse_args_and_arch(get_finetune_parser(), words)


def test_every_rate_and_seed_is_trained_and_the_best_rate_chosen(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--seeds 1,2 --lrs 1e-9,0.02 --max-epoch 6 --batch-size 8 --predict valid,test --save-dir", tmp_path)
    report = finetune.main(arguments(home, *flags))
    table = capsys.readouterr().out
    assert report["best_lr"] == 0.02 and "| 0.02 (best) | 2 |" in table and "±" in table
    written = json.loads((tmp_path / "results.json").read_text())
    assert len(report["runs"]) == 4 and written.items() >= report.items() and {"commit", "machine"} <= written.keys()
    own = [run["figures"]["score"] for run in report["runs"] if run["lr"] == 0.02]
    assert report["score"] == pytest.approx(statistics.fmean(own)) and report["score"] > 80
    assert report["deviation"] == pytest.approx(statistics.stdev(own))
    folder = tmp_path / "lr0.02-seed1"
    state = runs.checkpoint.read(folder / "checkpoint_best.pt")
    assert state["extra_state"]["val_loss"] == report["runs"][2]["figures"]["score"], "what the training run validated"
    assert state["args"]["arch"] == "bert_tiny" and state["args"]["token_types"] == 0, "settings of the checkpoint"
    assert len((folder / "predictions.test.tsv").read_text().splitlines()) == 8

    def never(args: argparse.Namespace) -> None:
        raise AssertionError("complete runs are not repeated")

    monkeypatch.setattr(finetuning, "training_job", never)
    assert finetune.main(arguments(home, *flags)) == report
    first = tmp_path / "lr1e-09-seed1" / "result.json"
    complete, other = first.read_bytes(), shutil.copytree(home / "MR", tmp_path / "MR")
    for changed in ({"max_epoch": 7}, {"predict": "valid"}, {"data": str(other)}, {}):
        first.write_bytes(complete)
        if not changed:  # the same path, and another model
            os.utime(home / "bert.pt")
        with pytest.raises(AssertionError):
            finetune.main(argparse.Namespace(**{**vars(arguments(home, *flags)), **changed}))


def test_a_model_from_scratch_has_no_initial_weights_and_flags_of_training_pass(home: Path, tmp_path: Path) -> None:
    flags = ["--from-scratch --seeds 4 --lrs 0.001 --max-epoch 1 --save-dir", tmp_path]
    args = arguments(home, *flags)
    args.train_flags = "--dropout 0.3 --adam-betas 0.9,0.98 --max-epoch 0 --max-update 3"
    report = finetune.main(args)
    assert report["from_scratch"] and report["deviation"] is None and report["updates"] == 3
    stored = runs.checkpoint.read(tmp_path / "lr0.001-seed4" / "checkpoint_best.pt")["args"]
    assert (stored["dropout"], stored["adam_betas"]) == (0.3, [0.9, 0.98])
    settings = yaml.safe_load((tmp_path / "lr0.001-seed4" / "settings.yaml").read_text())
    assert settings["finetune_from_model"] is None


def test_updates_are_counted_with_the_batches_of_each_epoch(home: Path, tmp_path: Path) -> None:
    args = arguments(home, "--from-scratch --seeds 4 --lrs 0.001 --max-epoch 3 --batch-size 8 --save-dir", tmp_path)
    batches = -(-len((home / "MR" / "train.tsv").read_text().splitlines()) // 8)
    args.train_flags = "--update-freq 2,1"
    assert batches > 2 and finetune.main(args)["updates"] == -(-batches // 2) + 2 * batches


def test_predictions_are_written_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = Predictions(torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 1.0]).double(), GLUE["RTE"])
    found.write(tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv").read_text() == "index\tprediction\n0\tentailment\n1\tnot_entailment\n"
    assert found.metrics() == {"accuracy": 50, "score": 50}
    scores = Predictions(torch.tensor([1.25]).double(), None, GLUE["STS-B"])
    scores.write(tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv").read_text().endswith("0\t1.2500\n") and scores.metrics() == {}


def test_mean_deviation_and_the_best_rate() -> None:
    found = [FinetunedRun(lr, seed, {"score": score}, "") for lr, seed, score in [(1, 1, 70), (1, 2, 80), (2, 1, 74)]]
    first, second = summarize(found)
    assert (first.mean["score"], first.runs, second.runs) == (75, 2, 1)
    assert first.deviation["score"] == pytest.approx(50**0.5) and best_rate([first, second]) is first
    (failed,) = summarize([FinetunedRun(3, 1, {"score": math.nan}, "")])
    assert best_rate([failed, second]) is second
    assert as_table([first, second]).splitlines()[2:] == ["| 1 (best) | 2 | 75.00 ± 7.07 |", "| 2 | 1 | 74.00 |"]


def test_mistakes_are_one_line_before_anything_is_trained(home: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    other = tmp_path / "other"
    other.mkdir()
    (other / "dict.txt").write_text("w1 1\n")
    for flags, message in {
        "--glue-task NLI": "--glue-task NLI: no such task",
        "--seed 4": "--seed 4: give --seeds 4",
        "--seeds 1,2,1": "--seeds 1,2,1: one value twice",
        "--lrs 1e-3,0.001": "--lrs 0.001,0.001: one value twice",
        "--train-flags=--max-epoch=0": "--train-flags --max-epoch 0: the run would never end",
        "--train-flags '": "--train-flags ': no closing quotation",
        f"--path {tmp_path / 'text'}": "text",
        f"--path {tmp_path / 'missing'}": "missing",
        "--batch-size 5 --distributed-world-size 2": "--batch-size 5: must be a multiple of the 2 processes",
        "--glue-task RTE": "dev.tsv: no column 'sentence1'",
        f"--data-bin {other}": "bert.pt: was trained with a dictionary of 25 symbols, but --data-bin has 6",
    }.items():
        with user_error(message):
            finetune.main(arguments(home, "--save-dir", tmp_path / "out", flags))
    args = arguments(home, "--save-dir", tmp_path / "out")
    args.path = None
    with user_error("--path: give the checkpoint"):
        finetune.main(args)
    assert not (tmp_path / "out").exists()


def test_another_dictionary_of_the_same_size_is_refused_before_anything_is_trained(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "bin" / "dict.txt", tmp_path)
    shutil.copy(home / "bert.pt", tmp_path)
    words = (home / "bin" / "dict.txt").read_text().splitlines()
    (tmp_path / "other.txt").write_text("\n".join([*words[1:], words[0]]) + "\n")
    flags = ["--data-bin", tmp_path / "other.txt", "--save-dir", tmp_path / "out", "--path", tmp_path / "bert.pt"]
    message = f"{tmp_path}/bert.pt: was trained with another dictionary than {tmp_path}/other.txt"
    with user_error(message):
        finetune.main(arguments(home, *flags))
    assert not (tmp_path / "out").exists()
