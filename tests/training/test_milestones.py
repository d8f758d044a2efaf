"""Checkpoints by words or tokens read are those of a run that ends there, on any number of
processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import warm
from small_runs import FIVE

from fairseq.config.settings import training_settings
from fairseq.errors import UserError
from fairseq.training.milestones import Milestones

FLAGS = [
    FIVE,
    runs.ADAM,
    runs.DROPOUT,
    "--max-tokens-valid 64 --no-epoch-checkpoints --train-subset train --save-interval-words",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with training text of 2,670 tokens, in 167 blocks, and 2,000 words."""
    return a_folder(tmp_path_factory.mktemp("data"), 2000)


def a_folder(folder: Path, *words: int) -> Path:
    """A data folder with so many words in ``train``, ``train1``, …, which have 2,670 tokens
    each."""
    shutil.copy(runs.DATA / "dict.txt", folder)
    for number, count in enumerate(words):
        for suffix in ("bin", "idx"):
            shutil.copy(runs.DATA / f"valid.{suffix}", folder / f"train{number or ''}.{suffix}")
            shutil.copy(runs.DATA / f"test.{suffix}", folder)
        counts = {"bytes": 9 * count, "words": count, "lines": 5}
        (folder / f"train{number or ''}.raw.json").write_text(json.dumps(counts))
    return folder


def saved(folder: Path) -> dict[int, int]:
    """The updates of each checkpoint by words, by its words."""
    paths = {int(path.stem.split("_")[2]): path for path in folder.glob("checkpoint_words_*.pt")}
    return {words: runs.content(path)["optimizer_history"][-1]["num_updates"] for words, path in sorted(paths.items())}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, which read 2000 · 40n // 167 words in the first n of their 5 updates."""
    folder = tmp_path_factory.mktemp("whole")
    runs.train(folder, *FLAGS, "300:3,1K --max-epoch 2", data=data)
    return folder


def test_a_checkpoint_is_saved_after_each_number_of_words(whole: Path) -> None:
    # Words after each update: 479 958 1437 1916 2000 2479 2958 3437 3916 4000. The second one
    # passes 600 and 900.
    assert saved(whole) == {300: 1, 900: 2, 1000: 3, 2000: 5, 3000: 8, 4000: 10}


@pytest.mark.parametrize("words", [300, 2000])
def test_it_is_that_of_a_run_stopped_there_and_another_run_goes_on_from_it(
    words: int, whole: Path, data: Path, tmp_path: Path
) -> None:
    stop = saved(whole)[words]
    runs.train(tmp_path / "stopped", *FLAGS, f"300:3,1K --max-update {stop}", data=data)
    name = f"checkpoint_words_{words}.pt"
    for file in (name, "checkpoint_last.pt"):
        assert runs.difference(runs.content(tmp_path / "stopped" / file), runs.content(whole / name)) is None

    runs.train(tmp_path / "next", *FLAGS, "300:3,1K --max-epoch 2 --restore-file", whole / name, data=data)
    assert saved(tmp_path / "next") == {key: value for key, value in saved(whole).items() if value > stop}
    for file in (tmp_path / "next").glob("checkpoint_*.pt"):
        if file.name != "checkpoint_best.pt":
            assert runs.difference(runs.content(file), runs.content(whole / file.name)) is None


def test_a_run_of_more_epochs_goes_on_from_the_last_one(whole: Path, data: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "300:3,1K --max-epoch 3"]
    runs.train(tmp_path / "three", *flags, data=data)
    runs.train(tmp_path / "next", *flags, "--restore-file", whole / "checkpoint_words_4000.pt", data=data)
    assert list(saved(tmp_path / "next")) == [5000, 6000]
    for name in ("checkpoint_words_5000.pt", "checkpoint_words_6000.pt", "checkpoint_last.pt"):
        ours, uninterrupted = (runs.content(tmp_path / folder / name) for folder in ("next", "three"))
        assert runs.difference(ours, uninterrupted) is None


