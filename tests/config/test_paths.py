"""Files and folders are the user's choice: a checkpoint names none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from ranks import on_ranks
from sentences import NO_DROPOUT, SIZES, write_dictionary, write_folders, write_tsv

from fairseq import checkpoint
from fairseq.config import options, settings
from fairseq.config.registry import CHOICES, EXTENSIONS, MODELS
from fairseq.evaluation.classifier import SentenceClassifier
from fairseq.tasks import setup_task
from fairseq_cli import validate

REGISTRIES = (*(CHOICES[name] for name in CHOICES if name != "arch"), MODELS, EXTENSIONS)
GROUPS = (
    *(settings.CommonConfig, settings.DataConfig, settings.DistributedConfig, settings.OptimizationConfig),
    *(settings.CheckpointConfig, settings.ProfileConfig),
)
RANKING = f"""--cpu --task sentence_ranking --criterion sentence_ranking --arch bert_tiny {SIZES} {NO_DROPOUT}
    --num-classes 2 --batch-size 4 --optimizer adam --lr 0.01 --max-update 3 --no-epoch-checkpoints"""


def paths() -> set[str]:
    """The settings of all built-in parts and of runs whose help speaks of a file or a folder."""
    classes = [*GROUPS, *(registry.declaration(name).config_class for registry in REGISTRIES for name in registry)]
    declared = [field for cls in classes if cls is not None for field in dataclasses.fields(cls)]
    path = re.compile(r"FILE|DIR|PATH")
    return {
        field.name
        for field in declared
        if path.search(field.metadata.get("metavar") or "")
        or ("str" in str(field.type) and re.search(r"\b(file|folder|path)\b", field.metadata.get("help", "")))
    }


def questions(folder: Path) -> Path:
    dictionary = write_dictionary(folder / "words")
    for split in ("train", "valid"):
        write_folders(folder / "data", split, {"input1": ["w1"] * 8, "input2": ["w2"] * 8}, dictionary)
        (folder / "data" / "label").mkdir(exist_ok=True)
        (folder / "data" / "label" / f"{split}.label").write_text("0\n" * 8)
    return folder / "data"


def test_no_checkpoint_has_a_path_among_its_settings(tmp_path: Path) -> None:
    known = paths()
    assert {"save_dir", "metrics_file", "save_predictions", "data_bin", "bpe_codes", "user_dir"} <= known
    args = dict.fromkeys(known, "/somewhere/else") | {"arch": "bert_tiny"}
    torch.save({"model": {}, "args": args}, tmp_path / "theirs.pt")
    assert checkpoint.load(tmp_path / "theirs.pt")["args"] == {"arch": "bert_tiny"}
    runs.train(
        tmp_path / "own", "--cpu --arch transformer_lm_tiny --train-subset valid --valid-subset test --max-update 1"
    )
    stored: Any = checkpoint.read(tmp_path / "own" / "checkpoint_last.pt")
    assert not known & stored["args"].keys()


def test_a_file_that_a_checkpoint_names_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, victim = questions(tmp_path), tmp_path / "thesis.tex"
    runs.train(tmp_path / "run", RANKING, data=data)
    victim.write_text("ten years of work")
    state: Any = checkpoint.read(tmp_path / "run" / "checkpoint_last.pt")
    state["args"]["save_predictions"] = str(victim)
    torch.save(state, tmp_path / "theirs.pt")
    words = runs.words(data, "--path", tmp_path / "theirs.pt", "--cpu")
    validate.main(options.parse_args_and_arch(validate.get_validation_parser(), words, task_defaults=False))
    assert victim.read_text() == "ten years of work"
    assert "paths in a checkpoint have no effect" in caplog.text


def test_predictions_stay_where_a_run_ends_before_its_first_validation(tmp_path: Path) -> None:
    data, file = questions(tmp_path), tmp_path / "choices.tsv"
    flags = [RANKING, "--save-predictions", file]
    runs.train(tmp_path / "run", *flags, data=data)
    predictions = file.read_text()
    assert len(predictions.splitlines()) >= 8
    runs.train(tmp_path / "run", *flags, data=data)  # which is complete
    assert file.read_text() == predictions


def test_predictions_of_all_processes_are_in_one_file(tmp_path: Path) -> None:
    data, file = questions(tmp_path), tmp_path / "choices.tsv"
    args = runs.arguments(RANKING, "--save-predictions", file, data=data)

    def validate_part(world: Any) -> None:
        task: Any = setup_task(args)
        model, criterion = task.build_model(args).eval(), task.build_criterion(args).eval()
        rows = range(3) if world.is_first else range(3, 8)
        criterion(model, task.dataset("valid").batch(rows))
        criterion(model, task.dataset("valid").batch(range(1)) if world.is_first else task.dummy_sample("cpu"))

    on_ranks(validate_part, 2, tmp_path)
    numbers = [int(line.split("\t")[0]) for line in file.read_text().splitlines()]
    assert numbers == [*range(8), 0]


def test_a_classifier_finds_its_codes_beside_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text("#version: 0.2\nn o\nno n\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").write_text("non@@ 3\ne 2\n. 1\n")
    for name in ("train.tsv", "dev.tsv"):
        write_tsv(tmp_path / name, ["sentence", "label"], [["none.", 1], ["e", 0]])
    flags = f"""--cpu --task sentence_prediction --criterion sentence_prediction --arch bert_tiny {SIZES} --max-update 1
        --optimizer adam --lr 0.01 --batch-size 2"""
    codes = ["--data-bin", tmp_path / "bin", "--bpe-codes", tmp_path / "codes"]
    runs.train(tmp_path / "run", flags, *codes, data=tmp_path)
    (tmp_path / "codes").unlink()
    task = SentenceClassifier.from_pretrained(tmp_path / "run").task
    assert [task.dictionary[index] for index in task.encode("none.")] == ["non@@", "e", "."]
