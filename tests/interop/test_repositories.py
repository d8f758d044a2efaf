"""Models go to repositories of the Hugging Face Hub and come back, without code or pickles."""

from __future__ import annotations

import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import exports
import pytest
import runs
from imports import refusal, run
from mistakes import user_error

from fairseq import checkpoint

FLAGS = """--cpu --arch gpt2_tiny --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64
    --lr 0.1 --criterion cross_entropy"""


class Hub:
    """What huggingface_hub's pages say of the functions that are called; a branch is a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, list[tuple[str, Any]]()
        self.HfApi = lambda: self

    def snapshot_download(
        self, repo_id: str, *, revision: str | None = None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        source, out = self.folder / repo_id / (revision or "main"), self.folder / "cache"
        if not source.exists():
            raise OSError("404 Client Error.\n\nRepository Not Found")
        for path in source.rglob("*"):
            name = path.relative_to(source).as_posix()
            allowed = any(fnmatch(name, pattern) for pattern in allow_patterns)
            if path.is_file() and allowed and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).symlink_to(path)  # as in the library's cache
        return str(out)

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append(("create_repo", private))
        (self.folder / repo_id / "main").mkdir(parents=True, exist_ok=exist_ok)
        return f"https://huggingface.co/{repo_id}"

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        (self.folder / repo_id / branch).mkdir(exist_ok=exist_ok)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, revision: str = "main", ignore_patterns: list[str] | None = None
    ) -> None:
        left_out = shutil.ignore_patterns(*(pattern.split("/")[0] for pattern in ignore_patterns or ()))
        shutil.copytree(folder_path, self.folder / repo_id / revision, dirs_exist_ok=True, ignore=left_out)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    return hub


def test_a_model_is_pushed_with_its_revisions_and_imported_without_code_and_pickles(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = runs.model_of(FLAGS)
    path = exports.saved(model, tmp_path / "own", FLAGS)
    shutil.copy(path, path.with_name("checkpoint_words_1000000.pt"))
    exports.exported(path, tmp_path / "out", "--revisions", "--push", "me/lm")
    assert "Uploaded to https://huggingface.co/me/lm" in capsys.readouterr().out
    assert hub.calls == [("create_repo", True)], "a new repository is private"
    main = hub.folder / "me" / "lm" / "main"
    assert not (main / "chck_1M").exists()
    (main / "pytorch_model.bin").write_bytes(b"a pickle")
    (main / "modeling.py").write_text("raise AssertionError")
    (main / "vocab.pkl").write_bytes(b"a pickle")
    (main / "sub").mkdir()
    shutil.copy(main / "model.safetensors", main / "sub")
    run("me/lm", "--out", tmp_path / "back")
    cached = {file.name for file in (hub.folder / "cache").iterdir()}
    assert {"config.json", "model.safetensors", "dict.txt"} <= cached
    assert not any(name.endswith((".py", ".bin", ".pkl", ".md")) or name == "sub" for name in cached)
    came = checkpoint.load(tmp_path / "back" / "checkpoint.pt", only="model")["model"]
    assert came["decoder.layers.1.fc1.weight"].equal(model.decoder.layers[1].fc1.weight)
    shutil.rmtree(hub.folder / "cache")
    run("me/lm", "--revision", "chck_1M", "--out", tmp_path / "revision")


def test_a_mistake_with_a_repository_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = "--out", tmp_path / "back"
    assert refusal("me/none", *out).startswith(
        "me/none: no such folder here, and on the Hugging Face Hub: OSError: 404 Client Error. Repository Not Found; "
    )
    (hub.folder / "me" / "old" / "main").mkdir(parents=True)
    (hub.folder / "me" / "old" / "main" / "pytorch_model.bin").write_bytes(b"a pickle")
    (hub.folder / "cache").mkdir()
    assert refusal("me/old", *out).startswith("me/old: has no model.safetensors; ")
    assert refusal(tmp_path / "own", *out, "--revision", "chck_1M").startswith("--revision: is for ORG/NAME")
    with user_error("--push lm: expected ORG/NAME"):
        exports.exported(tmp_path / "own", tmp_path / "exported", "--push", "lm")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    missing = "huggingface_hub is not installed (extra hub); pip install huggingface_hub"
    assert refusal("me/lm", *out) == f"me/lm: {missing}"
    with user_error(re.escape(f"--push me/lm: {missing}")):
        exports.exported(tmp_path / "own", tmp_path / "exported", "--push", "me/lm")
    assert not (tmp_path / "back").exists() and not (tmp_path / "exported").exists()
