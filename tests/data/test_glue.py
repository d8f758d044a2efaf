"""The columns of GLUE's files as published."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sentences import write_tsv

from fairseq.data.glue import GLUE, TableLayout, labels_of, layout_of, read_examples, split_file
from fairseq.errors import UserError

# A header and a training row of each task's published files, with what is read from the row.
PUBLISHED = {
    "CoLA": ("", "gj04\t0\t*\tA sentence .", ("A sentence .",), 0),
    "SST-2": ("sentence\tlabel", "fine \t1", ("fine",), 1),
    "MR": ("sentence\tlabel", "dull\t0", ("dull",), 0),
    "MRPC": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t702876\t702977\tHe said "no\tYes',
        ('He said "no', "Yes"),
        1,
    ),
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tmain\tMSRvid\t2012test\t0001\tnone\tnone\tA plane\tAn air plane\t4.75",
        ("A plane", "An air plane"),
        4.75,
    ),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\tWhy?\tHow?\t0", ("Why?", "How?"), 0),
    "MNLI": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t31193\t31193n\tgov\t(\t(\t(\t(\tOne\tTwo\tneutral\tentailment",
        ("One", "Two"),
        2,
    ),
    "QNLI": ("index\tquestion\tsentence\tlabel", "0\tWhen?\tThen.\tnot_entailment", ("When?", "Then."), 0),
    "RTE": ("index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\tentailment", ("A.", "B."), 1),
    "WNLI": ("index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\t1", ("A.", "B."), 1),
}


@pytest.mark.parametrize("name", sorted(GLUE))
def test_the_published_columns_are_read(name: str, tmp_path: Path) -> None:
    header, row, sentences, label = PUBLISHED[name]
    path = tmp_path / "train.tsv"
    path.write_bytes(("\ufeff" + (f"{header}\r\n" if header else "") + f"{row}\r\n").encode())
    (example,) = read_examples(path, layout_of(name.lower()))
    assert (example.sentences, example.label) == (sentences, label)


ALIKE = {("SST-2", "MR"), ("MR", "SST-2"), ("CoLA", "SST-2"), ("CoLA", "MR")}  # CoLA's header is optional


@pytest.mark.parametrize("name", sorted(GLUE))
def test_tables_of_another_task_are_rejected(name: str, tmp_path: Path) -> None:
    for other, (header, row, _, _) in PUBLISHED.items():
        if other == name or (name, other) in ALIKE:
            continue
        path = tmp_path / f"{other}.tsv"
        path.write_text((f"{header}\n" if header else "") + f"{row}\n{row}\n")
        with pytest.raises(UserError, match=f"{other}.tsv: (line [12]: )?(no column|label|[0-9]+ columns)"):
            read_examples(path, GLUE[name])


def test_test_files_need_no_labels_and_colas_has_a_header(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "test.tsv", ["index", "sentence"], [[0, "A ."]])
    (example,) = read_examples(path, GLUE["CoLA"], labelled=False)
    assert (example.sentences, example.label) == (("A .",), None)


def test_incomplete_lines_of_qqp_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = PUBLISHED["QQP"][0].split("\t")
    path = write_tsv(tmp_path / "train.tsv", header, [[1, 2, 3, "a", "b", 1], [1, 2, "broken"], [1, 2, 3, "", "b", 0]])
    with caplog.at_level(logging.WARNING):
        assert len(read_examples(path, GLUE["QQP"])) == 1
    assert caplog.messages == [f"{path}: left out 2 incomplete lines"]


def test_empty_lines_at_the_end_are_no_examples(tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_bytes(b"sentence\tlabel\r\nyes\t1\r\nno\t0\r\n\r\n\n")
    assert [(one.line, one.sentences, one.label) for one in read_examples(file, GLUE["SST-2"])] == [
        (2, ("yes",), 1),
        (3, ("no",), 0),
    ]


def test_valid_is_the_development_file() -> None:
    assert split_file("d", "valid", GLUE["MNLI"]) == Path("d/dev_matched.tsv")
    assert split_file("d", "dev_mismatched", GLUE["MNLI"]) == Path("d/dev_mismatched.tsv")
    assert split_file("d", "train", GLUE["RTE"]) == Path("d/train.tsv")


def test_scores_and_colas_columns_are_checked(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "train.tsv", ["sentence1", "sentence2", "score"], [["a", "b", "high"]])
    with pytest.raises(UserError, match="line 2: label 'high': expected a number"):
        read_examples(path, GLUE["STS-B"])
    path = write_tsv(tmp_path / "train.tsv", [], [["a", 1]])
    with pytest.raises(UserError, match="line 1: 2 columns; expected 4"):
        read_examples(path, GLUE["CoLA"])


def test_classes_of_a_table_are_in_one_order_in_every_process(tmp_path: Path) -> None:
    labels = ["10", "2", "01", "1", "+1", "1.0", "001", "1.00"]
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"text\t{label}\n" for label in labels))
    assert labels_of(path, TableLayout(("sentence",))) == ["+1", "001", "01", "1", "1.0", "1.00", "2", "10"]
