"""Fine-tuning on fairseq's folders ``input0``, ``input1`` and ``label``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from mistakes import user_error
from sentences import SMALL, separable, write_dictionary, write_folders, write_pretrained

from fairseq.config import options
from fairseq.evaluation.classifier import SentenceClassifier
from fairseq.tasks import setup_task
from fairseq_cli import finetune

ROBERTA = f"{SMALL} --arch roberta_base --init-token 0 --separator-token 2"
PAIRS = {"input0": ["w0 w1", "w3"], "input1": ["w2", "w4 nonsense"], "label": ["yes", "no"]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return write_dictionary(tmp_path / "home")


@pytest.fixture
def classes(home: Path) -> Path:
    """A separable task of the classes neg and pos."""
    for split, seed, count in (("train", 1, 61), ("valid", 2, 40)):
        texts, labels = zip(*separable(seed, count), strict=True)
        columns = {"input0": list(texts), "label": ["pos" if label else "neg" for label in labels]}
        write_folders(home / "data", split, columns, home)
    return home / "data"


def task_on(data: Path, *flags: Any) -> Any:
    return setup_task(runs.arguments(ROBERTA, *flags, data=data))


def tokens(task: Any, split: str = "train") -> list[list[int]]:
    dataset = task.dataset(split)
    return dataset.batch(np.arange(len(dataset)))["net_input"]["src_tokens"].tolist()


def test_rows_of_pairs_have_fairseqs_separator(home: Path) -> None:
    data = write_folders(home / "data", "train", PAIRS, home)
    a, b, c, d, e = (4 + number for number in range(5))
    task = task_on(data)
    assert tokens(task) == [[0, a, b, 2, 2, c, 2], [0, d, 2, 2, e, 3, 2]]
    assert tokens(task_on(data, "--init-token 5 --separator-token 7"))[0] == [5, a, b, 2, 7, c, 2]
    assert task.layout.labels == ("no", "yes") and task.layout.sentences == ("sentence1", "sentence2")
    assert task.dataset("train").batch(np.arange(2))["target"].tolist() == [1, 0]
    assert [task.label_dictionary.string([n + task.label_dictionary.nspecial]) for n in range(2)] == ["no", "yes"]
    assert task.dictionary.mask() == len(task.dictionary) - 1
    assert tokens(task_on(data, "--token-types 2"))[0] == [0, a, b, 2, 2, c, 2]


def test_classes_are_numbered_by_the_settings_whatever_the_labels_dictionary(home: Path) -> None:
    data = write_folders(home / "data", "train", PAIRS, home)
    assert task_on(data, "--labels yes,no").dataset("train").batch(np.arange(2))["target"].tolist() == [0, 1]


CRITERION = """
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion

@register_criterion("of_a_head")
class OfAHead(FairseqCriterion):
    def forward(self, model, sample, reduce=True):
        logits, _ = model(
            **sample["net_input"], features_only=True, classification_head_name="sentence_classification_head"
        )
        targets = model.get_targets(sample, [logits]).view(-1)
        loss = F.nll_loss(F.log_softmax(logits.float(), -1), targets, reduction="sum")
        return loss, targets.numel(), {"loss": loss.data, "ntokens": sample["ntokens"],
                                       "nsentences": targets.numel(), "sample_size": targets.numel()}
