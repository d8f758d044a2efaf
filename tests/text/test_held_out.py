"""A text of its own for each split, or parts of one: what is held out, where it is cut, and what is
written down."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import runs
from mistakes import user_error

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary
from fairseq.text.held_out import split_text
from fairseq.text.raw_text import TextFormat
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

SHARES = {"valid": 0.1, "test": 0.2}


def preprocessed(folder: Path, *flags: Any) -> Path:
    words = runs.words("--destdir", folder / "bin", *flags)
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), words))
    return folder / "bin"


def parts(
    path: Path, form: TextFormat, folder: Path, shares: dict[str, float] = SHARES
) -> tuple[list[str], list[tuple[int, int]]]:
    folder.mkdir()
    found = split_text([str(path)], form, shares, folder)
    assert list(found) == ["train", *shares]
    places = [part.place.split() for part in found.values()]
    return [Path(part.path).read_text() for part in found.values()], [(int(p[1]), int(p[3])) for p in places]


def test_the_end_is_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {n:03}\n" for n in range(100))
    (tmp_path / "only.txt").write_text(text)
    texts, lines = parts(tmp_path / "only.txt", TextFormat(), tmp_path / "parts")
    assert "".join(texts) == text and lines == [(1, 70), (71, 80), (81, 100)]


def test_a_cut_is_behind_a_blank_line_where_there_are_some(tmp_path: Path) -> None:
    text = "".join(f"line {n:03}\n" + "\n" * (n % 9 == 8) for n in range(100))
    (tmp_path / "only.txt.gz").write_bytes(gzip.compress(text.encode()))
    texts, lines = parts(tmp_path / "only.txt.gz", TextFormat(), tmp_path / "parts")
    assert "".join(texts) == text
    assert all(part.endswith("\n\n") for part in texts[:2]) and lines[0][1] + 1 == lines[1][0]
    assert 0.7 < len(texts[0]) / len(text) < 0.8


def test_documents_longer_than_a_part_are_cut_and_leave_no_part_empty(tmp_path: Path) -> None:
    text = "".join(f"line {n:03}\n" + "\n" * (n == 96) for n in range(100))
    (tmp_path / "only.txt").write_text(text)
    texts, lines = parts(tmp_path / "only.txt", TextFormat(), tmp_path / "parts")
    assert "".join(texts) == text and lines == [(1, 71), (72, 81), (82, 101)]


def test_rows_of_json_lines_are_documents(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {n:03}\n\nsecond"}) + "\n" for n in range(50)]
    (tmp_path / "only.jsonl").write_text("".join(rows))
    texts, lines = parts(tmp_path / "only.jsonl", TextFormat("text"), tmp_path / "parts")
    assert texts == ["".join(rows[:35]), "".join(rows[35:40]), "".join(rows[40:])] and lines[2] == (41, 50)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_share_is_one_of_the_lines_whatever_their_lengths_and_ends(tmp_path: Path, end: str) -> None:
    lines = [f"{'long ' * 30}{n}" for n in range(90)] + [f"{n}" for n in range(10)]
    (tmp_path / "only.txt").write_bytes("".join(line + end for line in lines).encode())
    texts, places = parts(tmp_path / "only.txt", TextFormat(), tmp_path / "parts", {"valid": 0.05})
    assert places == [(1, 95), (96, 100)] and "".join(texts).splitlines() == lines


@pytest.mark.parametrize("text", ["word " * 400, "文字" * 400])
def test_one_long_line_is_cut_at_a_space_or_else_between_letters(tmp_path: Path, text: str) -> None:
    (tmp_path / "only.txt").write_text(text)
    texts, _ = parts(tmp_path / "only.txt", TextFormat(), tmp_path / "parts")
    assert "".join(texts) == text + "\n" and [round(len(part) / len(text), 2) for part in texts] == [0.7, 0.1, 0.2]
    assert all(part.endswith((" ", "文", "字")) for part in texts[:2])


@pytest.mark.parametrize(
    "given", ["{}/many", "{}/many/*.txt", "{0}/many/a.txt,{0}/many/b.txt", "{0}/many/a.txt {0}/many/b.txt"]
)
def test_the_end_of_several_texts_is_held_out(tmp_path: Path, given: str) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "b.txt").write_text("".join(f"b{n}\n" for n in range(50)))
    (tmp_path / "many" / "a.txt").write_text("\n".join(f"a{n}" for n in range(50)))
    data = preprocessed(tmp_path, "--trainpref", given.format(tmp_path), "--valid-fraction 0.05")
    dictionary = Dictionary.load(data / "dict.txt")
    assert [len(IndexedCorpus(str(data / split))) for split in ("train", "valid")] == [95, 5]
    assert {"a0", "a49", "b44"} < set(dictionary.symbols) and "b45" not in dictionary.symbols
    whole = preprocessed(tmp_path / "whole", "--trainpref", given.format(tmp_path))
    assert [len(IndexedCorpus(str(whole / split))) for split in ("train", "train1")] == [50, 50]


def test_one_text_makes_three_splits_and_the_log_says_which_lines(tmp_path: Path) -> None:
    lines = [f"w{n} same" for n in range(100)]
    (tmp_path / "only.txt").write_text("\n".join(lines) + "\n")
    data = preprocessed(tmp_path, "--trainpref", tmp_path / "only.txt", "--valid-fraction 0.05 --test-fraction 0.1")
    dictionary = Dictionary.load(data / "dict.txt")
    assert len(IndexedCorpus(str(data / "train"))) == 85 and len(IndexedCorpus(str(data / "test"))) == 10
    assert "w84" in dictionary.symbols and "w85" not in dictionary.symbols, "the dictionary is of the training text"
    log = (data / "preprocess.log").read_text()
    only = tmp_path / "only.txt"
    assert f"train: {only}, lines 1 to 85\nvalid: {only}, lines 86 to 90\ntest: {only}, lines 91 to 100\n" in log
    assert sorted(path.name for path in data.iterdir() if path.is_dir()) == []


def test_subwords_are_learned_from_what_is_left_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("aaaa bbbb\n" * 90 + "zqzqzqz\n" * 20)
    data = preprocessed(tmp_path, "--trainpref", tmp_path / "only.txt", "--valid-fraction 0.2 --learn-bpe 262")
    symbols = Dictionary.load(data / "dict.txt").symbols
    assert "zq" not in symbols and any("aa" in symbol for symbol in symbols)
    assert json.loads((data / "tokenization.json").read_text())["bpe"]["name"] == "hf", "the kind without --bpe"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--validpref {only} --valid-fraction 0.1", "--valid-fraction 0.1: the valid split has a text of its own"),
        ("--test-fraction 0.5 --valid-fraction 0.5", "--valid-fraction 0.5: nothing is left to train on"),
        ("--test-fraction 0.5 --dict-only", "--test-fraction 0.5: no split is written with --dict-only"),
        ("--valid-fraction 0.01 --test-fraction 0.01", "only.txt: too short to leave text for valid"),
    ],
)
def test_what_cannot_be_held_out_is_refused(flags: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("a\n")
    flags = flags.format(only=tmp_path / "only.txt")
    with user_error(message):
        preprocessed(tmp_path, "--trainpref", tmp_path / "only.txt", flags)
    assert not (tmp_path / "bin").exists()


def test_a_mistake_in_the_text_has_the_line_of_the_file_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_bytes(b"a\n" * 99 + b"\xff\n")
    with pytest.raises(UserError, match="only.txt: line 100: 0xff is not UTF-8"):
        preprocessed(tmp_path, "--trainpref", tmp_path / "only.txt", "--valid-fraction 0.1")


def test_data_without_a_validation_split_says_what_to_do_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only.txt").write_text("a b c\n" * 200)
    data = preprocessed(tmp_path, "--trainpref", tmp_path / "only.txt")
    monkeypatch.setattr("fairseq.distributed.run", lambda job: pytest.fail("processes were started"))
    flags = runs.SMALL.replace("--train-subset valid --valid-subset test", "--max-update 1")
    with pytest.raises(UserError, match="valid.idx: file not found.*are train: hold out a part .* --valid-fraction"):
        runs.train(tmp_path / "run", flags, data=data)
