"""Exported checkpoints by words: transformers loads each as a subfolder, and as a revision of a
repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import MODELS, exported, keep_code_in, made, saved, theirs, tokens
from mistakes import user_error
from runs import model_of

from fairseq import checkpoint

transformers = pytest.importorskip("transformers")
WORDS = {"chck_500": 500, "chck_20K": 20_000, "chck_1M": 10**6, "chck_10M": 10**7, "chck_1000M": 10**9}


def checkpoints(folder: Path, **milestones: Any) -> Path:
    """A folder with a checkpoint of each model of *milestones*, and the last of them as the
    best."""
    for name, model in milestones.items():
        saved(model, folder.with_name("one"), MODELS["shortformer"])
        folder.mkdir(exist_ok=True)
        (folder.with_name("one") / "checkpoint.pt").rename(folder / f"checkpoint_{name}.pt")
        shutil.copy(folder.with_name("one") / "dict.txt", folder)
        shutil.rmtree(folder.with_name("one"))
    return folder


def as_repository(exported: Path, cache: Path, name: str) -> None:
    """Fill a cache of transformers' as it is once a repository with these branches has been
    downloaded."""
    branches = {"main": exported, **{path.name: path for path in exported.iterdir() if path.is_dir()}}
    for number, (branch, files) in enumerate(branches.items()):
        commit, repository = f"{number:040}", cache / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir(exist_ok=True)
        for file in filter(Path.is_file, files.iterdir()):
            # As the hub's client does: the files are links to others without a name.
            blob = blobs / str(len(list(blobs.iterdir())))
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")


@torch.no_grad()
def test_transformers_loads_each_as_subfolder_and_as_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_code_in(tmp_path / "modules", monkeypatch)
    models = {name: made("shortformer") for name in ("words_500", "words_1000000", "best")}
    for scale, model in enumerate(models.values(), 1):
        model.decoder.layers[0].fc1.weight.mul_(scale)
    out = exported(checkpoints(tmp_path / "in", **models), tmp_path / "out", "--revisions")
    assert "2 revisions, as subfolders: chck_500, chck_1M\n" in capsys.readouterr().out
    as_repository(out, tmp_path / "cache", "me/model")
    downloaded = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    text, load = tokens(2, 8), transformers.AutoModelForCausalLM.from_pretrained
    for branch, model in zip(("chck_500", "chck_1M", "main"), models.values(), strict=True):
        want = theirs(model)(text).logits
        folder = {} if branch == "main" else {"subfolder": branch}
        for place in ((out, folder), ("me/model", {"revision": branch, **downloaded})):
            found = load(place[0], trust_remote_code=True, **place[1])
            # Logits reach 60, where float32 has steps of 4e-6.
            torch.testing.assert_close(found(text).logits, want, atol=1e-5, rtol=2e-7)
            words = transformers.AutoTokenizer.from_pretrained(place[0], trust_remote_code=True, **place[1])
            assert words("the\n").input_ids[-1] == words.eos_token_id, "no other symbol is added"
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        load("me/model", revision="chck_2M", trust_remote_code=True, **downloaded)


def test_names_are_those_of_the_challenge_in_the_order_of_words(tmp_path: Path) -> None:
    model = made("shortformer")
    milestones = {f"words_{words}": model for words in reversed(WORDS.values())}
    folder = checkpoints(tmp_path / "in", last=model, tokens_2000000=model, **milestones)
    out = exported(folder / "checkpoint_last.pt", tmp_path / "out", "--revisions")
    names = {path.name for path in out.iterdir() if path.is_dir()}
    assert names == {*WORDS, "tokens_2M"}
    files = {path.name for path in out.iterdir()} - names
    for name in names:
        assert {path.name for path in (out / name).iterdir()} == files
        assert (out / name / "model.safetensors").stat().st_mode == (out / name / "config.json").stat().st_mode


def test_revisions_of_encoders(tmp_path: Path) -> None:
    flags = "--arch bert_tiny --task masked_lm --criterion masked_lm --cpu --max-positions 16 --encoder-layers 1"
    (tmp_path / "in").mkdir()
    for scale, name in enumerate(("words_1000", "words_2000", "best")):
        model = model_of(flags).eval()
        model.encoder.lm_head.bias.data += scale
        source = saved(model, tmp_path / name, flags)
        source.rename(tmp_path / "in" / f"checkpoint_{name}.pt")
    shutil.copy(tmp_path / "best" / "dict.txt", tmp_path / "in")
    out = exported(tmp_path / "in", tmp_path / "out", "--revisions")
    for scale, folder in enumerate((out / "chck_1K", out / "chck_2K", out)):
        bert = transformers.AutoModelForMaskedLM.from_pretrained(folder)
        assert bert.cls.predictions.bias.unique().tolist() == [scale]
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def test_mistakes_leave_nothing(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path / "in", best=made("shortformer"))
    out = tmp_path / "out"
    with user_error(rf"^--revisions: {folder} has no checkpoint_words_….pt; train with --save-interval-words"):
        exported(folder, out, "--revisions")
    with user_error(r"^--revisions: is for --to hf; leave it out"):
        exported(folder, out, "--revisions", "--to", "fairseq")
    (folder / "checkpoint_words_5.pt").write_bytes(b"x")
    with user_error(r"checkpoint_words_5\.pt: "):
        exported(folder, out, "--revisions")
    state = checkpoint.load(folder / "checkpoint_best.pt")
    checkpoint.save(folder / "checkpoint_words_5.pt", {**state, "model": {}})
    with user_error(r"checkpoint_words_5\.pt"):
        exported(folder, out, "--revisions")
    assert not out.exists()