"""


# One batch per epoch and no dropout: a plug-in's run reads batches in fairseq's order.
WHOLE = (
    "--batch-size 1000 --max-tokens 100000 --dropout 0 --attention-dropout 0 --activation-dropout 0 --pooler-dropout 0"
)


def test_a_plugins_criterion_may_name_the_head_as_fairseqs_does(classes: Path, tmp_path: Path) -> None:
    (tmp_path / "named_head").mkdir()
    (tmp_path / "named_head" / "__init__.py").write_text(CRITERION)
    # A plug-in's model has fairseq's initial values of heads, so that both begin from weights that
    # are saved.
    runs.train(tmp_path / "start", ROBERTA, WHOLE, "--max-update 1 --disable-validation", data=classes)
    start = ["--finetune-from-model", next((tmp_path / "start").rglob("checkpoint_last.pt"))]
    losses = []
    for flags in ([], ["--user-dir", tmp_path / "named_head", "--criterion of_a_head"]):
        more = [WHOLE, "--max-update 2 --no-save --disable-validation", *start, *flags]
        losses.append(
            [line["loss"] for line in runs.updates(runs.train(tmp_path / "run", ROBERTA, *more, data=classes))]
        )
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_scores_are_text_and_a_test_split_needs_no_labels(home: Path) -> None:
    pairs = {name: lines for name, lines in PAIRS.items() if name != "label"}
    data = write_folders(home / "data", "train", pairs, home)
    write_folders(data, "test", pairs, home)
    (data / "label").mkdir()
    (data / "label" / "train.label").write_text("0.25\n1e0\n")
    task = task_on(data, "--regression-target --num-classes 1")
    assert task.dataset("train").batch(np.arange(2))["target"].tolist() == [0.25, 1.0]
    assert "target" not in task.dataset("test").batch(np.arange(2))


def test_a_label_of_several_scores_is_learned(home: Path, tmp_path: Path) -> None:
    pairs = {name: lines for name, lines in PAIRS.items() if name != "label"}
    for split in ("train", "valid"):
        data = write_folders(home / "data", split, pairs, home)
        (data / "label").mkdir(exist_ok=True)
        (data / "label" / f"{split}.label").write_text("0.25 1 -2\n1e0 0 3\n")
    flags = [ROBERTA, "--regression-target --num-classes 3"]
    task = task_on(data, *flags[1:])
    assert task.dataset("train").batch(np.arange(2))["target"].tolist() == [[0.25, 1.0, -2.0], [1.0, 0.0, 3.0]]
    model, criterion = task.build_model(task.settings).eval(), task.build_criterion(task.settings)
    sample = task.dataset("valid").batch(np.arange(2))
    with torch.no_grad():
        loss, size, _ = criterion(model, sample)
        scores = model(**sample["net_input"])[0]
    assert size == 2 and scores.shape == (2, 3)
    assert float(loss) == pytest.approx(float((scores - sample["target"]).pow(2).sum()), rel=1e-5)
    last = runs.summaries(runs.train(tmp_path / "run", *flags, "--max-update 3", data=data), "valid")[-1]
    assert {"loss", "pearson", "spearman"} <= last.keys()
    with user_error("predicts 3 scores a text; only one is supported"):
        SentenceClassifier.from_pretrained(tmp_path / "run", data / "input0")
    (data / "label" / "train.label").write_text("0.25 1\n1 0 3\n")
    with user_error("label/train.label: line 1: label '0.25 1': expected 3 numbers"):
        task_on(data, *flags[1:]).dataset("train")


def test_long_rows_are_cut_or_left_out(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"input0": ["w1 " * 40, "w2", "w3"], "input1": ["w4 " * 5, "w5 " * 30, "w6"], "label": [0, 1, 0]}
    data = write_folders(home / "data", "train", columns, home)
    rows = [[token for token in row if token != 1] for row in tokens(task_on(data))]
    assert [len(row) for row in rows] == [24, 24, 6]
    assert rows[0] == [0, *[5] * 15, 2, 2, *[8] * 5, 2]
    task = task_on(data, "--shorten-method none")
    model = task.build_model(task.settings)
    with caplog.at_level(logging.WARNING):
        batches = task.iterator("train", model, task.build_criterion(task.settings), training=True)
        assert sum(sample["nsentences"] for sample in batches) == 1
    assert "left out 2 blocks longer than 24 positions" in caplog.text
    assert task.rows([("w1 " * 40, "w2")], [None], "input").sizes.tolist() == [24]
    source = write_pretrained(home / "model.pt", home, "--arch roberta_base")
    write_folders(data, "valid", columns, home)
    words = runs.words(data, "--cpu --shorten-method none --save-dir", home / "out", "--path", source)
    with user_error("--shorten-method none: 2 rows of valid are too long for the model; use truncate"):
        finetune.main(options.parse_args_and_arch(finetune.get_finetune_parser(), words))


def test_fine_tuning_begins_with_restore_file_learns_and_goes_on_to_the_bit(classes: Path, tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "model.pt", classes.parent, "--arch roberta_base")
    flags = f"{ROBERTA} --num-classes 2 --classification-head-name imdb_head --best-checkpoint-metric accuracy"
    flags += " --maximize-best-checkpoint-metric --shorten-method truncate --save-interval-updates 20"
    first = f"--restore-file {source} --reset-optimizer --reset-dataloader --reset-meters"
    whole = runs.train(tmp_path / "whole", flags, first, "--max-update 40", data=classes)
    assert max(line["accuracy"] for line in runs.summaries(whole, "valid")) > 90
    start = runs.checkpoint.read(source)["model"]
    runs.train(tmp_path / "none", flags, first, "--max-update 1 --lr 1e-9", data=classes)
    saved = runs.checkpoint.read(tmp_path / "none" / "checkpoint_last.pt")["model"]
    assert {name.split(".")[0] for name in saved} == {"encoder", "classification_heads"}
    for name in ("encoder.sentence_encoder.layers.0.fc1.weight", "encoder.sentence_encoder.embed_tokens.weight"):
        torch.testing.assert_close(saved[name], start[name], atol=1e-6, rtol=0)
    runs.train(tmp_path / "parts", flags, first, "--max-update 20", data=classes)
    rest = runs.train(tmp_path / "parts", flags, "--max-update 40", data=classes)
    assert runs.updates(rest) == runs.updates(whole)[20:]
    last = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts")]
    assert runs.difference(*last) is None
    best = SentenceClassifier.from_pretrained(tmp_path / "whole" / "checkpoint_best.pt")
    assert set(best.labels) == {"neg", "pos"} and best.classify(["w1 w11"])[0].label == "pos"


def test_a_checkpoint_of_other_classes_or_another_vocabulary_is_not_gone_on_from(classes: Path, tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "model.pt", classes.parent, "--arch roberta_base")
    with user_error("model.pt: lacks the head of this model; --reset-optimizer begins a new one"):
        runs.train(tmp_path / "run", ROBERTA, "--max-update 1 --restore-file", source, data=classes)
    state = runs.checkpoint.load(source)
    for name in ("encoder.sentence_encoder.embed_tokens.weight", "encoder.lm_head.weight", "encoder.lm_head.bias"):
        state["model"][name] = state["model"][name][:-1]
    runs.checkpoint.save(tmp_path / "other.pt", state)
    for flag in ("--finetune-from-model", "--reset-optimizer --restore-file"):
        with user_error("other.pt: was trained with a dictionary of 24 symbols, but --data-bin has 25"):
            runs.train(tmp_path / "run", ROBERTA, "--max-update 1", flag, tmp_path / "other.pt", data=classes)


def test_the_finetuning_command_reads_the_folders(classes: Path, tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "model.pt", classes.parent, "--arch roberta_base")
    words = ["--cpu --log-format none --seeds 1 --lrs 0.02 --max-epoch 2 --batch-size 8 --path", source]
    words = runs.words(classes, *words, "--save-dir", tmp_path / "out")
    report = finetune.main(options.parse_args_and_arch(finetune.get_finetune_parser(), words))
    assert report["runs"][0]["figures"].keys() == {"accuracy", "score"}


@pytest.mark.parametrize("flags", ["", "--labels no,yes", "--glue-task SST-2"])
def test_a_folder_without_tables_and_sentences_is_named(flags: str, tmp_path: Path) -> None:
    with user_error(f"{tmp_path}: neither train.tsv nor input0; DATA has tables, or binarised input0 and label"):
        task_on(tmp_path, flags)


def test_folders_that_do_not_fit_together_are_one_line(home: Path) -> None:
    data = write_folders(home / "data", "train", PAIRS, home)
    for flags, message in {
        "--num-classes 3": "--num-classes 3: the classes are no, yes; give 2, or leave it out",
        "--num-classes 1 --regression-target": "label/train.label: file not found",
        "--num-classes 2 --regression-target": "label/train.label: file not found",
        "--init-token 99": "--init-token 99: the dictionary has ids up to 24",
        "--labels a,b": "label/train: line 1: label 'yes': not one of a, b",
    }.items():
        with user_error(message):
            task_on(data, flags).dataset("train", training=True)
    write_folders(data, "train", {"label": ["yes", "no", "no"]}, home)
    with user_error("label/train: 3 lines where input0 has 2; preprocess both from the same examples"):
        task_on(data).dataset("train")
    (data / "input1").rename(home / "second")
    with user_error("--sentence-pairs: "):
        task_on(data, "--sentence-pairs")
    (home / "second").rename(data / "input1")
    (data / "input0").rename(home / "first")
    with user_error("data/input0: folder not found"):
        task_on(data)
    (home / "first").rename(data / "input0")
    write_folders(data, "train", {"label": ["a,b", "c"]}, home)
    with user_error("label/dict.txt: label 'a,b' has a comma"):
        task_on(data)