# Updates of two batches, each a step of 20 rows in the first stage and 10 in the second. Both have
# 9 steps an epoch.
STAGED = [runs.SHORTFORMER, runs.ADAM, runs.DROPOUT, "--decoder-layers 1 --max-valid-steps 1 --no-epoch-checkpoints"]
STAGED += ["--train-subset train --max-tokens 320 --update-freq 2 --save-interval-words 500 --stages"]


@pytest.fixture(scope="module")
def staged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages with memory: its words after each update are 444 888 1333, 1777 2000 2444
    2888 3333."""
    folder = tmp_path_factory.mktemp("staged")
    runs.train(folder, *STAGED, "16:3,32:8", data=data)
    return folder


def test_a_number_of_words_that_one_stage_read_is_not_read_again_by_the_next(staged: Path) -> None:
    assert saved(staged) == {500: 2, 1000: 3, 1500: 4, 2000: 5, 2500: 7, 3000: 8}


@pytest.mark.parametrize(("words", "stages"), [(1000, "16:3"), (2500, "16:3,32:7")])
def test_in_a_stage_too_it_is_that_of_a_run_stopped_there_and_another_run_goes_on_from_it(
    words: int, stages: str, staged: Path, data: Path, tmp_path: Path
) -> None:
    file = f"checkpoint_words_{words}.pt"
    runs.train(tmp_path / "stopped", *STAGED, stages, data=data)
    ours, stopped = (runs.content(folder / file) for folder in (staged, tmp_path / "stopped"))
    for state in (ours, stopped):
        del state["extra_state"]["stage"]["max_update"]  # the setting that stops it
    assert runs.difference(ours, stopped) is None

    runs.train(tmp_path / "next", *STAGED, "16:3,32:8 --restore-file", staged / file, data=data)
    assert saved(tmp_path / "next") == {key: value for key, value in saved(staged).items() if key > words}
    last = (runs.content(folder / "checkpoint_last.pt") for folder in (staged, tmp_path / "next"))
    assert runs.difference(*last) is None


def test_two_processes_save_after_the_words_of_both(whole: Path, data: Path, tmp_path: Path) -> None:
    flags = [FLAGS, "300:3,1K --max-epoch 2 --max-tokens 320 --distributed-world-size 2"]
    result = warm.command("train.py", data, "--save-dir", tmp_path, *flags)
    assert result.returncode == 0, result.stderr
    assert saved(tmp_path) == saved(whole)


# --- what is counted


def milestones(data: Any, *flags: str) -> Milestones:
    settings = training_settings(runs.arguments(FIVE, "--train-subset train", *flags, data=data))
    return Milestones(settings.checkpoint, settings.data_path, settings.data.train_subset)


class Reading:
    """A run that reads, and asks for the name of a checkpoint at each place."""

    def __init__(self, milestones: Milestones) -> None:
        self.milestones, self.amount = milestones, 0

    def name_at(self, batches: Any) -> str:
        before, self.amount = self.amount, self.milestones.amount(batches)
        return self.milestones.passed(before, self.amount)


def place(epoch: int, read: int) -> Any:
    return SimpleNamespace(epoch=epoch, read=read, sampler=SimpleNamespace(layout=SimpleNamespace(units=10)))


def test_words_are_those_of_all_files_and_of_the_folder_of_each_epoch(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    both = f"{a_folder(tmp_path / 'a', 30, 70)}:{a_folder(tmp_path / 'b', 400)}"
    read = milestones(both, "--save-interval-words 20")
    places = ((1, 0), (1, 1), (1, 10), (2, 3), (2, 10), (3, 5), (4, 1))
    assert [read.amount(place(epoch, share)) for epoch, share in places] == [0, 10, 100, 220, 500, 550, 640]
    tokens = Reading(milestones(both, "--save-interval-tokens 2000"))
    assert tokens.name_at(place(1, 5)) == "checkpoint_tokens_2000.pt" and tokens.amount == 2670
    assert tokens.name_at(place(2, 10)) == "checkpoint_tokens_8000.pt" and tokens.amount == 3 * 2670


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3", [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
        ("3:2", [3, 6]),
        ("3:2,4", [3, 6, 8, 12, 16, 20, 24, 28]),
        ("1:4,10:2,30", [1, 2, 3, 4, 10, 20, 30]),
        ("1K:10,10K", []),
    ],
)
def test_each_interval_holds_up_to_its_last_multiple(text: str, found: list[int], tmp_path: Path) -> None:
    read = Reading(milestones(a_folder(tmp_path, 10), "--save-interval-words", text))
    names = [read.name_at(place(epoch, share)) for epoch in (1, 2, 3) for share in range(1, 11)]
    assert [name for name in names if name] == [f"checkpoint_words_{words}.pt" for words in found]


def test_the_last_of_several_is_saved_and_none_twice(tmp_path: Path) -> None:
    read = Reading(milestones(a_folder(tmp_path, 1000), "--save-interval-words 10:10,100:3,300"))
    assert read.name_at(place(1, 1)) == "checkpoint_words_100.pt"
    assert read.name_at(place(1, 1)) == ""
    assert read.name_at(place(1, 4)) == "checkpoint_words_300.pt"
    assert read.name_at(place(1, 5)) == ""
    assert read.name_at(place(2, 3)) == "checkpoint_words_1200.pt"


@pytest.mark.parametrize(("text", "words"), [("2K", 2000), ("3M", 3 * 10**6), ("1B", 10**9)])
def test_numbers_have_units(text: str, words: int, tmp_path: Path) -> None:
    read = Reading(milestones(a_folder(tmp_path, words), "--save-interval-words", text))
    assert read.name_at(place(1, 9)) == ""
    assert read.name_at(place(1, 10)) == f"checkpoint_words_{words}.pt"


def test_a_place_in_a_checkpoint_is_an_amount(tmp_path: Path) -> None:
    read = milestones(a_folder(tmp_path, 100), "--save-interval-words 1")
    assert read.amount_at({"epoch": 2, "iterations_in_epoch": 3, "read": {"count": 3, "units": 4}}) == 175
    assert read.amount_at({"epoch": 2, "iterations_in_epoch": 3}) == 100, "fairseq tells the epoch alone"
    unopened: Any = SimpleNamespace(epoch=3, read=0)
    assert read.amount_at({"epoch": 3}) == read.amount(unopened) == 200


def test_without_the_settings_nothing_is_counted() -> None:
    read = milestones("none")
    assert read.amount(place(3, 3)) == 0 and read.passed(0, 0) == ""


# --- mistakes

SYNTAX = "EVERY[:TIMES][,EVERY…] with growing ends, as in 1M:10,10M:10,100M or 500K"


@pytest.mark.parametrize(
    ("text", "part"),
    [("x", "x"), ("0", "0"), ("5:2,", ""), ("5,10", "10"), ("5:3,3:5", "3:5"), ("5:0", "5:0"), ("1:2:3", "1:2:3")],
)
def test_malformed_intervals_are_named(text: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        milestones("none", "--save-interval-words", text)
    assert str(error.value) == f"save_interval_words {text}: {part!r} is not the next part of {SYNTAX}"


def test_words_and_tokens_are_not_both_counted() -> None:
    with pytest.raises(UserError, match="^save_interval_words: cannot be combined with save_interval_tokens"):
        milestones("none", "--save-interval-words 5 --save-interval-tokens 5")


def test_data_without_words_or_without_the_split_are_named(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, 5, 5)
    (folder / "train1.raw.json").unlink()
    assert milestones(folder, "--save-interval-tokens 5").amount(place(1, 0)) == 0
    with pytest.raises(UserError, match=r"/train1\.raw\.json: file not found; .*; use save_interval_tokens$"):
        milestones(folder, "--save-interval-words 5")
    with pytest.raises(UserError, match=r"/nosplit\.idx: file not found; the splits in this folder are "):
        milestones(folder, "--save-interval-tokens 5 --train-subset nosplit")
