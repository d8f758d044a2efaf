"""Training data in several files is one corpus, in several folders an epoch each; dictionaries must
agree."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from fairseq.config import options
from fairseq.data.folders import check_split, corpus_prefixes, data_folders, load_dictionary, open_corpus
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import TOKENIZERS, Tokenizer
from fairseq_cli import preprocess
from fairseq_cli.common import get_training_parser


def folder(path: Path, **splits: str) -> Path:
    """A data folder whose splits are those of the golden one."""
    path.mkdir()
    shutil.copy(runs.DATA / "dict.txt", path)
    for split, source in splits.items():
        for kind in ("bin", "idx"):
            shutil.copy(runs.DATA / f"{source}.{kind}", path / f"{split}.{kind}")
    return path


def test_a_split_that_is_missing_names_the_splits_and_not_the_notes_of_their_words(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", **{"train": "valid", "train.notes": "valid", "valid": "valid"})
    with pytest.raises(UserError, match="test.idx: file not found; the splits in this folder are train, valid$"):
        check_split(data, "test")


def test_train_train1_and_so_on_are_one_corpus_as_far_as_numbers_go(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", train="valid", train1="test", train2="valid", train4="test", valid="valid")
    assert [Path(path).name for path in corpus_prefixes(data, "train", combine=True)] == ["train", "train1", "train2"]
    dictionary = load_dictionary(data)
    joined = open_corpus(data, "train", dictionary, combine=True)
    parts = [IndexedCorpus(str(data / name)) for name in ("train", "train1", "train2")]
    with IndexedWriter(tmp_path / "whole", parts[0].tokens.dtype) as writer:
        for part in parts:
            writer.add(part.tokens, part.sizes)
    whole = IndexedCorpus(str(tmp_path / "whole"))
    assert np.array_equal(joined.tokens, whole.tokens) and np.array_equal(joined.offsets, whole.offsets)
    for mode in ("none", "complete", "eos"):
        one, other = (TokenBlocks(corpus, 50, mode, pad=1, eos=2, shuffle_lines=None) for corpus in (joined, whole))
        for index in (0, len(one) // 2, len(one) - 1):
            batch = np.array([index, 0, len(one) // 3])
            assert one.batch(batch)["target"].tolist() == other.batch(batch)["target"].tolist()
    shuffled = [
        TokenBlocks(corpus, 50, "none", pad=1, eos=2, shuffle_lines=3).at_epoch(2) for corpus in (joined, whole)
    ]
    found, expected = (blocks.batch(np.arange(len(blocks)))["target"].tolist() for blocks in shuffled)
    assert found == expected


def test_only_training_combines_files(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", train="valid", train1="test", valid="valid", valid1="test")
    task: Any = setup_task(runs.arguments(runs.BASELINE, data=data))
    one, two = (len(IndexedCorpus(str(data / name)).tokens) for name in ("train", "train1"))
    assert len(task.dataset("train", training=True).corpus.tokens) == one + two
    assert len(task.dataset("train").corpus.tokens) == len(task.corpus("train").tokens) == one


@pytest.mark.parametrize(("kind", "left"), [(runs.BASELINE, 0), (runs.SHORTFORMER, 1)])
def test_folders_take_an_epoch_each_in_turn_and_are_resumed(tmp_path: Path, kind: str, left: int) -> None:
    first = folder(tmp_path / "1", valid="valid", test="test")
    second = folder(tmp_path / "2", valid="test")
    flags = [kind, runs.NO_DROPOUT, "--optimizer nag --max-tokens 800 --max-tokens-valid 3000 --max-epoch 3"]

    def train(save_dir: Path, data: str, *more: str) -> list[dict[str, Any]]:
        return runs.train(save_dir, *flags, *more, data=data)  # type: ignore[arg-type]

    whole = train(tmp_path / "whole", f"{first}:{second}", "--no-save")
    epochs = [[line["epoch"] for line in runs.updates(whole)].count(epoch) for epoch in (1, 2, 3)]
    once = "--max-epoch 1 --no-save --disable-validation"
    alone = [len(runs.losses(train(tmp_path / "alone", str(data), once))) for data in (first, second)]
    assert epochs == [alone[0], alone[1], alone[0]] and alone[0] != alone[1]
    validations = runs.summaries(whole, "test")
    assert len(validations) >= 3
    # At the end of the first folder's epoch, or within that of the second.
    update = epochs[0] + (alone[1] - 1) * left
    train(tmp_path / "again", f"{first}:{second}", f"--max-update {update} --no-epoch-checkpoints")
    rest = train(tmp_path / "again", f"{first}:{second}", "--no-epoch-checkpoints")
    assert runs.losses(rest) == runs.losses(whole)[update:]


def test_folders_must_have_one_dictionary(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "1", valid="valid"), folder(tmp_path / "2", valid="test")
    assert data_folders(f"{one}:{two}") == [one, two]
    assert data_folders(":") == [Path(":")], "one that is not there, not none"
    assert load_dictionary(f"{one}:{two}") == Dictionary.load(one / "dict.txt")
    (two / "dict.txt").write_text("other 3\n")
    with pytest.raises(UserError) as caught:
        load_dictionary(f"{one}:{two}")
    assert caught.value.with_flags == (
        f"{two}/dict.txt: differs from {one}'s; preprocess {two} with --srcdict {one}/dict.txt"
    )
    with pytest.raises(UserError, match=f"{tmp_path}/3: folder not found"):
        load_dictionary(f"{one}:{tmp_path}/3")


@pytest.mark.parametrize("content", ["a 2\nb 1\n", "a 5\nb 4\n"])
def test_the_dictionary_of_each_folder_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    folders = [tmp_path / name for name in "123"]
    for path, text in zip(folders, ("a 2\nb 1\n", content, content), strict=True):
        path.mkdir()
        (path / "dict.txt").write_text(text)
    opened: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(str(path)) or read_bytes(path))
    assert load_dictionary(":".join(map(str, folders))).symbols[4:] == ["a", "b"]
    assert opened == [f"{path}/dict.txt" for path in folders]


def test_a_dictionary_that_is_exchanged_with_the_notes_or_not_the_tokenizers_is_found_without_checksums(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.txt").write_text("a a a b b c\nd a b\n")
    flags = ["--only-source", "--notes", "--note-min-count", "1", "--note-max-count", "2", "--tokenizer", "space"]
    data = tmp_path / "data"
    words = [*flags, "--trainpref", str(tmp_path / "train.txt"), "--destdir", str(data)]
    preprocess.main(preprocess.get_preprocessing_parser().parse_args(words))
    (data / "checksums.txt").unlink()
    dictionary = load_dictionary(data)
    words_file, notes_file = (data / name for name in ("dict.txt", "notes.txt"))
    contents = words_file.read_bytes(), notes_file.read_bytes()
    notes_file.write_bytes(contents[0])
    words_file.write_bytes(contents[1])
    with pytest.raises(UserError, match=r"/tokenization\.json: made for another dict\.txt; use both files of one data"):
        load_dictionary(data)
    (data / "tokenization.json").unlink()
    with pytest.raises(UserError, match=r"/train\.bin: token \d+ is number \d+, but the dictionary has \d+ symbols"):
        open_corpus(data, "train", load_dictionary(data))
    words_file.write_bytes(contents[0])
    assert load_dictionary(data) == dictionary


def test_a_folder_with_a_colon_in_its_name_is_one_folder(tmp_path: Path) -> None:
    assert data_folders(folder(tmp_path / "a:b", valid="valid")) == [tmp_path / "a:b"]


def test_evaluation_reads_the_first_folder(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "1", test="valid"), folder(tmp_path / "2", test="test")
    parser = get_training_parser()
    args = options.parse_args_and_arch(parser, [f"{one}:{two}", *runs.words(runs.BASELINE)])
    task: Any = setup_task(args)
    assert np.array_equal(task.corpus("test").tokens, IndexedCorpus(str(one / "test")).tokens)


def test_a_thousand_folders_are_more_than_a_name_may_have(tmp_path):
    names = [f"{tmp_path}/{number:08d}" for number in range(1000)]
    assert data_folders(":".join(names)) == [Path(name) for name in names]


def test_folders_with_one_dictionary_and_two_tokenizers_are_refused(tmp_path: Path) -> None:
    one, other, plain = (folder(tmp_path / name, train="valid") for name in ("one", "other", "plain"))
    symbols = Dictionary.load(runs.DATA / "dict.txt").symbols
    for path, name in ((one, "space"), (other, "moses")):
        Tokenizer(words=TOKENIZERS[name]()).save(path, symbols)
    assert load_dictionary(f"{one}:{plain}") == load_dictionary(plain, [one]), "tokens need no tokenizer"
    expected = f"{other}/tokenization.json: differs from {one}'s; preprocess {other} with srcdict {one}/dict.txt"
    for folders in ((f"{one}:{other}",), (one, [plain, other])):
        with pytest.raises(UserError, match=re.escape(expected)):
            load_dictionary(*folders)
