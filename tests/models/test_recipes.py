"""With nothing but data and an architecture a run has the optimizer, schedule and clipping of its
recipe."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.config import options
from fairseq.config.registry import is_outside
from fairseq.config.settings import training_settings
from fairseq.models import ARCHITECTURES, MODELS
from fairseq.models.recipes import recipe_of, summary
from fairseq.training import stages
from fairseq_cli.common import get_training_parser

SPLITS = "--cpu --train-subset valid --valid-subset test"
OURS = [name for name in ARCHITECTURES if not is_outside(MODELS[ARCHITECTURES[name].model])]


BERT_SIZES = {"tokens_per_sample": 512, "warmup_updates": 10000, "weight_decay": 0.01, "adam_eps": 1e-6}
PAPERS: dict[str, dict[str, Any]] = {  # settings, rows of an update on one process, and the last update
    "shortformer_wiki103": {
        "optimizer": "nag",
        "lr": [1e-4],
        "max_lr": 1.0,
        "lr_scheduler": "cosine",
        "lr_period_updates": 270000,
        "t_mult": 2,
        "lr_shrink": 0.75,
        "warmup_updates": 16000,
        "warmup_init_lr": 1e-7,
        "min_lr": 1e-9,
        "clip_norm": 0.1,
        "stages": "128:140100,512:286000",
        "max_tokens": 9216,
        "update_freq": [1],
        "max_update": 286000,
        "curriculum": 1000,
        "required_batch_size_multiple": 1,
        "batch_size_valid": 1,
        "tokens_from_prev": 512,
        "criterion": "adaptive_loss",
        "skip_invalid_size_inputs_valid_test": True,
    },
    "transformer_lm_wiki103": {
        "optimizer": "nag",
        "lr": [1e-4],
        "max_lr": 1.0,
        "tokens_per_sample": 3072,
        "max_tokens": 3072,
        "update_freq": [3],
        "max_update": 286000,
        "clip_norm": 0.1,
        "stages": None,
    },
    **{
        f"transformer_lm_{name}": {
            "optimizer": "nag",
            "max_lr": 1.0,
            "lr_period_updates": 137000,
            "t_mult": 2,
            "lr_shrink": 0.6,
            "warmup_updates": 16000,
            "clip_norm": 0.1,
            "max_update": 16000 + 137000 * (1 + 2 + 4),
        }
        for name in ("gbw", "baevski_gbw")
    },
    "transformer_lm": {
        "optimizer": "adam",
        "adam_betas": [0.9, 0.98],
        "weight_decay": 0.01,
        "lr": [5e-4],
        "clip_norm": 0.0,
        "lr_scheduler": "inverse_sqrt",
        "warmup_updates": 4000,
        "warmup_init_lr": 1e-7,
        "tokens_per_sample": 512,
        "max_tokens": 2048,
        "update_freq": [16],
        "max_update": 50000,
    },
    **{
        f"transformer_xl_{name}": {
            "optimizer": "adam",
            "lr": [0.00025],
            "lr_scheduler": "cosine",
            "clip_norm": 0.25,
            "update_freq": [1],
            "tokens_per_sample": length,
            "mem_len": length,
            "batch_size": rows,
            "warmup_updates": warmup,
            "max_update": updates,
            "lr_period_updates": updates - warmup,
            "required_batch_size_multiple": 1,
        }
        for name, length, rows, warmup, updates in [
            ("wiki103_base", 150, 60, 0, 200_000),
            ("wiki103_large", 384, 128, 16_000, 4_000_000),
            ("enwik8_base", 512, 22, 0, 400_000),
            ("text8_base", 512, 22, 0, 400_000),
            ("enwik8_large", 768, 64, 4_000, 400_000),
            ("text8_large", 768, 64, 0, 400_000),
            ("lm1b_base", 32, 224, 20_000, 500_000),
            ("lm1b_large", 32, 512, 30_000, 1_200_000),
        ]
    },
    "bert_base": {**BERT_SIZES, "lr": [1e-4], "batch_size": 32, "update_freq": [8], "max_update": 1_000_000},
    "roberta_base": {**BERT_SIZES, "warmup_updates": 24000, "lr": [6e-4], "max_update": 500_000, "clip_norm": 0.0},
    "roberta_large": {**BERT_SIZES, "warmup_updates": 30000, "lr": [4e-4], "max_update": 500_000, "clip_norm": 0.0},
    "electra_base": {**BERT_SIZES, "lr": [2e-4], "batch_size": 32, "update_freq": [8], "max_update": 766_000},
    "electra_small": {
        **BERT_SIZES,
        "tokens_per_sample": 128,
        "lr": [5e-4],
        "batch_size": 32,
        "update_freq": [4],
        "max_update": 1_000_000,
    },
    **{
        f"tnf_{name}": {
            **BERT_SIZES,
            "lr": [1e-4],
            "adam_betas": [0.9, 0.98],
            "batch_size": 32,
            "update_freq": [8],
            "max_update": 1_000_000,
            "note_lambda": 0.5,
            "note_gamma": 0.1,
            "note_half_window": 16,
            "task": "tnf_masked_lm",
        }
        for name in ("bert_base", "electra_base")
    },
}


@pytest.mark.parametrize("arch", PAPERS)
def test_a_published_architecture_alone_is_trained_as_its_paper_says(arch: str) -> None:
    args = vars(runs.arguments("--arch", arch))
    assert {name: args[name] for name in PAPERS[arch]} == PAPERS[arch]


@pytest.mark.parametrize("script", ["wiki103-base", "wiki103-large", "enwik8-base", "enwik8-large", "lm1b-base", "ptb"])
def test_an_architecture_alone_is_trained_as_by_its_script(script: str) -> None:
    arch = f"transformer_xl_{script.replace('-', '_')}"
    lines = subprocess.run(
        ["bash", f"examples/transformer_xl/{script}.sh"],
        env={**os.environ, "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(options.__file__).parents[2],
    ).stdout.splitlines()
    [words] = [shlex.split(line)[2:] for line in lines if "train.py" in line]
    of_script, alone = (
        vars(options.parse_args_and_arch(get_training_parser(), words)),
        vars(runs.arguments("--arch", arch)),
    )
    saving = r"save|keep|no_epoch|origins|distributed|ddp|max_lr|^lr|data"
    assert {name: value for name, value in of_script.items() if not re.search(saving, name)} == {
        name: value for name, value in alone.items() if not re.search(saving, name)
    }


def test_the_stages_of_a_shortformer_are_trained_as_by_the_commands_of_its_authors() -> None:
    common = """--task language_modeling --arch shortformer_wiki103 --max-lr 1.0 --t-mult 2 --lr-period-updates 270000
        --lr-scheduler cosine --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-07 --min-lr 1e-09
        --optimizer nag --lr 0.0001 --clip-norm 0.1 --criterion adaptive_loss --max-tokens 9216 --update-freq 1 --seed 1
        --sample-break-mode none --skip-invalid-size-inputs-valid-test --curriculum 1000
        --required-batch-size-multiple 1"""
    alone = training_settings(runs.arguments("--arch shortformer_wiki103"))
    planned = stages.plan(alone)
    assert [(stage.tokens_per_sample, stage.max_update) for stage in planned] == [(128, 140100), (512, 286000)]
    for stage in planned:
        length = f"--tokens-per-sample {stage.tokens_per_sample} --tokens-from-prev {stage.tokens_per_sample}"
        one = vars(runs.arguments(common, length, f"--max-tokens-valid {stage.tokens_per_sample}"))
        both = stages.settings_at(alone, planned, stage).flat
        # The whole schedule ends with the last stage, and one row is validated either way.
        others = {"stages", "max_update", "max_tokens_valid", "batch_size_valid", "max_target_positions"}
        assert {n: v for n, v in one.items() if n not in others} == {n: v for n, v in both.items() if n not in others}


@pytest.mark.parametrize("arch", OURS)
def test_every_setting_of_a_recipe_is_one_of_its_parts_and_every_run_ends(arch: str) -> None:
    recipe = recipe_of(arch)
    assert {"optimizer", "lr", "lr_scheduler", "clip_norm", "max_update"} <= recipe.keys()
    parser: Any = get_training_parser()
    args = options.parse_args_and_arch(parser, [str(runs.DATA), "--arch", arch])
    assert {name: getattr(args, name) for name in recipe} == dict(recipe)
    assert recipe.keys() <= {*parser.settings, *parser.owners, "optimizer", "lr_scheduler"}


@pytest.mark.parametrize("flags", ["--tokens-per-sample 256", "--max-update 9", "--max-epoch 2"])
def test_a_length_of_the_user_switches_the_stages_off(flags: str) -> None:
    args = runs.arguments("--arch shortformer_wiki103", flags)
    assert args.stages is None and args.max_tokens == 9216
    assert (args.max_update == 286000) is ("sample" in flags)


@pytest.mark.parametrize(
    ("arch", "flags", "changed"),
    [
        ("llama_tiny", "--lr 1e-3", {}),
        ("llama_tiny", "--lr 0.5", {"lr": [0.5]}),
        ("llama_tiny", "--optimizer adam", {}),
        ("llama_tiny", "--lr-scheduler inverse_sqrt", {}),
        ("bert_tiny", "--lr 1e-3", {}),
        ("transformer_lm_fast_tiny", "--lr 0.5", {"lr": [0.5]}),
        ("llama_tiny", "--optimizer sgd", {"optimizer": "sgd"}),
        ("llama_tiny", "--lr-scheduler fixed", {"lr_scheduler": "fixed"}),
        ("transformer_lm_wiki103", "--lr 0.5", {"lr": [0.5], "max_lr": None}),
        ("transformer_lm_wiki103", "--lr-scheduler fixed", {"lr_scheduler": "fixed", "lr": [1.0], "lr_shrink": 0.1}),
        ("llama_tiny", "--clip-norm 3", {"clip_norm": 3.0}),
        ("shortformer_wiki103", "--stop-time-hours 24", {"stop_time_hours": 24.0}),
        ("shortformer_wiki103", "--update-freq 2", {"update_freq": [2]}),
        ("llama_tiny", "--max-epoch 2", {"max_epoch": 2, "max_update": 0}),
        ("shortformer_wiki103", "--batch-size 4", {"batch_size": 4, "max_tokens": None}),
        # The length of a run is that of its schedule, but for the cosine with restarts.
        ("bert_base", "--max-update 50000", {"max_update": 50000, "total_num_update": None}),
        ("transformer_xl_wiki103_base", "--max-update 900", {"max_update": 900, "lr_period_updates": -1.0}),
        (
            "transformer_xl_wiki103_large",
            "--max-update 8000",
            {"max_update": 8000, "warmup_updates": 800, "lr_period_updates": -1.0},
        ),
        ("transformer_lm_wiki103", "--max-update 9", {"max_update": 9}),
        ("bert_base", "--max-epoch 3", {"max_update": 0, "max_epoch": 3, "total_num_update": None}),
        ("transformer_xl_lm1b_base", "--max-epoch 3", {"max_update": 0, "max_epoch": 3, "lr_period_updates": -1.0}),
        ("transformer_lm_wiki103", "--max-epoch 3", {"max_update": 0, "max_epoch": 3}),
        (
            "transformer_xl_ptb",
            "--max-update 900",
            {"max_update": 900, "lr_period_updates": -1.0, "average_weights_from": 600},
        ),
    ],
)
def test_one_flag_changes_one_thing(arch: str, flags: str, changed: dict[str, Any]) -> None:
    alone, args = vars(runs.arguments("--arch", arch)), vars(runs.arguments("--arch", arch, flags))
    assert {name: args[name] for name in args if name in alone and args[name] != alone[name]} == changed or (
        {name: args[name] for name in changed} == changed
        and {name for name in recipe_of(arch) if name in args and args[name] != alone[name]} <= changed.keys()
    )


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        ("transformer_lm_wiki103", "--optimizer adam --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 9"),
        ("transformer_lm", "--optimizer sgd --lr 0.5 --lr-scheduler fixed"),
        ("transformer_lm_gpt2_tiny", "--optimizer adam --lr 2e-3"),
        ("roberta_base", "--optimizer adam --lr 1e-5 --lr-scheduler polynomial_decay --total-num-update 9"),
    ],
)
def test_a_command_for_fairseq_trains_as_there(arch: str, flags: str, tmp_path: Path) -> None:
    defaults = {"clip_norm": 0.0, "update_freq": [1], "max_update": 0, "max_tokens": None, "stages": None}
    args = vars(runs.arguments("--arch", arch, flags))
    assert {name: args[name] for name in defaults} == defaults and args["weight_decay"] == 0
    assert args["lr_scheduler"] == (flags.split("--lr-scheduler ")[1].split()[0] if "scheduler" in flags else "fixed")
    (tmp_path / "c.yaml").write_text(
        "".join(f"{word[2:]}: " if word[:2] == "--" else f"{word}\n" for word in flags.split())
    )
    of_file = vars(runs.arguments("--arch", arch, "--config", tmp_path / "c.yaml"))
    assert {name: of_file[name] for name in args} == args


def test_the_first_line_of_the_log_says_what_runs_and_where_it_comes_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        runs.train(tmp_path, SPLITS, "--arch llama_tiny --lr 1e-3 --tokens-per-sample 16 --max-update 1 --no-save")
    assert caplog.messages[:2] == [
        "adam, lr 0.001 (yours), inverse_sqrt, warm-up 200, clip 0.25 (recipe of llama_tiny)",
        "blocks of 16, batches of 8 rows (default), 1 update (yours)",
    ]


def test_the_origin_of_most_settings_does_not_follow_another_origin() -> None:
    args = runs.arguments("--arch llama_tiny --clip-norm 1 --max-update 1")
    how, what = summary(training_settings(args))
    assert how == "adam, lr 0.001, inverse_sqrt, warm-up 200, clip 1 (yours); others: recipe of llama_tiny"
    assert what == "blocks of 1024, batches of 8 rows, 1 update (yours); others: default"


@pytest.mark.parametrize("schedule", ["cosine", "polynomial_decay", "wsd"])
def test_a_short_run_with_another_schedule_has_a_short_warm_up(schedule: str) -> None:
    assert runs.arguments("--arch llama_tiny --max-update 50 --lr-scheduler", schedule).warmup_updates == 5


def test_an_encoder_that_is_fine_tuned_is_not_trained_as_in_pre_training() -> None:
    args = runs.arguments("--arch bert_base --task sentence_prediction --labels a,b")
    assert (args.update_freq, args.max_epoch, args.max_update, args.batch_size) == ([1], 10, 0, 32)
    assert (args.lr, args.lr_scheduler, args.warmup_ratio, args.weight_decay) == ([2e-5], "polynomial_decay", 0.06, 0.1)


def test_flags_and_files_win_over_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("warmup-updates: 7\n")
    args = runs.arguments("--arch transformer_lm_tiny --clip-norm 3 --config", tmp_path / "c.yaml")
    assert (args.clip_norm, args.warmup_updates, args.optimizer) == (3, 7, "adam")


@pytest.mark.parametrize("arch", ["transformer_lm_tiny", "shortformer_tiny", "transformer_xl_tiny", "lstm_lm_tiny"])
def test_nothing_diverges_with_nothing_but_data_and_an_architecture(arch: str, tmp_path: Path) -> None:
    flags = f"{SPLITS} --arch {arch} --batch-size 4 --tokens-per-sample 32 --log-format json --log-interval 1 --no-save"
    log = runs.updates(runs.train(tmp_path, flags, "--max-update 40 --disable-validation"))
    assert all(math.isfinite(line["gnorm"]) for line in log)
    assert log[-1]["loss"] < log[0]["loss"]


def test_help_shows_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(get_training_parser(), ["--arch", "transformer_xl_wiki103_large", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "optimizer, see --help-all (default: adam)" in text
    assert "learning-rate schedule, see --help-all (default: cosine)" in text
    assert "(default: 0.25)" in text.split("--clip-norm")[1][:80] and "Adam (adam):" in text


@pytest.mark.parametrize(
    ("flags", "width", "heads", "rate"),
    [
        ("", 256, 4, 0.004),
        ("--decoder-layers 2", 128, 2, 0.008),
        ("--decoder-layers 6", 384, 6, 0.002667),
        ("--decoder-layers 6 --decoder-embed-dim 128", 128, 2, 0.008),
        ("--decoder-layers 6 --lr 0.1", 384, 6, 0.1),
    ],
)
def test_sizes_and_rate_of_the_fast_recipe_follow_its_layers(flags: str, width: int, heads: int, rate: float) -> None:
    args = runs.arguments("--arch transformer_lm_fast", flags)
    sizes = (args.decoder_input_dim, args.decoder_output_dim, args.decoder_ffn_embed_dim // 4)
    assert {args.decoder_embed_dim, *sizes} == {width}
    assert (args.decoder_attention_heads, args.lr) == (heads, [rate])


def test_four_layers_of_the_fast_recipe_are_the_demo() -> None:
    dial, demo = (vars(runs.arguments(f"--arch transformer_lm_fast{name}")) for name in ("", "_demo"))
    assert {**dial, "arch": demo["arch"]} == demo
