"""Errors name what the user typed, and suggest what is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from mistakes import user_error

from fairseq.errors import counted

QUICK = "--cpu --tokens-per-sample 16 --batch-size 4 --train-subset valid --valid-subset test --max-update"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--arch transformer_xl_tiny --n_layer 3", "--n_layer: no such flag; did you mean --n-layer"),
        ("--arch llama_tiny --n_layer 3", "--n-layer: belongs to --arch transformer_xl"),
        ("--arch llama_tiny --n_layer 3", "--n-layer: .*; did you mean --decoder-layers?"),
        ("--arch llama_tiny --num-layers 3", "--num-layers: no such flag; did you mean --decoder-layers?"),
        ("--arch bert_tiny --num_hidden_layers 3", "--num_hidden_layers: no such flag; did you mean --encoder-layers?"),
        ("--arch transformer_xl_tiny --hidden-size 8", "--hidden-size: no such flag; did you mean --d-model?"),
        ("--arch llama_tiny --max_steps 3", "--max_steps: no such flag; did you mean --max-update?"),
        ("--arch llama_tiny --warmup_steps 3", "--warmup-steps: .*tri_stage.*; did you mean --warmup-updates?"),
        ("--arch llama_tiny --bs 3", "--bs: no such flag; did you mean --batch-size?"),
        ("--arch llama_tiny --learning-rate x", "--lr: expected a number"),
        ("--arch llama_tiny --n_lay 3", "--n_lay: no such flag; see --help"),
        ("--arch llama_tiny --lr-scheduler linear", "--lr-scheduler linear: .*; did you mean polynomial_decay?"),
        ("--arch llama_tiny --lr-scheduler cosin", "--lr-scheduler cosin: .*; did you mean cosine?"),
        ("--arch llama_tiny --lr-scheduler ramp", "--lr-scheduler ramp: .*; known: cosine, fixed"),
    ],
)
def test_a_suggestion_is_what_is_meant_or_none(flags: str, line: str) -> None:
    with user_error(line):
        runs.arguments(flags)


def test_a_settings_file_gets_the_same_suggestions(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("max_steps: 10\n")
    with user_error("max_steps: no such setting; did you mean max_update?"):
        runs.arguments("--config", tmp_path / "run.yaml")


def test_another_model_in_the_folder_of_a_run_is_said_to_be_another_run(tmp_path: Path) -> None:
    runs.train(tmp_path, "--arch transformer_lm_tiny", QUICK, 1)
    for arch in ("llama_tiny", "transformer_lm_gpt2_tiny", "transformer_xl_tiny"):
        with user_error(f"--save-dir {tmp_path}: holds another run, of transformer_lm_tiny; choose another --save-dir"):
            runs.train(tmp_path, "--arch", arch, QUICK, 2)


def test_another_size_in_the_folder_of_a_run_is_said_to_be_another_run(tmp_path: Path) -> None:
    runs.train(tmp_path, "--arch llama_tiny", QUICK, 1)
    for flags, held in (("--decoder-layers 3", "layers 2"), ("--decoder-attention-heads 2", "attention-heads 4")):
        with user_error(f"--save-dir {tmp_path}: holds another run, with --decoder-{held}; choose another --save-dir"):
            runs.train(tmp_path, "--arch llama_tiny", flags, QUICK, 2)
    with user_error("made with optimizer adam, not sgd; give its --optimizer"):
        runs.train(tmp_path, "--arch llama_tiny --optimizer sgd", QUICK, 2)


def test_one_of_a_thing_is_in_the_singular() -> None:
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(n, "update") for n in (1, 1000)] == ["1 update", "1,000 updates"]
