"""Weights of another model start a new run."""

from __future__ import annotations

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.errors import UserError

FINETUNE = "--optimizer adam --max-update 1 --no-epoch-checkpoints --disable-validation"


def test_fine_tuning_takes_what_fits_and_names_the_rest(tmp_path, caplog):
    runs.train(tmp_path / "first", runs.BASELINE, FINETUNE, "--lr 1e-9")
    source = tmp_path / "first" / "checkpoint_last.pt"
    caplog.set_level("INFO")
    other = f"{FINETUNE} --lr 1e-9 --decoder-ffn-embed-dim 48 --seed 9 --finetune-from-model"
    runs.train(tmp_path / "second", runs.BASELINE, other, source)
    line = next(record.message for record in caplog.records if "parameters loaded" in record.message)
    assert line.startswith(f"{source}: ") and "decoder.layers.0.fc1.weight" in line and "\n" not in line
    assert "decoder.layers.0.self_attn.k_proj.weight" not in line
    first, second = (checkpoint.load(tmp_path / run / "checkpoint_last.pt") for run in ("first", "second"))
    key = "decoder.layers.0.self_attn.k_proj.weight"
    assert torch.allclose(first["model"][key], second["model"][key], atol=1e-7)
    assert second["optimizer_history"][-1]["num_updates"] == 1


def test_fine_tuning_gives_way_to_the_runs_own_checkpoint_and_contradictions_are_refused(tmp_path):
    runs.train(tmp_path / "first", runs.BASELINE, FINETUNE)
    source = tmp_path / "first" / "checkpoint_last.pt"
    log = runs.train(tmp_path / "first", runs.BASELINE, FINETUNE, "--max-update 3 --finetune-from-model", source)
    assert [line["num_updates"] for line in runs.updates(log)] == [2, 3]
    with pytest.raises(UserError, match="--finetune-from-model: cannot be combined with --restore-file"):
        runs.train(tmp_path / "x", runs.BASELINE, FINETUNE, "--finetune-from-model", source, "--restore-file", source)
    state = checkpoint.load(source)
    checkpoint.save(tmp_path / "other.pt", {**state, "model": {"another.weight": torch.ones(2)}})
    with pytest.raises(UserError, match="no parameter matches this model"):
        runs.train(tmp_path / "y", runs.BASELINE, FINETUNE, "--finetune-from-model", tmp_path / "other.pt")


def test_norms_and_biases_are_left_out_of_weight_decay_when_asked_for(tmp_path):
    flags = f"{FINETUNE} --weight-decay 0.5 --lr 1.0 --adam-eps 1e9"  # such an epsilon leaves the decay alone
    runs.train(tmp_path / "start", runs.BASELINE, f"{FINETUNE} --lr 1e-30")
    start = checkpoint.load(tmp_path / "start" / "checkpoint_last.pt")["model"]
    for name, extra in {"all": "", "matrices": "--no-decay-on-norms-and-biases"}.items():
        runs.train(tmp_path / name, runs.BASELINE, flags, extra)
        found = checkpoint.load(tmp_path / name / "checkpoint_last.pt")["model"]
        norm, matrix = "decoder.layers.0.final_layer_norm.weight", "decoder.layers.0.fc1.weight"
        assert torch.allclose(found[matrix], 0.5 * start[matrix], atol=1e-6)
        assert torch.allclose(found[norm], (0.5 if name == "all" else 1.0) * start[norm], atol=1e-6)
