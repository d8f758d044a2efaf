"""Folders of sharded checkpoints: what processes write is read in full or by rows; what does not
fit is rejected."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairseq import checkpoint
from fairseq.checkpoint import parts
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError

SHAPE = (5, 3)
MATRIX = torch.arange(15.0).view(SHAPE)
CUTS = ([0, 5], [0, 2, 5], [0, 1, 3, 4, 5])


def content_of(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def folder_with(path: Path, pieces: list[tuple[int, Any]], **manifest: Any) -> Path:
    """A checkpoint of one tensor in *pieces*, first row and rows, each in a file of its own after 7
    other bytes.

    Keyword arguments replace fields of the tensor in the manifest.
    """
    path.mkdir()
    chunks = []
    for number, (first, rows) in enumerate(pieces):
        content = content_of(rows)
        (path / f"__{number}_0.distcp").write_bytes(b"1234567" + content)
        chunks.append([first, len(rows), f"__{number}_0.distcp", 7, len(content)])
    dtype = str(pieces[0][1].dtype).removeprefix("torch.")
    tensor = {"dtype": dtype, "shape": [pieces[-1][0] + len(pieces[-1][1]), *pieces[0][1].shape[1:]], "chunks": chunks}
    write_manifest(path, {"tensors": {"model/w": {**tensor, **manifest}}})
    return path


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    plain = {"args": {}, "model": {"w": None}, "parts": [[["model", "w"], "model/w"]], "manifest": zlib.crc32(text)}
    torch.save(plain, folder / "plain.pt")


def cut(value: torch.Tensor, at: list[int]) -> list[tuple[int, torch.Tensor]]:
    return [(low, value[low:high].clone()) for low, high in zip(at, at[1:], strict=False)]


def rejection(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        checkpoint.read(folder)
    message = str(error.value)
    assert message.startswith(f"{folder}") and "\n" not in message
    return message


# Reading


@pytest.mark.parametrize("at", CUTS, ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_the_pieces_of_a_tensor_are_put_together_in_any_order(tmp_path: Path, at: list[int], kind: torch.dtype) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX.to(kind), at))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["model/w"]["chunks"].reverse()
    write_manifest(folder, manifest)
    state = checkpoint.read(folder)
    assert state.keys() == {"args", "model"}
    assert torch.equal(state["model"]["w"], MATRIX.to(kind)) and state["model"]["w"].dtype == kind


@pytest.mark.parametrize("at", CUTS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_process_reads_the_rows_that_chunk_gives_it(tmp_path: Path, at: list[int], count: int) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, at))
    expected = [*torch.chunk(MATRIX, count), *[MATRIX[:0]] * count]
    first = 0
    for index in range(count):
        part = checkpoint.load(folder, rows=(index, count))["model"]["w"]
        assert isinstance(part, TensorPart) and part.shape == SHAPE and part.first == first
        assert torch.equal(part.local, expected[index])
        first += len(part.local)
    assert first == 5


def test_rows_of_a_process_may_lie_in_several_files(tmp_path: Path) -> None:
    value = torch.arange(21.0).view(7, 3)
    folder = folder_with(tmp_path / "parts", cut(value, [0, 6, 7]))
    assert torch.equal(checkpoint.read(folder, rows=(1, 2))["model"]["w"].local, value[4:])


@pytest.mark.parametrize("shape", [(4,), (3, 2, 2)])
def test_vectors_and_tensors_of_three_dimensions_are_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    folder = folder_with(tmp_path / "parts", cut(value, [0, 1, shape[0]]))
    assert torch.equal(checkpoint.read(folder)["model"]["w"], value)


def test_only_the_files_with_a_process_rows_are_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 2, 4, 5]))
    for name in ("__0_0.distcp", "__2_0.distcp"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match="__0_0.distcp: cannot be read as a checkpoint: truncated or damaged"):
        checkpoint.read(folder, rows=(0, 2))
    assert checkpoint.read(folder, rows=(2, 5))["model"]["w"].local.tolist() == MATRIX[2:3].tolist()


@pytest.mark.parametrize("moment", ["manifest", "part", "never"])
def test_a_link_that_training_gives_another_folder_is_read_from_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Where the former folder is removed meanwhile, too, the newer one is read."""
    for number in (1, 2):
        folder_with(tmp_path / f"{number}.parts", cut(MATRIX * number, [0, 2, 5]))
    link = tmp_path / "checkpoint_last.pt"
    link.symlink_to("1.parts")
    original = parts.join if moment == "manifest" else parts.Chunk.read
    calls: list[int] = []

    def advance(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            link.unlink()
            link.symlink_to("2.parts")
            if moment != "never":
                shutil.rmtree(tmp_path / "1.parts")
        return original(*arguments)  # type: ignore[operator]

    monkeypatch.setattr(*((parts, "join") if moment == "manifest" else (parts.Chunk, "read")), advance)
    factor = 1 if moment == "never" else 2
    assert checkpoint.read(link)["model"]["w"].tolist() == (MATRIX * factor).tolist()


def test_a_folder_that_is_removed_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path / "1.parts", cut(MATRIX, [0, 5]))
    monkeypatch.setattr(parts.Chunk, "read", lambda self, folder: shutil.rmtree(folder) or folder.stat())
    assert rejection(folder) == f"{folder}: was removed while it was read; use a checkpoint that training keeps"


