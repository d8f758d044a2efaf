"""Data folders take an epoch each: one is open, the next one is opened in the background."""

from __future__ import annotations

import gc
import logging
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from fairseq.data import folders
from fairseq.data.iterator import EpochData, EpochDatasets, EpochIterator
from fairseq.data.samplers import StreamSampler
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.tasks import setup_task

BACKGROUND = "next data folder_0"


class Line:
    """A corpus of one line of one token, repeated."""

    def __init__(self, token: int, length: int) -> None:
        self.tokens = np.full(length, token, np.uint16)
        self.sizes = np.array([length], np.int32)
        self.offsets = np.array([0, length])


class Opener:
    """Opener of folder *token*, which has *token* blocks; a record of the threads that opened
    it."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.threads: list[str] = []
        self.failures = 0
        self.opened: list[weakref.ref[TokenBlocks]] = []

    def __call__(self) -> EpochData:
        self.threads.append(threading.current_thread().name)
        if self.failures:
            self.failures -= 1
            raise UserError(f"folder {self.token}: damaged")
        blocks = TokenBlocks(Line(self.token, 5 * self.token), 5, "none", pad=1, eos=2)
        self.opened.append(weakref.ref(blocks))
        return blocks, StreamSampler(len(blocks), 1)


def tokens(iterator: EpochIterator) -> list[int]:
    return [int(sample["target"][0, 0]) for sample in iterator if sample is not None]


def test_each_epoch_reads_its_folder_and_the_next_is_opened_meanwhile() -> None:
    openers = [Opener(token) for token in (10, 11, 12)]
    iterator = EpochIterator(EpochDatasets(openers), prefetch=0)
    assert not any(opener.threads for opener in openers), "nothing is opened before it is needed"
    iterator.open()
    assert [len(opener.threads) for opener in openers] == [1, 0, 0]
    found = [tokens(iterator) for _ in range(4)]
    assert found == [[token] * token for token in (10, 11, 12, 10)]
    iterator.open()
    main = threading.current_thread().name
    assert [opener.threads for opener in openers] == [[main, BACKGROUND], [BACKGROUND, BACKGROUND], [BACKGROUND]]
    gc.collect()
    alive = [sum(blocks() is not None for blocks in opener.opened) for opener in openers]
    assert alive == [0, 1, 0], "the data of epochs that are over are gone"


@pytest.mark.parametrize("epoch, read", [(1, 0), (3, 0), (3, 5), (5, 7), (6, 11)])
def test_resuming_opens_the_folder_of_the_epoch_only_and_reads_the_rest(epoch: int, read: int) -> None:
    openers = [Opener(token) for token in (10, 11, 12)]
    whole = EpochIterator(EpochDatasets([Opener(token) for token in (10, 11, 12)]), prefetch=0)
    whole.load_state_dict({"epoch": epoch, "iterations_in_epoch": 0})
    batches = iter(whole)
    for _ in range(read):
        next(batches)
    resumed = EpochIterator(EpochDatasets(openers), prefetch=0)
    resumed.load_state_dict(whole.state_dict())
    resumed.open()
    assert [len(opener.threads) for opener in openers] == [int(n == (epoch - 1) % 3) for n in range(3)]
    token = 10 + (epoch - 1) % 3
    assert tokens(resumed) == [token] * (token - read)


def test_the_end_of_an_epoch_opens_nothing_by_itself() -> None:
    openers = [Opener(token) for token in (10, 11)]
    iterator = EpochIterator(EpochDatasets(openers), prefetch=0)
    iterator.load_state_dict({"epoch": 1, "iterations_in_epoch": 0})
    assert (iterator.iterations_in_epoch, iterator.end_of_epoch) == (0, False)
    assert not any(opener.threads for opener in openers)


def test_a_folder_that_cannot_be_opened_meanwhile_is_tried_again_when_its_epoch_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    openers = [Opener(10), Opener(11)]
    openers[1].failures = 1
    iterator = EpochIterator(EpochDatasets(openers), prefetch=0)
    with caplog.at_level(logging.WARNING):
        assert tokens(iterator) == [10] * 10
        assert tokens(iterator) == [11] * 11
    assert "the next epoch's data cannot be read yet: folder 11: damaged" in caplog.text
    openers[1].failures = 2
    assert tokens(iterator) == [10] * 10
    with pytest.raises(UserError, match="folder 11: damaged"):
        tokens(iterator)


def test_closing_waits_for_what_is_being_opened_and_drops_it() -> None:
    openers = [Opener(10), Opener(11)]
    datasets = EpochDatasets(openers)
    datasets.of(1)
    datasets.open_next(1)
    datasets.close()
    gc.collect()
    assert not any(thread.name == BACKGROUND for thread in threading.enumerate())
    assert openers[1].threads == [BACKGROUND] and openers[1].opened[0]() is None


def data_folders(root: Path, count: int) -> list[Path]:
    found = []
    for number in range(count):
        folder = root / f"data{number}"
        folder.mkdir(parents=True)
        shutil.copy(runs.DATA / "dict.txt", folder)
        for kind in ("bin", "idx"):
            shutil.copy(runs.DATA / f"valid.{kind}", folder / f"train.{kind}")
            shutil.copy(runs.DATA / f"test.{kind}", folder / f"valid.{kind}")
        found.append(folder)
    return found


def test_training_reads_one_of_many_folders_before_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = data_folders(tmp_path, 4)
    opened: list[tuple[str, str]] = []
    open_corpus = folders.open_corpus

    def note(folder: Path, split: str, *args: Any, **how: Any) -> Any:
        opened.append((Path(folder).name, split))
        return open_corpus(folder, split, *args, **how)

    monkeypatch.setattr("fairseq.tasks.language_modeling.open_corpus", note)
    flags = runs.BASELINE.replace("--train-subset valid --valid-subset test", "")
    args = runs.arguments(flags, data=":".join(map(str, names)))  # type: ignore[arg-type]
    task = setup_task(args)
    model, criterion = task.build_model(args), task.build_criterion(args)
    batches = task.iterator("train", model, criterion, training=True)
    validation = task.iterator("valid", model, criterion, training=False)
    assert opened == [("data0", "valid")], "validation data are read at once, training data with their epoch"
    batches.open()
    assert opened == [("data0", "valid"), ("data0", "train")] and len(validation) > 0
    (names[3] / "train.bin").unlink()
    with pytest.raises(UserError, match=r"data3/train\.bin: file not found"):
        task.iterator("train", model, criterion, training=True)


def test_a_run_whose_next_folder_is_damaged_keeps_the_epoch_that_it_trained(tmp_path: Path) -> None:
    names = data_folders(tmp_path, 2)
    (names[1] / "train.bin").write_bytes((names[1] / "train.bin").read_bytes()[:-2])
    flags = runs.BASELINE.replace("--train-subset valid --valid-subset test", "")
    with pytest.raises(UserError, match=r"data1/train\.bin: .* truncated"):
        runs.train(tmp_path / "run", flags, "--disable-validation --max-epoch 2", data=":".join(map(str, names)))  # type: ignore[arg-type]
    assert (tmp_path / "run" / "checkpoint1.pt").exists() and (tmp_path / "run" / "checkpoint_last.pt").exists()
