"""Folders of sharded checkpoints: what processes write is read in full or by rows, and runs
nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairseq import checkpoint
from fairseq.checkpoint import sharded
from fairseq.config import options
from fairseq.distributed.tensor_part import TensorPart, rows_of
from fairseq.errors import UserError
from fairseq_cli.checkpoint import get_merge_parser, merge

MATRIX = torch.arange(15.0).view(5, 3)
VECTOR = torch.randn(4).bfloat16()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, group: Any) -> Path:
    """A checkpoint with a matrix in two places, a vector in two, and plain values."""
    one, other, moments = (TensorPart(value, 0, value.shape) for value in (MATRIX, VECTOR, MATRIX + 1))
    state = {
        "args": {"arch": "a"},
        "model": {"w": one, "tied": one, "v": other, "n": torch.arange(3)},
        "last_optimizer_state": {"state": {0: {"moments": [moments, {"x": other}], "step": 3}}, "list": [1, None]},
    }
    (tmp_path / "parts").mkdir()
    sharded.write(tmp_path / "parts", *sharded.split(state), group)
    return tmp_path / "parts"


def test_what_is_written_is_what_is_read(folder: Path) -> None:
    checkpoint.verify(folder)
    found = checkpoint.read(folder)
    assert found.keys() == {"args", "model", "last_optimizer_state"} and found["args"] == {"arch": "a"}
    assert torch.equal(found["model"]["w"], MATRIX) and found["model"]["tied"] is found["model"]["w"]
    assert torch.equal(found["model"]["v"], VECTOR) and found["model"]["n"].tolist() == [0, 1, 2]
    entry = found["last_optimizer_state"]["state"][0]
    assert torch.equal(entry["moments"][0], MATRIX + 1) and entry["moments"][1]["x"] is found["model"]["v"]
    assert entry["step"] == 3 and found["last_optimizer_state"]["list"] == [1, None]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_process_reads_the_rows_that_chunk_gives_it(folder: Path, count: int) -> None:
    parts = [checkpoint.read(folder, rows=(rank, count))["model"]["w"] for rank in range(count)]
    assert torch.equal(torch.cat([part.local for part in parts]), MATRIX)
    assert [part.first for part in parts] == [rows_of(5, rank, count)[0] for rank in range(count)]


def test_a_command_that_uses_the_model_reads_nothing_else(folder: Path) -> None:
    metadata = sharded.read_metadata(folder)
    [moments] = [info for index, info in metadata.storage_data.items() if not index.fqn.startswith("model/")]
    with open(folder / moments.relative_path, "r+b") as file:
        file.seek(moments.offset)
        file.write(bytes(moments.length))
    assert torch.equal(checkpoint.load(folder, only="model")["model"]["v"], VECTOR)
    with pytest.raises(UserError, match="parts: cannot be read as a checkpoint"):
        checkpoint.load(folder)


def test_a_bit_that_flipped_is_found(folder: Path) -> None:
    [place] = folder.glob("*.distcp")
    content = bytearray(place.read_bytes())
    content[content.index(MATRIX.numpy().tobytes()) + 7] ^= 1
    place.write_bytes(content)
    with pytest.raises(UserError, match=rf"parts: is damaged: {place.name}"):
        checkpoint.verify(folder)


def test_metadata_that_name_a_function_run_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch bombed'\ntR.")
    for reading in (checkpoint.load, checkpoint.verify):
        with pytest.raises(UserError, match=r"names os\.system"):
            reading(folder)
    assert not (folder.parent / "bombed").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_folder_without_one_of_its_files_is_one_line(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match="parts: ") as error:
        checkpoint.load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "error, message",
    [
        (OSError(errno.ENOSPC, "No space left"), "(No space left); free some space or choose another place"),
        (PermissionError(errno.EACCES, "Permission denied"), "(Permission denied); choose another place"),
    ],
)
def test_a_failure_of_a_process_names_the_lowest_one(error: OSError, message: str) -> None:
    failures = {3: (RuntimeError("later"), None), 1: (error, None), 2: (ValueError("later"), None)}
    found = sharded._failure(Path("f"), failures)
    assert isinstance(found, UserError) and str(found) == f"f: cannot be written by process 1 {message}"


def test_a_process_that_cannot_write_is_a_user_error(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    state = {"model": {"w": TensorPart(MATRIX, 0, MATRIX.shape)}}
    with pytest.raises(UserError, match="parts: cannot be written by process 0 .No space left on device.; free"):
        sharded.write(tmp_path / "parts", *sharded.split(state), group)


@pytest.mark.parametrize("name", ["plain.pt", "new.pt"])
def test_merging_leaves_the_folder_of_the_checkpoint_alone(folder: Path, name: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = [str(folder), str(folder / name)]
    with pytest.raises(UserError, match=f"FILE .*{name}: is in the folder of the checkpoint"):
        merge(options.parse_args_and_arch(get_merge_parser(), words))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_merging_tells_a_missing_checkpoint_from_one_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "file.pt").touch()
    for name, reason in (("file.pt", "not a checkpoint of --ddp-backend fully_sharded"), ("none.pt", "file not found")):
        words = [str(tmp_path / name), str(tmp_path / "merged.pt")]
        with pytest.raises(UserError, match=f"{name}: {reason}"):
            merge(options.parse_args_and_arch(get_merge_parser(), words))