def test_a_folder_is_one_with_a_manifest(tmp_path: Path) -> None:
    assert not parts.is_folder(tmp_path) and not parts.is_folder(tmp_path / "none")
    (tmp_path / "manifest.json").mkdir()
    assert not parts.is_folder(tmp_path)
    assert parts.is_folder(str(folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]))))


Edit = Callable[[dict[str, Any]], Any]


def _set(name: str, value: Any) -> Edit:
    return lambda tensor: tensor.__setitem__(name, value)


def _set_chunk(field: int, value: Any) -> Edit:
    return lambda tensor: tensor["chunks"][1].__setitem__(field, value)


LARGER = "a tensor is larger than its parts"
OVERLAP = "the parts of a tensor overlap or leave rows out"
OTHER_KIND = "a part has another shape or type than its tensor"
INVALID: dict[str, tuple[Edit, str]] = {
    "one row more": (_set("shape", [6, 3]), "ValueError: the parts of a tensor leave rows out"),
    "one row less": (_set("shape", [4, 3]), "the parts of a tensor leave rows out"),
    "wider": (_set("shape", [5, 4]), OTHER_KIND),
    "negative rows": (_set("shape", [-5, 3]), LARGER),
    "negative width": (_set("shape", [5, -3]), LARGER),
    "larger than its files": (_set("shape", [5000, 3]), LARGER),
    "a little larger": (_set("shape", [400, 3]), LARGER),
    "no shape": (_set("shape", []), "ValueError"),
    "of another type": (_set("dtype", "float16"), OTHER_KIND),
    "of no type": (_set("dtype", "float31"), "KeyError: 'float31'"),
    "without chunks": (_set("chunks", []), LARGER),
    "gap": (_set_chunk(0, 3), OVERLAP),
    "overlap": (_set_chunk(0, 1), OVERLAP),
    "no rows": (_set_chunk(1, 0), OVERLAP),
    "fewer rows": (_set_chunk(1, 2), OTHER_KIND),
    "outside": (_set_chunk(2, "../__1_0.distcp"), "a part is in a file of another name"),
    "plain": (_set_chunk(2, "plain.pt"), "a part is in a file of another name"),
    "longer name": (_set_chunk(2, "__1_0.distcp.pt"), "a part is in a file of another name"),
    "missing": (_set_chunk(2, "__5_0.distcp"), "FileNotFoundError"),
    "before the file": (_set_chunk(3, -1), "__1_0.distcp is truncated"),
    "past the end": (_set_chunk(3, 8), "__1_0.distcp is truncated"),
    "negative length": (_set_chunk(4, -1), "the parts are larger than their files"),
    "too long": (_set_chunk(4, 10**6), "the parts are larger than their files"),
    "shorter": (_set_chunk(4, 300), "truncated or damaged"),
    "text": (_set("chunks", "text"), "TypeError"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_manifest_is_rejected(tmp_path: Path, kind: str) -> None:
    edit, reason = INVALID[kind]
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 2, 5]))
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest["tensors"]["model/w"])
    write_manifest(folder, manifest)
    assert reason in rejection(folder)


@pytest.mark.parametrize("value", [[1.0], {"w": MATRIX}, None])
def test_a_part_that_is_no_tensor_is_rejected(tmp_path: Path, value: Any) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]))
    content = content_of(value)
    (folder / "__0_0.distcp").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["model/w"]["chunks"][0][3:] = [0, len(content)]
    write_manifest(folder, manifest)
    assert "a part is not a tensor" in rejection(folder)


def test_a_hostile_part_is_rejected_and_no_environment_lets_it_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "canary",)

    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]))
    content = content_of(Call())
    (folder / "__0_0.distcp").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["model/w"]["chunks"][0][3:] = [0, len(content)]
    write_manifest(folder, manifest)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert "a part is not a tensor (UnpicklingError)" in rejection(folder)
    assert not (tmp_path / "canary").exists()


def test_a_tensor_without_rows_has_no_parts(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]), shape=[0, 3], chunks=[])
    assert checkpoint.read(folder)["model"]["w"].shape == (0, 3)


def test_parts_of_one_row_more_than_the_tensor_are_rejected_before_room_is_made_for_it(tmp_path: Path) -> None:
    rows = 10**12
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]), shape=[rows, 3])
    assert LARGER in rejection(folder)


