"""Command lines and nested YAML files in Hydra's form mean what they mean to fairseq."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import runs
from mistakes import user_error

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.interop.fairseq.hydra import training_flags
from fairseq_cli import hydra_train
from fairseq_cli.common import get_training_parser

PRETRAINING = """# @package _group_
common:
  fp16: false
  log_format: json
  log_interval: 1
checkpoint: {no_epoch_checkpoints: true}
task:
  _name: masked_lm
  data: ???
  sample_break_mode: complete
  tokens_per_sample: 32
criterion: masked_lm
dataset: {batch_size: 16, ignore_unused_valid_subsets: true}
optimizer: {_name: adam, weight_decay: 0.01, adam_betas: "(0.9,0.98)", adam_eps: 1e-06}
lr_scheduler:
  _name: polynomial_decay
  warmup_updates: 2
  total_num_update: ${optimization.max_update}
optimization: {clip_norm: 0, lr: [0.0005], max_update: 4, update_freq: [2]}
model: {_name: roberta, max_positions: 128, dropout: 0.1, attention_dropout: 0.1}
"""
SMALL = [
    "model.encoder_layers=1",
    "+model.encoder_embed_dim=16",
    "++model.encoder_attention_heads=2",
    "common.cpu=true",
]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "base.yaml"


def flags(config: Path | None, *overrides: str) -> dict[str, str]:
    data, *words = training_flags(config, ["task.data=d", *overrides])
    assert data == "d"
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_a_file_of_pretraining_is_a_run_of_fairseq_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "config", base=PRETRAINING)
    words = [
        *("--config-dir", str(tmp_path / "config"), "--config-name", "base", f"task.data={runs.DATA}"),
        *(f"hydra.run.dir={tmp_path}/run", "optimization.lr=[0.001]", "model.encoder_ffn_embed_dim=16", *SMALL),
    ]
    monkeypatch.setattr(sys, "argv", ["fairseq-hydra-train", *words])
    hydra_train.cli_main()
    output = capsys.readouterr()
    assert (tmp_path / "run" / "checkpoint_last.pt").is_file()
    updates = runs.updates(runs.records(output.out))
    assert [line["num_updates"] for line in updates] == [1, 2, 3, 4]
    assert [line["lr"] for line in updates] == pytest.approx([5e-4, 1e-3, 5e-4, 0], abs=1e-12)
    assert f"fairseq-train {runs.DATA} --criterion=masked_lm --lr-scheduler=polynomial_decay" in output.err


def test_groups_take_files_options_and_values_in_hydras_order(tmp_path: Path) -> None:
    base = write(
        tmp_path,
        base="defaults:\n  - _self_\n  - model: big\n  - override hydra/job_logging: none\nmodel: {dropout: 0.2}\n",
        model__big="# @package _group_\n_name: transformer_lm\ndecoder_layers: 9\ndropout: 0.4\n",
        optimizer__quick="_name: adam\nlr: ${optimization.lr}\n",
    )
    assert flags(base) == {
        "--criterion": "cross_entropy",  # fairseq's own default
        "--arch": "transformer_lm",
        "--decoder-layers": "9",
        "--dropout": "0.2",
    }
    given = flags(base, "model=transformer_lm/transformer_lm_gpt", "optimizer=quick", "optimization.lr=[0.1,0.2]")
    assert given["--arch"] == "transformer_lm_gpt" and "--decoder-layers" not in given
    assert given["--optimizer"] == "adam" and given["--lr"] == "0.1,0.2"
    assert flags(base, "model=null")["--dropout"] == "0.2"
    assert "--dropout" not in flags(base, "~model.dropout")
    assert "--arch" not in flags(base, "~model=transformer_lm") and "--optimizer" not in flags(None, "~optimizer=adam")
    assert flags(base, "hydra.job.name=y") == flags(base)
    assert flags(None, "task=language_modeling", "optimizer.adam_betas='(0.9, 0.98)'", "common.fp16=true") == {
        "--criterion": "cross_entropy",
        "--lr-scheduler": "fixed",
        "--task": "language_modeling",
        "--adam-betas": "(0.9, 0.98)",
        "--fp16": "",
    }


def test_a_switch_that_is_off_is_off_whatever_the_architecture_says() -> None:
    off = ["model.share_decoder_input_output_embed=false", "model.decoder_normalize_before=false", "common.tpu=false"]
    for overrides, expected in (([], True), ([*off, "common.profile=false"], False)):
        words = training_flags(None, ["task.data=d", "model=transformer_lm_gpt3_small", *overrides])
        args = options.parse_args_and_arch(get_training_parser(), words)
        assert args.decoder_normalize_before is args.share_decoder_input_output_embed is expected
        assert args.profile is None
    for name in ("optimization.lr", "optimization.typo"):
        with user_error(f"--{name[13:]}: (expected a number, got 'false'|no such flag)"):
            words = training_flags(None, ["task.data=d", f"{name}=false"])
            options.parse_args_and_arch(get_training_parser(), words)


def test_a_file_that_fairseq_composed_is_taken(tmp_path: Path) -> None:
    text = """# @package _global_
