"""Checks of a file and its tensors: exact limits, messages that name the part, nothing rejected
that is sound."""

from __future__ import annotations

import io
import pickle
import shutil
import struct
import threading
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq.checkpoint.integrity import check_archive, check_finite, check_room, check_tensors, tensors
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError

MIB = 1 << 20


def rejection(check: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as error:
        check(*arguments)
    return error.value.with_flags


# Archives


def archive(*records: bytes, kind: int = zipfile.ZIP_STORED, copies: int = 1, name: str = "data/{}") -> bytes:
    """A zip file of *records*, which its directory lists *copies* times."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as target:
        for number, record in enumerate(records):
            target.writestr(name.format(number), record)
        target.filelist *= copies
    return file.getvalue()


def check(path: Path) -> None:
    with open(path, "rb") as file:
        check_archive(file, path, path.stat().st_size)


EXPANDS = "c.pt: rejected: its records expand, which torch.save never writes; use another file"


def test_records_as_large_as_the_file_are_read_and_larger_ones_rejected() -> None:
    content = archive(b"a" * 500, b"b" * 24)
    check_archive(io.BytesIO(content), "c.pt", 524)
    assert rejection(check_archive, io.BytesIO(content), "c.pt", 523) == EXPANDS


def test_one_compressed_record_is_rejected_even_if_it_does_not_expand() -> None:
    file = io.BytesIO(archive(b"a" * 500))
    with zipfile.ZipFile(file, "a") as target:
        target.writestr("small", b"a", zipfile.ZIP_DEFLATED)
    assert rejection(check_archive, file, "c.pt", 10**6) == EXPANDS


def test_a_directory_that_lists_a_record_many_times_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(archive(b"a" * 10_000, copies=50))
    assert rejection(check, path).startswith(f"{path}: rejected: its records expand")


@pytest.mark.parametrize("record", [0, 1, 2])
def test_damage_in_any_record_is_reported_with_its_name(tmp_path: Path, record: int) -> None:
    records = [bytes([65 + number]) * (2 * MIB if number == 1 else 100) for number in range(3)]
    content = bytearray(archive(*records))
    content[content.rindex(bytes([65 + record]) * 100)] ^= 1
    path = tmp_path / "c.pt"
    path.write_bytes(content)
    assert rejection(check, path) == (
        f"{path}: cannot be read as a checkpoint: truncated or damaged "
        f"(Bad CRC-32 for file 'data/{record}'); use another checkpoint"
    )
    path.write_bytes(archive(*records))
    check(path)


def test_damage_is_found_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    test_damage_in_any_record_is_reported_with_its_name(tmp_path, 0)


def test_the_reason_is_one_line_of_at_most_120_characters() -> None:
    content = bytearray(archive(b"A" * 100, name="two\n  words" + "n" * 200))
    content[content.index(b"A" * 100)] ^= 1
    reason = f"Bad CRC-32 for file 'two\\n words{'n' * 200}'"[:120]
    assert f"damaged ({reason});" in rejection(check_archive, io.BytesIO(content), "c.pt", 10**6)


def record(name: str, content: bytes, extra: bytes = b"") -> tuple[zipfile.ZipInfo, bytes]:
    made = zipfile.ZipInfo(name)
    made.extra = extra
    return made, content


def test_two_records_of_one_name_are_rejected_whose_case_torch_ignores(tmp_path: Path) -> None:
    for second in ("archive/data/0", "archive/DATA/0"):
        with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "c.pt", "w") as target:
            warnings.simplefilter("ignore")
            for name in ("archive/data/0", second):
                target.writestr(*record(name, b"a" * 50))
        expected = f"{tmp_path / 'c.pt'}: rejected: two of its records have one name; use another file"
        assert rejection(check, tmp_path / "c.pt") == expected


def test_a_pickle_is_checked_under_every_name_that_torch_takes_for_it(tmp_path: Path) -> None:
    key: Any = "x"
    for _ in range(40):
        key = (key, key)
    # Not hashed here: the pickler writes the pairs of an OrderedDict as they come.
    pickled = pickle.dumps(key, 2)
    other_name = b"archive/x"
    unicode_path = struct.pack("<HHBL", 0x7075, 5 + len(other_name), 1, zlib.crc32(b"archive/data.pkl")) + other_name
    for name, extra in (("archive/DATA.PKL", b""), ("archive/Data.pkl", b""), ("archive/data.pkl", unicode_path)):
        with zipfile.ZipFile(tmp_path / "c.pt", "w") as target:
            target.writestr(*record(name, pickled, extra))
        assert (tmp_path / "c.pt").stat().st_size < 800
        assert "its values repeat to more than" in rejection(check, tmp_path / "c.pt")


@pytest.mark.parametrize("kind", ["another directory", "a comment", "an end record far away"])
def test_a_directory_that_torch_reads_and_zipfile_does_not_is_rejected(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c.pt"
    content = bytearray(archive(b"a" * 100))
    if kind == "a comment":
        content[-2:] = struct.pack("<H", 4)
        content += b"more"
    elif kind == "another directory":
        content = bytearray(b"hidden" * 20) + content  # which zipfile skips, and torch starts from
    else:
        torch.save({"a": torch.zeros(3)}, path)
        check(path)
        content = bytearray(path.read_bytes())
        assert content[-98:-94] == b"PK\6\6" and content[-42:-38] == b"PK\6\7"
        content[-34:-26] = struct.pack("<Q", 0)
    path.write_bytes(content)
    assert "truncated or damaged (its " in rejection(check, path)


def test_records_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Any] = []
    whole = zipfile.ZipExtFile.read

    def read(file: zipfile.ZipExtFile, size: Any = -1) -> bytes:
        sizes.append(size)
        return whole(file, size)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)
    check_archive(io.BytesIO(archive(b"a" * (5 * MIB))), "c.pt", 6 * MIB)
    assert len(sizes) > 2 and all(size and 0 < size <= 4 * MIB for size in sizes)


# Tensors


def test_every_tensor_is_listed_with_its_place() -> None:
    class Module(torch.nn.Module):
        pass

    part, module = torch.ones(1), Module()
    module.value = part
    state = {
        "model": {"a": part, "b": [part, (part, {"c": part})]},
        "args": Namespace(x=Namespace(y=part), z=1),
        "n" * 80: {1: part},
        "plain": [1, "text", None],
        "X.x": part,
        "module": module,
    }
    assert sorted(name for name, _ in tensors(state)) == sorted(
        ["model.a", "model.b.0", "model.b.1.0", "model.b.1.1.c", "args.x.y", f"{'n' * 60}.1", "module.value", "X.x"]
    )
    assert all(value is part for _, value in tensors(state))
    assert list(tensors(part)) == [("", part)] and not list(tensors(3))


def test_a_part_under_two_names_is_listed_once_and_one_that_contains_itself_ends() -> None:
    shared: list[Any] = [torch.ones(1)]
    shared.append(shared)
    assert len(list(tensors({"a": shared, "b": shared}))) == 1


SOUND = {
    "whole": torch.ones(3, 2),
    "rows": torch.ones(9)[2:4],
    "transposed": torch.ones(3, 2).t(),
    "empty": torch.ones(0),
    "scalar": torch.tensor(1),
    "repeated in part": torch.ones(4).expand(1, 4),
}
UNSOUND = {
    "expanded": lambda: torch.ones(1).expand(2),
    "one value more": lambda: torch.ones(3).as_strided((2, 2), (1, 1)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(0, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", SOUND)
def test_tensors_that_a_file_holds_in_full_are_sound(kind: str) -> None:
    check_tensors({"model": {"w": SOUND[kind]}}, "c.pt")


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated)")
@pytest.mark.parametrize("kind", UNSOUND)
def test_tensors_that_a_file_does_not_hold_in_full_are_named(kind: str) -> None:
    state = {"model": {"fine": torch.ones(2), "w": UNSOUND[kind](), "also": torch.ones(2)}}
    message = "c.pt: model.w is not a dense tensor that the file holds; use another checkpoint"
    assert rejection(check_tensors, state, "c.pt") == message


BAD = torch.tensor([1.0, float("nan"), 2.0])
PLACEHOLDER = "decoder.embed_positions._float_tensor"


@pytest.mark.parametrize("value", [BAD, TensorPart(BAD, 0, torch.Size([9]))], ids=["whole", "part"])
def test_weights_after_a_placeholder_are_checked_and_named(value: Any) -> None:
    parameters = {PLACEHOLDER: BAD, "counts": torch.ones(2).long(), "empty": torch.ones(0), "w": value}
    assert rejection(check_finite, parameters, "c.pt") == (
        "c.pt: weights of w are infinite or NaN; use an earlier checkpoint"
    )
    for name in ("_float_tensor.weight", "my_float_tensor", "_float_tensor.w._float"):
        assert f"weights of {name} are" in rejection(check_finite, {name: value}, "c.pt")
    for name in (PLACEHOLDER, "_float_tensor"):
        check_finite({name: value}, "c.pt")


def test_finite_weights_are_sound_in_every_type() -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    check_finite({str(kind): torch.full((2,), torch.finfo(kind).max, dtype=kind) for kind in kinds}, "c.pt")
    check_finite({"part": TensorPart(torch.ones(2), 2, torch.Size([4]))}, "c.pt")


# Room


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The free bytes of every disk, and then the folders that were asked for."""
    usage, asked = namedtuple("usage", "total used free"), [0]

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return usage(10**12, 0, asked[0])

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    return asked


@pytest.mark.parametrize(
    "state, size",
    [
        ({}, 0),
        ({"w": torch.zeros(100)}, 400),
        ({"w": torch.zeros(100), "v": {"x": [torch.zeros(7).double()]}}, 456),
        ({"w": (once := torch.zeros(100)), "tied": once, "rows": once[20:30]}, 400),
        ({"w": torch.zeros(100)[:3]}, 400),
    ],
)
@pytest.mark.parametrize("more", [0, 5])
def test_each_storage_and_one_mebibyte_are_needed(
    tmp_path: Path, free: list[Any], state: dict[str, Any], size: int, more: int
) -> None:
    free[0] = size + MIB + more
    check_room(tmp_path / "c.pt", state, more)
    free[0] -= 1
    assert "c.pt: cannot be written: needs 1 MiB, 1 MiB are free; " in rejection(
        check_room, tmp_path / "c.pt", state, more
    )


def test_nothing_more_than_the_tensors_is_needed_by_default(tmp_path: Path, free: list[Any]) -> None:
    free[0] = MIB
    check_room(tmp_path / "c.pt", {})


def test_the_message_gives_sizes_in_mebibytes(free: list[Any], tmp_path: Path) -> None:
    free[0] = 1234 * MIB
    assert rejection(check_room, tmp_path / "c.pt", {}, 5000 * MIB) == (
        f"{tmp_path / 'c.pt'}: cannot be written: needs 5,001 MiB, 1,234 MiB are free; "
        "free some space or choose another --save-dir"
    )


def test_the_disk_is_that_of_the_folder_and_not_of_a_link_that_is_replaced(tmp_path: Path, free: list[Any]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "c.pt").symlink_to(tmp_path / "other" / "c.pt")
    free[0] = 10 * MIB
    check_room(tmp_path / "c.pt", {})
    assert free[1:] == [tmp_path]


def test_a_missing_folder_is_left_to_the_writer(tmp_path: Path) -> None:
    check_room(tmp_path / "none" / "c.pt", {}, 1 << 60)