def test_a_manifest_of_another_checkpoint_is_rejected(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]))
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text + " ")
    assert "ValueError: manifest.json does not belong to plain.pt" in rejection(folder)


def test_a_manifest_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]))
    size = (folder / "manifest.json").stat().st_size
    monkeypatch.setattr(parts, "_LARGEST_MANIFEST", size)
    assert checkpoint.read(folder)["model"]
    monkeypatch.setattr(parts, "_LARGEST_MANIFEST", size - 1)
    assert "manifest.json is too large" in rejection(folder)


def test_the_reason_is_one_line_of_at_most_120_characters(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "parts", cut(MATRIX, [0, 5]), dtype="x \n y" + "n" * 200)
    reason = repr("x \n y" + "n" * 200)[:120]
    assert rejection(folder) == (
        f"{folder}: cannot be read as a checkpoint: incomplete or damaged (KeyError: {reason}); use another checkpoint"
    )


# Writing


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def whole(value: torch.Tensor) -> TensorPart:
    return TensorPart(value, 0, value.shape)


def test_what_is_written_is_what_is_read(tmp_path: Path, group: Any) -> None:
    one, other = whole(MATRIX), whole(torch.randn(4).bfloat16())
    state = {
        "args": {"arch": "a"},
        "model": {"w": one, "tied": one, "v": other, "n": torch.arange(3)},
        "last_optimizer_state": {"state": {0: {"moments": [other, {"x": one}], "step": 3}}, "list": [1, "a", None]},
    }
    plain, tensors = parts.split(state)
    assert set(tensors) == {"model/w", "model/v"} and tensors["model/w"] is one
    assert plain["model"] == {"w": None, "tied": None, "v": None, "n": state["model"]["n"]}
    (tmp_path / "parts").mkdir()
    parts.write(tmp_path / "parts", plain, tensors, group)
    found = checkpoint.read(tmp_path / "parts")
    assert found.keys() == state.keys() and found["args"] == {"arch": "a"}
    assert torch.equal(found["model"]["w"], MATRIX) and found["model"]["tied"] is found["model"]["w"]
    assert torch.equal(found["model"]["v"], other.local) and found["model"]["n"].tolist() == [0, 1, 2]
    entry = found["last_optimizer_state"]["state"][0]
    assert torch.equal(entry["moments"][0], other.local) and entry["moments"][1]["x"] is found["model"]["w"]
    assert entry["step"] == 3 and found["last_optimizer_state"]["list"] == [1, "a", None]


def test_rows_are_written_with_their_place(tmp_path: Path, group: Any) -> None:
    (tmp_path / "parts").mkdir()
    part = TensorPart(MATRIX[2:4], 2, MATRIX.shape)
    parts.write(tmp_path / "parts", *parts.split({"model": {"w": part}}), group)
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    tensor = manifest["tensors"]["model/w"]
    assert tensor["shape"] == [5, 3] and tensor["dtype"] == "float32" and tensor["chunks"][0][:2] == [2, 2]
    assert OVERLAP in rejection(tmp_path / "parts")  # the other rows are another process's


def test_two_checkpoints_of_the_same_shapes_cannot_be_mixed(tmp_path: Path, group: Any) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        parts.write(tmp_path / name, *parts.split({"args": {}, "model": {"w": whole(MATRIX)}}), group)
    os.replace(tmp_path / "one" / "plain.pt", tmp_path / "two" / "plain.pt")
    assert "manifest.json does not belong to plain.pt" in rejection(tmp_path / "two")


@pytest.mark.parametrize(
    "error, message",
    [
        (OSError(errno.ENOSPC, "No space left"), "(No space left); free some space or choose another place"),
        (OSError(errno.EDQUOT, "Quota"), "(Quota); free some space or choose another place"),
        (PermissionError(errno.EACCES, "Permission denied"), "(Permission denied); choose another place"),
        (OSError("odd"), "(odd); choose another place"),
    ],
)
def test_a_failure_of_a_process_names_the_lowest_one(error: OSError, message: str) -> None:
    failures = {3: (RuntimeError("later"), None), 1: (error, None), 2: (ValueError("later"), None)}
    found = parts._failure(Path("f"), failures)
    assert isinstance(found, UserError) and str(found) == f"f: cannot be written by process 1 {message}"


def test_a_bug_while_writing_is_no_user_error() -> None:
    found = parts._failure(Path("f"), {0: (ValueError("bug"), None)})
    assert isinstance(found, RuntimeError) and str(found) == "process 0 could not write its part of f: bug"


def test_a_process_that_cannot_write_is_a_user_error(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="parts: cannot be written by process 0 .No space left on device.; free"):
        parts.write(tmp_path / "parts", *parts.split({"model": {"w": whole(MATRIX)}}), group)