_name: null
common: {_name: null, tpu: false, seed: 3}
common_eval: {path: null, model_overrides: '{}'}
generation: {beam: 5, unnormalized: false}
ema: {_name: null, store_ema: false, ema_decay: 0.9999}
dataset: {batch_size: null, max_tokens: 64}
task: {_name: language_modeling, data: d, tpu: "${common.tpu}", batch_size: "${dataset.batch_size}"}
model: {_name: transformer_lm, max_tokens: "${dataset.max_tokens}"}
bpe: null
"""
    given = flags(write(tmp_path, base=text), "task.seed=${common.seed}")
    assert given == flags(None, "task=language_modeling", "model=transformer_lm") | {
        "--tpu": "false",
        "--seed": "3",
        "--max-tokens": "64",
    }


def test_the_folder_of_a_run_holds_what_it_writes() -> None:
    run = "hydra.run.dir=/runs/3"
    assert flags(None, run)["--save-dir"] == "/runs/3"
    both = flags(None, run, "checkpoint.save_dir=best", "common.tensorboard_logdir=/curves")
    assert both["--save-dir"] == "/runs/3/best" and both["--tensorboard-logdir"] == "/curves"


def test_null_is_the_default_and_not_an_empty_value() -> None:
    default = training_flags(None, ["task.data=d"])
    assert training_flags(None, ["task.data=d", "common.seed=null", "model._name=~", "optimizer=NULL"]) == default


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["optimization.lr=0.1,0.2"],
            "optimization.lr=0.1,0.2: sweeps are not supported; start one run for each value",
        ),
        (["optimization"], "optimization: expected group.name=value"),
        (["--fp16"], "--fp16: expected group.name=value"),
        (["optimisation.lr=1"], "optimisation: no such group of settings; one of model, task, criterion,"),
        (["model.dropout=["], "model.dropout=[: the value is not valid YAML; quote it"),
        (["model.lr=1", "optimization.lr=2"], "optimization.lr=2: model.lr is 1; give both the same value"),
        (["model.x=${env:HOME}"], "model.x=${env:HOME}: only ${group.name} as a whole is read; give the value"),
        (["model.x=a/${common.seed}", "common.seed=1"], "model.x=a/${common.seed}: only ${group.name} as a whole"),
        (["hydra/launcher=submitit_slurm"], "hydra/launcher=submitit_slurm: launchers and sweepers are not supported"),
        (["hydra.launcher.partition=x"], "hydra.launcher: launchers and sweepers are not supported"),
        (["model.dropout=???"], "model.dropout: missing; give model.dropout=VALUE"),
        (["model.x.y=1", "model.x.y.z=2"], "model.x.y.z: y is a value, not a group"),
        *(
            ([text], f"{text}: an empty value; give one, or leave {text.strip('+#= ')} out for the default")
            for text in (
                "task._name=",
                "task=",
                "optimization.lr= ",
                "+common.seed=",
                "checkpoint.save_dir=#",
                "hydra.run.dir=",
            )
        ),
        (["model.=1"], "model.=1: expected group.name=value"),
        (["~model.typo"], "~model.typo: is not set; leave it out"),
        (["hydra.run=5"], "hydra.run: expected hydra.run.dir=DIR, found 5"),
    ],
)
def test_what_cannot_be_translated_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        training_flags(None, ["task.data=d", *overrides])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--nonsense", "--nonsense: no such flag; see --help"),
        ("--config-name base", "--config-dir and --config-name: give both, or only group.name=value"),
        ("-m task.data=d", "--multirun: sweeps are not supported; start one run for each value"),
        # Overrides stand before flags and behind them.
        ("task.data=d --config-dir no common.seed=3 --config-name base", "--config-name no/base.yaml: file not found"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fairseq-hydra-train", *words.split()])
    with pytest.raises(SystemExit) as exit:
        hydra_train.cli_main()
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and f"fairseq-hydra-train: error: {message}" in error


def test_missing_data_and_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task.data: missing"):
        training_flags(write(tmp_path, base=PRETRAINING), [])
    with pytest.raises(UserError, match=r"--config-name .*none\.yaml: "):
        training_flags(tmp_path / "none.yaml", [])
    with pytest.raises(UserError, match="override hydra/launcher: launchers and sweepers are not supported"):
        training_flags(write(tmp_path, base="defaults: [{override hydra/launcher: slurm}]"), ["task.data=d"])
    for text in ("defaults: [a]", "defaults: [{a: b, c: d}]", "- 1", "common: 3"):
        with pytest.raises(UserError):
            training_flags(write(tmp_path, base=text), ["task.data=d"])
