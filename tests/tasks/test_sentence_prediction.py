"""Fine-tuning: learns, resumes to the bit, does not depend on processes, rejects bad files in one
line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import yaml
from mistakes import user_error
from sentences import NO_DROPOUT, SIZES, SMALL, WORDS, write_dictionary, write_pretrained, write_task, write_tsv

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.moses import Moses
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("task")
    return write_dictionary(home / "data-bin"), write_task(home / "MR")


def flags_of(data_bin: Path, *flags: str, task: str = "MR") -> list[Any]:
    return [SMALL, "--glue-task", task, "--data-bin", data_bin, *flags]


def task_on(folder: Path, data_bin: Path, *flags: str, task: str = "MR") -> Any:
    return setup_task(runs.arguments(*flags_of(data_bin, *flags, task=task), data=folder))


def test_a_separable_task_is_learned_above_90_percent(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data_bin, data = folders
    best = "--best-checkpoint-metric score --maximize-best-checkpoint-metric"
    log = runs.train(tmp_path, *flags_of(data_bin, "--max-epoch 12", best), data=data)
    scores = [line["score"] for line in runs.summaries(log, "valid")]
    assert max(scores) > 90 and scores[-1] == runs.summaries(log, "valid")[-1]["accuracy"]


def test_an_interrupted_run_goes_on_to_the_bit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data_bin, data = folders
    flags = flags_of(data_bin)
    whole = runs.train(tmp_path / "whole", *flags, "--max-update 11 --save-interval-updates 5", data=data)
    runs.train(tmp_path / "parts", *flags, "--max-update 5", data=data)
    rest = runs.train(tmp_path / "parts", *flags, "--max-update 11 --save-interval-updates 5", data=data)
    assert runs.updates(rest) == runs.updates(whole)[5:]
    last = "checkpoint_last.pt"
    found = [runs.content(tmp_path / name / last) for name in ("whole", "parts")]
    assert runs.difference(*found) is None


def test_the_gradients_of_two_processes_add_up_to_those_of_one(folders: tuple[Path, Path]) -> None:
    data_bin, data = folders
    args = runs.arguments(*flags_of(data_bin, NO_DROPOUT), data=data)
    torch.manual_seed(1)
    task = setup_task(args)
    model, criterion = task.build_model(args), task.build_criterion(args)
    graph = task.loss_graph(model, criterion)

    def gradients(world: int) -> tuple[dict[str, torch.Tensor], list[int]]:
        model.zero_grad()
        ids: list[int] = []
        for rank in range(world):
            for sample in task.iterator("train", model, criterion, training=True, rank=rank, world_size=world):
                (loss, _, _), _ = task.step(graph, sample, {}, "cpu")
                loss.backward()
                ids += sample["id"].tolist() if sample is not None else []
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, sorted(ids)

    one, two = gradients(1), gradients(3)
    assert one[1] == two[1] == list(range(60))
    assert len(one[0]) == len(list(model.parameters())), "every parameter is trained"
    for name, value in one[0].items():
        torch.testing.assert_close(two[0][name], value, rtol=1e-4, atol=1e-5)


def test_batches_have_rows_of_similar_size_and_the_limit_of_tokens(folders: tuple[Path, Path]) -> None:
    data_bin, data = folders
    args = runs.arguments(*flags_of(data_bin, "--max-tokens 40"), data=data)
    task = setup_task(args)
    model = task.build_model(args)
    batches = list(task.iterator("train", model, task.build_criterion(args), training=True))
    tokens = [sample["net_input"]["src_tokens"] for sample in batches if sample is not None]
    assert all(rows.numel() <= 40 and len(rows) <= 8 for rows in tokens)
    padding = sum(int(rows.eq(1).sum()) for rows in tokens) / sum(rows.numel() for rows in tokens)
    assert padding < 0.1


def test_rows_are_one_or_two_sentences_with_token_types(tmp_path: Path) -> None:
    data_bin = write_dictionary(tmp_path / "bin")
    rows = [[0, "w0 w1", "w2", "entailment"], [1, "w3", "w4 nonsense", "not_entailment"]]
    write_tsv(tmp_path / "train.tsv", ["index", "sentence1", "sentence2", "label"], rows)
    task = task_on(tmp_path, data_bin, task="RTE")
    sample = task.dataset("train", training=True).batch(torch.arange(2).numpy())
    a, b, c, d, e = (4 + number for number in range(5))
    assert sample["net_input"]["src_tokens"].tolist() == [[0, a, b, 2, c, 2], [0, d, 2, e, 3, 2]]
    assert sample["net_input"]["token_types"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert sample["target"].tolist() == [1, 0]
    plain = task_on(tmp_path, data_bin, "--token-types 0", task="RTE")
    assert "token_types" not in plain.dataset("train").batch(torch.arange(2).numpy())["net_input"]


def test_long_rows_lose_the_end_of_the_longer_sentence_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_bin = write_dictionary(tmp_path / "bin")
    long = " ".join(WORDS)
    rows = [[0, long, "w1 w2", "entailment"], [1, long, long, "not_entailment"], [2, "w1", "w2", "entailment"]]
    write_tsv(tmp_path / "train.tsv", ["index", "sentence1", "sentence2", "label"], rows)
    with caplog.at_level(logging.WARNING):
        task = task_on(tmp_path, data_bin, "--tokens-per-sample 12", task="RTE")
        for _ in range(2):
            dataset = task.dataset("train", training=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'train.tsv'}: truncated 2 of 3 examples to 12 tokens"
    ]
    assert dataset.sizes.tolist() == [12, 12, 5]
    tokens, types = dataset.batch(torch.tensor([0, 1]).numpy())["net_input"].values()
    assert tokens[0].tolist() == [0, *range(4, 11), 2, 5, 6, 2] and types[1].tolist() == [0] * 7 + [1] * 5


def test_text_is_encoded_with_the_codes_of_pretraining(tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nn o\nno n\n")
    data_bin = tmp_path / "bin"
    data_bin.mkdir()
    (data_bin / "dict.txt").write_text("non@@ 3\ne</w> 2\ne 2\n. 1\n")
    write_tsv(tmp_path / "train.tsv", ["sentence", "label"], [["none.", 1], ["e", 0]])
    task = task_on(tmp_path, data_bin, f"--bpe-codes {codes}")
    sample = task.dataset("train").batch(torch.arange(1).numpy())
    assert [task.dictionary[i] for i in sample["net_input"]["src_tokens"][0]] == ["<s>", "non@@", "e", ".", "</s>"]


def test_text_is_encoded_with_the_tokenizer_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("None. None, e.\n" * 9)
    flags = "--only-source --tokenizer moses --bpe subword_nmt --learn-bpe 6 --trainpref"
    flags = runs.words(flags, tmp_path / "text", "--destdir", tmp_path / "bin")
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), flags))
    write_tsv(tmp_path / "train.tsv", ["sentence", "label"], [["None, e.", 1], ["e", 0]])
    task = task_on(tmp_path, tmp_path / "bin")
    tokens = task.dataset("train").batch(torch.arange(1).numpy())["net_input"]["src_tokens"][0]
    assert [task.dictionary[i] for i in tokens] == ["<s>", "None", ",", "e", ".", "</s>"]
    with pytest.raises(UserError, match="bin has its tokenizer; leave the flag out"):
        task_on(tmp_path, tmp_path / "bin", "--bpe-codes x")


@pytest.mark.parametrize("separator", [":", ""])
def test_text_is_encoded_with_the_tokenizer_beside_the_dictionary(separator: str, tmp_path: Path) -> None:
    folders = [write_dictionary(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        Tokenizer(Moses()).save(folder, Dictionary.load(folder / "dict.txt").symbols)
    data = ":".join(map(str, folders)) if separator else folders[0] / "dict.txt"
    assert task_on(folders[0], data).encode.tokenizer == Tokenizer(Moses())


def test_a_list_of_folders_may_be_longer_than_a_name(tmp_path: Path) -> None:
    data_bin = write_dictionary(tmp_path / "bin")
    data: Any = ":".join(f"{tmp_path}/{number:08d}" for number in range(1000))
    assert task_on(data, data_bin).dictionary.path == str(data_bin / "dict.txt")


PLUGIN = """
import argparse

