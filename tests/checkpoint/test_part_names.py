"""Folders of sharded checkpoints: each tensor under its own name, and no command writes into
them."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli import merge_checkpoint
from fairseq_cli.merge_checkpoint import get_merge_parser

PLACES = [["model", "a"], ["model", "b"], ["model", "tied"]]


def folder_of(path: Path, keys: list[str]) -> Path:
    """A checkpoint of two matrices, the places of which are stored under *keys*."""
    path.mkdir()
    content, tensors = b"", {}
    for name, value in (("model/a", 1.0), ("model/b", 2.0)):
        archive = io.BytesIO()
        torch.save(torch.full((2, 3), value), archive)
        chunk = [0, 2, "__0_0.distcp", len(content), len(archive.getvalue())]
        tensors[name] = {"dtype": "float32", "shape": [2, 3], "chunks": [chunk]}
        content += archive.getvalue()
    (path / "__0_0.distcp").write_bytes(content)
    manifest = json.dumps({"tensors": tensors}).encode()
    (path / "manifest.json").write_bytes(manifest)
    plain: dict[str, Any] = {
        "args": {"arch": "transformer_lm"},
        "model": dict.fromkeys(("a", "b", "tied")),
        "parts": [[place, key] for place, key in zip(PLACES, keys, strict=True)],
        "manifest": zlib.crc32(manifest),
    }
    torch.save(plain, path / "plain.pt")
    return path


def test_tied_places_share_the_tensor_of_the_first(tmp_path: Path) -> None:
    state = checkpoint.read(folder_of(tmp_path / "parts", ["model/a", "model/b", "model/a"]))
    assert state["model"]["tied"] is state["model"]["a"]
    assert state["model"]["b"].tolist() == [[2.0] * 3] * 2


def test_a_tensor_under_the_name_of_another_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a is stored under the name of another tensor"):
        checkpoint.read(folder_of(tmp_path / "parts", ["model/b", "model/a", "model/a"]))


@pytest.mark.parametrize("name", ["plain.pt", "new.pt"])
def test_merging_leaves_the_folder_of_the_checkpoint_alone(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "parts", ["model/a", "model/b", "model/a"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = [str(folder), str(folder / name)]
    with pytest.raises(UserError, match=f"FILE .*{name}: is in the folder of the checkpoint"):
        merge_checkpoint.main(options.parse_args_and_arch(get_merge_parser(), words))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_merging_tells_a_missing_checkpoint_from_one_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "file.pt").touch()
    for name, reason in (("file.pt", "not a checkpoint of --ddp-backend fully_sharded"), ("none.pt", "file not found")):
        words = [str(tmp_path / name), str(tmp_path / "merged.pt")]
        with pytest.raises(UserError, match=f"{name}: {reason}"):
            merge_checkpoint.main(options.parse_args_and_arch(get_merge_parser(), words))
