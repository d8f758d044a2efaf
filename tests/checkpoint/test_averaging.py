"""The mean of checkpoints: which ones of a folder, and what of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from states import a_state

from fairseq import checkpoint
from fairseq.checkpoint.averaging import average, newest
from fairseq.errors import UserError

FILES = (
    "checkpoint2.pt",
    "checkpoint9.pt",
    "checkpoint10.pt",
    "checkpoint_1_30.pt",
    "checkpoint_10_400.pt",
    "checkpoint_2_100.pt",
    "checkpoint.best_loss_3.5000.pt",
    "checkpoint.best_loss_-0.2500.pt",
    "checkpoint.best_loss_12.0000.pt",
    "checkpoint_best.pt",
    "checkpoint_best2.pt",
    "checkpoint_last.pt",
    "checkpoint3.pt.tmp",
    "xcheckpoint4.pt",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "kind, count, bound, expected",
    [
        ("epoch", 2, None, ["checkpoint10.pt", "checkpoint9.pt"]),
        ("epoch", 3, None, ["checkpoint10.pt", "checkpoint9.pt", "checkpoint2.pt"]),
        ("epoch", 1, 9, ["checkpoint9.pt"]),
        ("epoch", 2, 9, ["checkpoint9.pt", "checkpoint2.pt"]),
        ("epoch", 1, 8, ["checkpoint2.pt"]),
        ("update", 2, None, ["checkpoint_10_400.pt", "checkpoint_2_100.pt"]),
        ("update", 2, 399, ["checkpoint_2_100.pt", "checkpoint_1_30.pt"]),
        ("best", 2, None, ["checkpoint.best_loss_-0.2500.pt", "checkpoint.best_loss_3.5000.pt"]),
        ("best", 3, None, ["checkpoint.best_loss_-0.2500.pt", "checkpoint.best_loss_3.5000.pt"] + [FILES[8]]),
    ],
)
def test_the_highest_numbers_or_the_lowest_losses_come_first(
    folder: Path, kind: str, count: int, bound: int | None, expected: list[str]
) -> None:
    assert newest(folder, kind, count, bound) == [folder / name for name in expected]
    assert newest(str(folder), kind, count, bound) == [folder / name for name in expected]


@pytest.mark.parametrize(
    "kind, count, bound, there", [("epoch", 4, None, 3), ("update", 2, 99, 1), ("best", 4, None, 3)]
)
def test_fewer_than_asked_for_is_a_user_error(
    folder: Path, kind: str, count: int, bound: int | None, there: int
) -> None:
    with pytest.raises(UserError) as error:
        newest(folder, kind, count, bound)
    assert error.value.with_flags == f"--inputs {folder}: {there} {kind} checkpoints found, {count} are to be averaged"


def test_a_file_or_a_missing_folder_has_no_checkpoints(folder: Path) -> None:
    for path in (folder / "checkpoint2.pt", folder / "none"):
        with pytest.raises(UserError, match="0 epoch checkpoints found, 1 are to be averaged"):
            newest(path, "epoch", 1)


# The mean


def save(path: Path, **parts: Any) -> Path:
    """A checkpoint of ten updates, with *parts* of it replaced."""
    checkpoint.save(path, {**a_state(), **parts})
    return path


def history(updates: int | None) -> list[dict[str, Any]]:
    return [{"num_updates": 10**6}, {} if updates is None else {"num_updates": updates}]


def no_digest(state: Any, path: Any) -> None:
    return None


def no_settings(stored: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parameters_are_the_mean_in_float64_of_their_own_type(tmp_path: Path, kind: torch.dtype) -> None:
    values = [torch.tensor([2048.0, 1.0, 3e38 if kind == torch.float32 else 1.0]), torch.tensor([1.0, 2.0, 1.0])]
    values += [torch.tensor([1.0, 3.0, 1.0])]
    paths = [save(tmp_path / f"{n}.pt", model={"w": value.to(kind)}) for n, value in enumerate(values)]
    found = average(paths, no_digest, no_settings)["model"]["w"]
    expected = torch.stack([value.to(kind).double() for value in values]).mean(0).to(kind)
    assert found.dtype == kind and torch.equal(found, expected)


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    paths = []
    for number in (1.0, 3.0):
        weight = torch.full((2, 2), number)
        paths.append(save(tmp_path / f"{number}.pt", model={"in": weight, "out": weight, "other": weight.clone()}))
    model = average(paths, no_digest, no_settings)["model"]
    assert list(model) == ["in", "out", "other"] and all(value.tolist() == [[2.0] * 2] * 2 for value in model.values())
    assert model["in"] is model["out"] is not model["other"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_whole_numbers_are_those_after_most_updates_and_the_rest_is_of_the_first(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    paths = [
        save(
            tmp_path / f"{n}.pt",
            args={"arch": f"a{n}"},
            model={"w": torch.full((2,), float(n)), "count": torch.tensor(n), "mask": torch.tensor(n == 1)},
            optimizer_history=history(updates),
            dictionary=f"d{n}",
        )
        for n, updates in enumerate((9, 200, None))
    ]
    state = average([paths[n] for n in order], no_digest, no_settings)
    assert state["model"]["count"] == 1 and bool(state["model"]["mask"]) and state["model"]["w"].tolist() == [1.0, 1.0]
    assert state["args"]["arch"] == f"a{order[0]}" and state["dictionary"] == f"d{order[0]}"
    assert state["optimizer_history"] == [] and state["last_optimizer_state"] is None and state["extra_state"] == {}
    for path in paths:
        path.unlink()
    assert state["model"]["count"] == 1  # no part of a file


@pytest.mark.parametrize("updates", [None, 0])
def test_without_a_history_whole_numbers_are_those_of_the_first(tmp_path: Path, updates: int | None) -> None:
    parts = [[], history(updates), None]
    paths = [
        save(tmp_path / f"{n}.pt", model={"count": torch.tensor(n)}, optimizer_history=part)
        for n, part in enumerate(parts)
    ]
    assert average(paths, no_digest, no_settings)["model"]["count"] == 0


def test_one_update_is_more_than_none(tmp_path: Path) -> None:
    paths = [
        save(tmp_path / f"{n}.pt", model={"count": torch.tensor(n)}, optimizer_history=history(updates))
        for n, updates in enumerate((None, 1))
    ]
    assert average(paths, no_digest, no_settings)["model"]["count"] == 1


def test_a_single_checkpoint_is_its_own_mean(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt")
    model = average([path], no_digest, no_settings)["model"]
    assert torch.equal(model["w"], a_state()["model"]["w"]) and torch.equal(model["b"], a_state()["model"]["b"])


def test_a_checkpoint_of_another_dictionary_is_rejected_with_the_file_it_differs_from(tmp_path: Path) -> None:
    digests = {"0.pt": None, "1.pt": "one", "2.pt": "one", "3.pt": None, "4.pt": "two"}
    paths = [save(tmp_path / name, args={"arch": name}) for name in digests]

    def digest(state: Any, path: Any) -> str | None:
        assert state["args"]["arch"] == Path(path).name
        return digests[Path(path).name]

    average(paths[:4], digest, no_settings)
    with pytest.raises(UserError) as error:
        average(paths, digest, no_settings)
    assert str(error.value) == (
        f"{paths[4]}: was trained with another dictionary than {paths[1]}; give checkpoints of one run"
    )


@pytest.mark.parametrize(
    "model",
    [
        {"w": torch.ones(3)},
        {"v": torch.ones(2)},
        {},
        {"w": torch.ones(2), "v": torch.ones(1)},
        {"w": torch.ones(2).long()},
        {"w": torch.ones(1, 2)},
    ],
)
def test_a_checkpoint_of_another_model_is_rejected_with_the_first_one(tmp_path: Path, model: dict[str, Any]) -> None:
    paths = [save(tmp_path / f"{n}.pt", model=one) for n, one in enumerate(({"w": torch.ones(2)},) * 2 + (model,))]
    with pytest.raises(UserError) as error:
        average(paths, no_digest, no_settings)
    assert str(error.value) == f"{paths[2]}: has other parameters than {paths[0]}; give checkpoints of one run"


def test_types_of_numbers_may_differ_and_the_first_ones_is_kept(tmp_path: Path) -> None:
    paths = [
        save(tmp_path / "0.pt", model={"w": torch.ones(2).half()}),
        save(tmp_path / "1.pt", model={"w": torch.zeros(2)}),
    ]
    found = average(paths, no_digest, no_settings)["model"]["w"]
    assert found.dtype == torch.float16 and found.tolist() == [0.5, 0.5]