from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionTask


@register_task("my_sentences")
class Mine(SentencePredictionTask):
    @classmethod
    def setup_task(cls, args, **kwargs):
        args.mine = 1
        task = super().setup_task(argparse.Namespace(**vars(args), copied=2), **kwargs)
        task.args.mine += 1
        return task
"""


@pytest.mark.parametrize("plugin", [False, True])
def test_classes_of_the_training_table_are_settings_of_the_run_and_not_of_the_caller(
    plugin: bool, tmp_path: Path
) -> None:
    flags: list[Any] = [SMALL, "--data-bin", write_dictionary(tmp_path / "bin"), "--max-update 1"]
    own: dict[str, Any] = {}
    if plugin:
        (tmp_path / "my_sentences").mkdir()
        (tmp_path / "my_sentences" / "__init__.py").write_text(PLUGIN)
        flags += ["--task my_sentences --user-dir", tmp_path / "my_sentences"]
        own = {"mine": 2, "copied": 2}
    for name in ("train", "dev"):
        write_tsv(tmp_path / f"{name}.tsv", ["sentence", "label"], [["w1", "no"], ["w2", "yes"]] * 4)
    args = runs.arguments(*flags, data=tmp_path)
    before = dict(vars(args))
    task = setup_task(args)
    # A plug-in's run also has the settings of fairseq that this package lacks.
    assert {**before, **own, "labels": "no,yes"}.items() <= vars(task.args).items()
    assert ({**before, "mine": 1} if plugin else before).items() <= vars(args).items() and "labels" not in own
    runs.train(tmp_path / "save", *flags, data=tmp_path)
    stored = runs.checkpoint.load(tmp_path / "save" / "checkpoint_last.pt")["args"]
    assert stored.items() >= {**own, "labels": "no,yes"}.items()
    written = yaml.safe_load((tmp_path / "save" / "settings.yaml").read_text())
    assert written["labels"] == "no,yes" and not own.keys() & written.keys(), "no flags: --config would refuse them"
    sys.modules.pop("my_sentences", None)


def test_regression_learns_scores(tmp_path: Path) -> None:
    data_bin = write_dictionary(tmp_path / "bin")
    header = ["index", "sentence1", "sentence2", "score"]
    rows = [[i, " ".join(["w1"] * (i % 5) + ["w9"]), "w2", float(i % 5)] for i in range(30)]
    for name in ("train", "dev"):
        write_tsv(tmp_path / f"{name}.tsv", header, rows)
    log = runs.train(tmp_path / "save", *flags_of(data_bin, "--max-epoch 15", task="STS-B"), data=tmp_path)
    last = runs.summaries(log, "valid")[-1]
    assert last["pearson"] > 80 and last["score"] == pytest.approx((last["pearson"] + last["spearman"]) / 2)


@pytest.mark.parametrize("arch", ["bert_tiny", "electra_tiny"])
def test_weights_come_from_a_checkpoint_without_head_and_notes(
    arch: str, folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_bin, data = folders
    generator = ["--generator-size 0.5"] if arch == "electra_tiny" else []
    source = write_pretrained(tmp_path / "pre.pt", data_bin, "--arch", arch, *generator, tnf=True)
    flags = flags_of(data_bin, f"--arch {arch}", *generator, f"--finetune-from-model {source} --max-update 1 --lr 1e-9")
    with caplog.at_level(logging.INFO):
        runs.train(tmp_path / "save", *flags, data=data)
    (said,) = [r.getMessage() for r in caplog.records if "parameters loaded" in r.getMessage()]
    head = "encoder.discriminator_head.dense.weight" if generator else "encoder.lm_head.dense.weight"
    unused, new = said.split("unused")[1].split("initialized")
    assert head in unused and "notes.table" in unused and "classification_heads" not in unused
    assert "classification_heads.sentence_classification_head.out_proj.weight" in new and "encoder." not in new
    before, after = (runs.checkpoint.read(p)["model"] for p in (source, tmp_path / "save" / "checkpoint_last.pt"))
    name = "encoder.sentence_encoder.layers.0.fc1.weight"
    torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    assert {n.split(".")[0] for n in after} == {"encoder", "classification_heads"}


def test_the_dictionary_is_found_beside_a_sharded_checkpoint(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, data = folders
    run = write_dictionary(tmp_path / "run")
    shards = run / "checkpoint_1_5.parts"
    shards.mkdir()
    (shards / "plain.pt").write_text("{}")
    last = run / "checkpoint_last.pt"
    last.symlink_to(shards.name)
    for source in (run, last, shards):
        task = setup_task(runs.arguments(SMALL, "--glue-task MR --finetune-from-model", source, data=data))
        assert Path(task.dictionary.path) == run / "dict.txt"


BAD_FILES = {
    "column": ("sentence\tmark\na\t1\n", "train.tsv: no column 'label'; the columns are sentence, mark"),
    "sentence": ("text\tlabel\na\t1\n", "train.tsv: no column 'sentence'"),
    "unknown label": ("sentence\tlabel\na\t0\nb\t7\n", "train.tsv: line 3: label '7': not one of 0, 1"),
    "one class": ("sentence\tlabel\na\t1\nb\t1\n", "all 2 examples have the same label"),
    "empty sentence": ("sentence\tlabel\na\t0\n \t1\n", "train.tsv: line 3: empty sentence"),
    "missing field": ("sentence\tlabel\na\n", "train.tsv: line 2: 1 columns where the header has 2"),
    "only header": ("sentence\tlabel\n", "train.tsv: no examples"),
    "empty": ("", "train.tsv: empty file"),
    "not UTF-8": (b"sentence\tlabel\n\xff\t1\n", "train.tsv: line 2, byte offset 15: not UTF-8"),
    "missing": (None, "train.tsv: file not found"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_line(kind: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[kind]
    data_bin = write_dictionary(tmp_path / "bin")
    if content is not None:
        (tmp_path / "train.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        task_on(tmp_path, data_bin).dataset("train", training=True)


def test_bad_flags_are_one_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data_bin, data = folders
    for flags, message in {
        "--glue-task RTF": "--glue-task RTF: no such task.*RTE",
        f"--data-bin {tmp_path}": f"--data-bin {tmp_path}/dict.txt: file not found",
        "--data-bin nowhere": "nowhere: folder not found",
        "--labels no,yes": "--labels: --glue-task MR sets columns and labels",
        "--regression-target": "--regression-target: --glue-task MR sets columns and labels",
        "--sentence-pairs": "--sentence-pairs: --glue-task MR sets columns and labels",
    }.items():
        with user_error(message):
            setup_task(runs.arguments(*flags_of(data_bin), flags, data=data))
    with pytest.raises(UserError, match="^regression_target: glue_task MR sets"):  # in Python, names of settings
        setup_task(runs.arguments(*flags_of(data_bin), "--regression-target", data=data))
    generic = [flag for flag in flags_of(data_bin) if flag not in ("--glue-task", "MR")]
    with user_error("--labels yes: expected two or more"):
        setup_task(runs.arguments(*generic, "--labels yes", data=data))
    with pytest.raises(UserError, match="codes: file not found"):
        task_on(data, data_bin, f"--bpe-codes {tmp_path / 'codes'}").dataset("train")
    causal = SMALL.replace(SIZES, "--decoder-layers 1").replace("bert_tiny", "lstm_lm")
    args = runs.arguments(causal, "--glue-task MR --data-bin", data_bin, data=data)
    with pytest.raises(UserError, match="LSTMLanguageModel cannot be fine-tuned"):
        setup_task(args).build_model(args)
    for name in ("a.b", "keys"):
        args = runs.arguments(*flags_of(data_bin), "--classification-head-name", name, data=data)
        with user_error(f"--classification-head-name {name}: not possible"):
            setup_task(args).build_model(args)
    args = runs.arguments(*flags_of(data_bin), "--arch tnf_bert_tiny", data=data)
    with user_error("fine-tuning drops notes; use --arch bert_tiny"):
        setup_task(args).build_model(args)
