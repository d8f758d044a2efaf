"""Processes that would read other data, or the same in another order, end before the first
update."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from ranks import Meeting, in_threads, on_ranks

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.training import loop, train
from fairseq.training.agreement import check_agreement

FLAGS = "--max-epoch 2 --max-tokens 256 --no-save --ddp-backend no_c10d --arch transformer_lm_tiny"
ROWS = "--required-batch-size-multiple 1 --max-tokens"


def messages(world: World, folder: Path, cases: dict[str, tuple[Any, Any, Any]]) -> dict[str, str]:
    """The errors of runs whose last process has other flags or data; "" of one that trains.

    Cases are (flags of the last process, its data, the data of the others).
    """
    found = {}
    for name, (flags, data, others) in cases.items():
        last = world.rank == world.size - 1
        words = [runs.SMALL, FLAGS, "--save-dir", folder / name, flags if last else ""]
        arguments = runs.arguments(*words, data=data if last else others)
        try:
            train(training_settings(arguments), world)
            found[name] = ""
        except UserError as error:
            found[name] = str(error)
        world.barrier()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes says, of which the last one differs."""
    folder = tmp_path_factory.mktemp("ranks")
    copied, shorter, cut = (folder / name for name in ("copied", "shorter", "cut"))
    for data in (copied, shorter, cut):
        shutil.copytree(runs.DATA, data)
        (data / "checksums.txt").unlink(missing_ok=True)
    os.truncate(cut / "valid.bin", 100)  # which is first read when its epoch begins
    for kind in ("bin", "idx"):
        shutil.copy(runs.DATA / f"test.{kind}", shorter / f"valid.{kind}")
    cases = {
        "copied": ("", copied, runs.DATA),
        "shorter": ("", shorter, runs.DATA),
        "seed": ("--seed 4", runs.DATA, runs.DATA),
        "curriculum": ("--curriculum 5", runs.DATA, runs.DATA),
        "rows": (f"{ROWS} 32", runs.DATA, runs.DATA),
        "validation": ("--max-tokens-valid 32", runs.DATA, runs.DATA),
        "cut": ("", f"{runs.DATA}:{cut}", f"{runs.DATA}:{copied}"),
        "cut everywhere": ("", f"{runs.DATA}:{cut}", f"{runs.DATA}:{cut}"),
    }
    return on_ranks(messages, 2, folder, folder, cases)


@pytest.mark.parametrize(
    "name, message",
    [
        ("shorter", "valid: checksum of valid.idx: "),
        ("seed", "valid: seed of the batches: 4 on rank 1, 3 on rank 0"),
        ("curriculum", "valid: checksum of the next batch of rank 0: "),
        ("rows", "valid: batches an epoch: 42 on rank 1, 6 on rank 0"),
        ("validation", "test: "),
    ],
)
def test_the_error_names_the_file_or_quantity_and_the_rank_on_every_process(
    found: list[dict[str, str]], name: str, message: str
) -> None:
    (line,) = {errors[name] for errors in found}
    assert line.startswith(message) and "\n" not in line
    assert " on rank 1, " in line and line.endswith(" on rank 0; give all processes the same data and flags")


def test_data_that_one_process_cannot_read_from_the_second_epoch_on_end_all_of_them(
    found: list[dict[str, str]],
) -> None:
    other, last = (errors["cut"] for errors in found)
    assert "cut/valid.bin: " in last and "\n" not in last
    assert other == f"rank 1: {last}"
    assert {errors["cut everywhere"] for errors in found} == {last}


def test_equal_data_may_lie_in_another_folder(found: list[dict[str, str]]) -> None:
    assert {errors["copied"] for errors in found} == {""}


def test_the_data_of_each_epoch_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[list[str], dict[str, int]]] = []
    monkeypatch.setattr(loop, "check_agreement", lambda _, splits, counts: compared.append((list(splits), counts)))
    folders = f"{runs.DATA}:{runs.DATA}"
    log = runs.train(tmp_path, runs.SMALL, FLAGS, "--max-epoch 3 --valid-subset test", data=folders)
    epoch = len(runs.updates(log)) // 3
    counts = [{"updates so far": number * epoch} for number in range(3)]
    counts[0]["updates of the run"] = 0
    assert compared == list(zip((["valid", "test"], ["valid"], ["valid"]), counts, strict=True))


# --- the comparison alone


def compared(*ranks: tuple[int, dict[str, dict[str, Any]]]) -> list[str]:
    """The error on each rank, of which updates and facts by split are given; "" where they
    agree."""

    def check(world: World) -> None:
        updates, splits = ranks[world.rank]
        data: Any = {split: SimpleNamespace(fingerprint=lambda facts=facts: facts) for split, facts in splits.items()}
        check_agreement(world, data, {"updates so far": updates})

    answers = in_threads(check, len(ranks))
    assert all(answer is None or isinstance(answer, UserError) for answer in answers), answers
    return ["" if answer is None else str(answer) for answer in answers]


SAME = (5, {"train": {"seed": 1, "rows": 4}, "valid": {"seed": 1}})
ADVICE = "; give all processes the same data and flags"


def test_ranks_that_agree_exchange_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    exchange = Meeting.exchange
    monkeypatch.setattr(Meeting, "exchange", lambda *args: (sent.append(args[-1]), exchange(*args))[1])
    assert compared(SAME, SAME, SAME) == [""] * 3
    assert len(sent) == 3 and all(isinstance(value, int) for value in sent)
    assert compared(SAME) == [""] and len(sent) == 3, "alone, nothing"


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ((6, SAME[1]), "updates so far: 6 on rank 2, 5 on rank 0"),
        ((5, {**SAME[1], "valid": {"seed": 2}}), "valid: seed: 2 on rank 2, 1 on rank 0"),
        ((5, {**SAME[1], "train": {"seed": 1}}), "train: rows: missing on rank 2, 4 on rank 0"),
        ((5, {**SAME[1], "test": {"seed": 1}}), "test: seed: 1 on rank 2, missing on rank 0"),
        ((6, {**SAME[1], "train": {"seed": 1, "rows": 8}}), "train: rows: 8 on rank 2, 4 on rank 0"),
    ],
)
def test_the_first_fact_that_differs_is_named_on_every_rank(last: Any, message: str) -> None:
    assert compared(SAME, SAME, last) == [message + ADVICE] * 3


def test_data_that_cannot_be_read_end_all_ranks_with_the_reason() -> None:
    def unreadable() -> None:
        raise UserError("valid.bin: is cut")

    def check(world: World) -> None:
        facts = unreadable if world.rank in failing else dict
        data: Any = {"train": SimpleNamespace(fingerprint=facts)}
        check_agreement(world, data, {})

    failing = {1}
    assert [str(error) for error in in_threads(check, 3)] == ["rank 1: valid.bin: is cut", "valid.bin: is cut"] + [
        "rank 1: valid.bin: is cut"
    ]
    failing = {0, 1, 2}
    assert [str(error) for error in in_threads(check, 3)] == ["valid.bin: is cut"] * 3
