"""What cannot be imported is refused in one line, and nothing half-written is left."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import naive_xl
import pytest
import runs
import torch
from imports import AUTHORS, HF, SMALL, authors, refusal, saved
from torch import nn

from fairseq import checkpoint
from fairseq_cli import import_model

# What is wrong with the input


@pytest.mark.parametrize(
    "change, reason",
    [
        *(({key: None}, f"the configuration has no {key}") for key in SMALL if key != "vocab_size"),
        ({"n_layer": 3}, "layers.2.dec_attn.qkv_net.weight is missing"),
        ({"n_layer": 1}, "not part of this configuration (layers.1.dec_attn.qkv_net.weight"),
        ({"d_inner": 17}, "layers.0.pos_ff.CoreNet.0.weight is [16, 12], but the configuration says [17, 12]"),
        ({"d_head": 7}, "r_w_bias is [2, 6], but the configuration says [2, 7]"),
        ({"d_model": 14}, "word_emb.emb_projs.0 is missing"),
        ({"vocab_size": 41}, "word_emb.emb_layers.0.weight is [40, 12], but the configuration says [41, 12]"),
        ({"cutoffs": [9], "tie_projs": []}, "crit.cluster_weight is [2, 12], but the configuration says [1, 12]"),
        ({"cutoffs": [22, 9]}, "cutoffs is [22, 9] in the configuration; it must be rising and below 40"),
        ({"cutoffs": "9,22"}, "cutoffs is '9,22'"),
        ({"cutoffs": [9, 41]}, "it must be rising and below 40"),
        ({"attn_type": 1}, "r_emb is missing"),
        ({"attn_type": 4}, "attn_type is 4 in the configuration; it must be 0, 1, 2 or 3"),
        ({"n_head": 0}, "n_head is 0"),
        ({"n_head": "2"}, "n_head is '2'"),
        ({"n_head": True}, "n_head is True"),
        ({"mem_len": -1}, "mem_len is -1"),
        ({"clamp_len": 1.5}, "clamp_len is 1.5"),
        ({"pre_lnorm": 1}, "pre_lnorm is 1 in the configuration; it must be true or false"),
        ({"tie_projs": [True] * 4}, "tie_projs"),
        ({"tie_projs": True}, "tie_projs"),
        ({"div_val": 4}, "div_val is 4 in the configuration; it must be less"),
        ({"div_val": 2}, "[40, 12], but the configuration says [9, 12]"),
        ({"untie_r": True}, "layers.0.dec_attn.r_w_bias is missing"),
        ({"dropout": "high"}, "dropout is 'high'"),
        ({"dropatt": 2}, "dropatt is 2 in the configuration; it must be a number from 0 to below 1"),
        ({"d_embed": "12"}, "d_embed is '12'"),
        ({"vocab_size": []}, "vocab_size is []"),
        ({"mem_len": 0, "same_length": True}, "--same-length"),
    ],
)
def test_configuration_that_is_not_the_models_is_refused_in_one_line(change, reason, tmp_path):
    path, _ = saved(tmp_path, SMALL)
    config = {key: value for key, value in {**SMALL, **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    assert reason in refusal(path, *argv) and not (tmp_path / "out").exists()


def test_tensors_that_are_not_tied_as_the_configuration_says_are_refused(tmp_path):
    path, _ = saved(tmp_path, SMALL, naive_xl.random_state({**SMALL, "tie_weight": False}))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    assert "crit.out_layers.0.weight is tied in the configuration, but its values differ" in refusal(path, *argv)


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"weight": torch.zeros(2)}, "not a Transformer-XL (no word_emb.emb_layers.0.weight)"),
        ({"word_emb.emb_layers.0.weight": torch.zeros(2)}, "expected [words, channels]"),
        ({"args": {}, "model": {}}, "is already a checkpoint of this project or of fairseq; use it directly"),
        ({"args": {}, "weights": {}}, "neither tensors by name nor a saved module"),
        ([1, 2, 3], "neither tensors by name nor a saved module"),
        (nn.Linear(2, 2), "not a Transformer-XL"),
        (torch.zeros(3), "neither tensors by name nor a saved module"),
    ],
)
def test_file_that_holds_no_such_model_is_refused(content, reason, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", AUTHORS / "base.json"]
    assert reason in refusal(tmp_path / "x.pt", *argv) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [runs.GOLDEN / "baseline.pt", runs.GOLDEN / "shortformer_stage2.pt", None])
def test_checkpoint_that_needs_no_import_is_said_to_be_one(content, tmp_path):
    argv = ["--config", AUTHORS / "base.json"]
    ours = content or authors(AUTHORS / "base.state_dict.pt", tmp_path / "ours", *argv) / "checkpoint.pt"
    message = refusal(ours, "--from", "transformer-xl", "--out", tmp_path / "out")
    assert message.startswith(f"{ours}: is already a checkpoint of this project or of fairseq")
    assert not (tmp_path / "out").exists()


WEIGHTS = ["word_emb.emb_layers.0.weight", "layers.1.dec_attn.o_net.weight", "crit.cluster_bias", "r_w_bias"]
NOT_FINITE, WHOLE = "NaN or infinite values", "expected floating point"


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_weights_that_are_no_finite_numbers_are_refused(name, value, tmp_path):
    state = naive_xl.random_state(SMALL)
    state[name] = state[name].double()
    state[name].view(-1)[-1] = value
    path, _ = saved(tmp_path, SMALL, state)
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    assert f"{name} has {NOT_FINITE}" in refusal(path, *argv) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_weights_that_are_whole_numbers_are_refused(name, dtype, tmp_path):
    state = naive_xl.random_state(SMALL)
    state[name] = state[name].to(dtype)
    path, _ = saved(tmp_path, SMALL, state)
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    assert f"{name} is {dtype}, {WHOLE}" in refusal(path, *argv) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, reason", [(torch.Tensor.long, WHOLE), (lambda value: value * torch.nan, NOT_FINITE)])
def test_hugging_face_weights_that_are_no_numbers_are_refused(change, reason, tmp_path):
    name = "transformer.layers.0.pos_ff.CoreNet.0.weight"
    state = torch.load(HF / "pytorch_model.bin", weights_only=True)
    state[name] = change(state[name])
    torch.save(state, without(tmp_path / "in", "pytorch_model.bin") / "pytorch_model.bin")
    message = refusal(tmp_path / "in", "--from", "hf-transfo-xl", "--out", tmp_path / "out")
    assert "layers.0.pos_ff.CoreNet.0.weight" in message and reason in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_are_taken(dtype, tmp_path):
    path, _ = saved(tmp_path, SMALL, {name: value.to(dtype) for name, value in naive_xl.random_state(SMALL).items()})
    model = checkpoint.load(authors(path, tmp_path / "out", "--config", tmp_path / "config.json") / "checkpoint.pt")
    assert {value.dtype for value in model["model"].values()} == {torch.float32}


def without(folder: Path, *names: str) -> Path:
    shutil.copytree(HF, folder)
    for name in names:
        (folder / name).unlink()
    return folder


def test_hugging_face_folder_that_lacks_or_mistakes_a_file_is_refused(tmp_path):
    def refused(folder: Path) -> str:
        return refusal(folder, "--from", "hf-transfo-xl", "--out", tmp_path / "out")

    assert "config.json: file not found" in refused(without(tmp_path / "a", "config.json"))
    folder = without(tmp_path / "b", "pytorch_model.bin")
    assert "model.safetensors: file not found" in refused(folder)
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert "sharded" in refused(folder)
    (folder / "model.safetensors").write_bytes((HF / "pytorch_model.bin").read_bytes()[:100])
    assert "model.safetensors: truncated, damaged" in refused(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes((HF / "pytorch_model.bin").read_bytes()[:9000])
    assert "pytorch_model.bin: cannot be read" in refused(folder)
    assert "folder not found" in refused(HF / "config.json")
    assert "config.json: file not found" in refused(AUTHORS)
    for changed, reason in [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"layer_norm_epsilon": 1e-12}, "layer_norm_epsilon is 1e-12"),
        ({"eos_token_id": 700}, "eos_token_id is 700"),
    ]:
        shutil.copy(HF / "pytorch_model.bin", folder)
        config = {**json.loads((HF / "config.json").read_text()), **changed}
        (folder / "config.json").write_text(json.dumps(config))
        assert reason in refused(folder)
    (folder / "config.json").write_text("[]")
    assert "expected a JSON object, found list" in refused(folder)
    (folder / "config.json").unlink()
    assert not (tmp_path / "out").exists()


def test_flags_that_contradict_or_lead_nowhere_are_refused(tmp_path):
    state_dict, config = AUTHORS / "base.state_dict.pt", AUTHORS / "base.json"
    ours = ["--from", "transformer-xl", "--out", tmp_path / "out"]
    assert "give --config FILE.json" in refusal(state_dict, *ours)
    assert "config.json: file not found" in refusal(state_dict, *ours, "--config", tmp_path / "config.json")
    assert "file or folder not found" in refusal(tmp_path / "nothing", *ours)
    assert "model.pt: file not found" in refusal(AUTHORS, *ours)
    assert "leave it out" in refusal(HF, "--from", "hf-transfo-xl", "--out", tmp_path / "out", "--config", config)
    message = refusal(HF, "--from", "gpt2", "--out", tmp_path / "out")
    assert message == "--from gpt2: choose from transformer-xl, hf-transfo-xl, hf"
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    argv = [AUTHORS / "base.state_dict.pt", "--from", "transformer-xl", "--config", AUTHORS / "base.json", "--out"]
    (tmp_path / "file").write_text("mine")
    assert "is not a folder" in refusal(*argv, tmp_path / "file")
    assert "cannot be written" in refusal(*argv, tmp_path / "file" / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "checkpoint_best.pt").write_text("mine")
    assert "contains other files (checkpoint_best.pt)" in refusal(*argv, tmp_path / "used")
    assert os.listdir(tmp_path / "used") == ["checkpoint_best.pt"] and (tmp_path / "file").read_text() == "mine"


def test_failure_while_writing_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    argv = ["--config", AUTHORS / "base.json"]
    out = authors(AUTHORS / "base.state_dict.pt", tmp_path / "out", *argv)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    for folder in (out, tmp_path / "new" / "folder"):
        message = refusal(AUTHORS / "base.state_dict.pt", "--from", "transformer-xl", "--out", folder, *argv)
        assert (
            message
            == f"--out {folder}: cannot be written (No space left on device); free some space or choose another place"
        )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not (tmp_path / "new" / "folder").exists()


def test_command_ends_with_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fairseq-import", str(tmp_path / "x"), "--from", "transformer-xl", "--out", "y"])
    with pytest.raises(SystemExit) as end:
        import_model.cli_main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"fairseq-import: error: {tmp_path}/x: file or folder not found; check the path\n"
