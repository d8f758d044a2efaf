"""The command lines that the Shortformer's authors published: they parse verbatim, and run at a
small size."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil

import pytest
import runs

from fairseq.config import options
from fairseq_cli import eval_lm, preprocess
from fairseq_cli import train as train_command
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.preprocess import get_preprocessing_parser

PREPROCESS = """python preprocess.py \\
--only-source \\
--trainpref $TEXT/wiki.train.tokens \\
--validpref $TEXT/wiki.valid.tokens \\
--testpref $TEXT/wiki.test.tokens \\
--destdir data-bin/wikitext-103 \\
--workers 20"""

RECIPE = (
    "python train.py --task language_modeling data-bin/wikitext-103 --save-dir {save} --arch transformer_lm_wiki103"
    " --max-update {updates} --max-lr 1.0 --t-mult 2 --lr-period-updates 270000 --lr-scheduler cosine --lr-shrink 0.75"
    " --warmup-updates 16000 --warmup-init-lr 1e-07 --min-lr 1e-09 --optimizer nag --lr 0.0001 --clip-norm 0.1"
    " --criterion adaptive_loss --max-tokens {tokens} --update-freq {freq} --seed 1 --fp16 --sample-break-mode none"
    " --skip-invalid-size-inputs-valid-test --ddp-backend=no_c10d --tokens-per-sample {length} {rest}"
)
EVALUATE = (
    "fairseq-eval-lm data-bin/wikitext-103 --path {path}/checkpoint_best.pt --sample-break-mode none --gen-subset valid"
    " --max-sentences 1"
)
TOKEN_BY_TOKEN = EVALUATE + " --sliding-inf 1 --context-window 511 --max-tokens 512"
CACHE = "--max-tokens-valid {0} --tokens-from-prev {0} --curriculum 1000 --required-batch-size-multiple 1"

TRAINING = {
    "shortformer 1": RECIPE.format(
        save="checkpoints128e100/", updates=140100, tokens=9216, freq=1, length=128,
        rest=CACHE.format(128) + " --save-interval 100",
    ),
    "shortformer 2": RECIPE.format(
        save="shortformer/ --restore-file checkpoints128e100/checkpoint100.pt", updates=286000, tokens=9216, freq=1,
        length=512, rest=CACHE.format(512) + " --no-epoch-checkpoints",
    ),
    "shortformer without stages": RECIPE.format(
        save="shortformer-no-st/", updates=286000, tokens=9216, freq=1, length=512,
        rest=CACHE.format(512) + " --no-epoch-checkpoints",
    ),
    "staged baseline 1": RECIPE.format(
        save="checkpoints-st-128e50/", updates=70050, tokens=9216, freq=1, length=128,
        rest="--required-batch-size-multiple 1 --save-interval 50",
    ),
    "staged baseline 2": RECIPE.format(
        save="st/ --restore-file checkpoints-st-128e50/checkpoint50.pt", updates=286000, tokens=3072, freq=3,
        length=3072, rest="--no-epoch-checkpoints",
    ),
    "baseline": RECIPE.format(
        save="baseline/", updates=286000, tokens=3072, freq=3, length=3072, rest="--no-epoch-checkpoints"
    ),
}  # fmt: skip
EVALUATION = {
    "shortformer": EVALUATE.format(path="shortformer"),
    "shortformer token by token": TOKEN_BY_TOKEN.format(path="shortformer"),
    "staged baseline": EVALUATE.format(path="st"),
    "staged baseline with a window": EVALUATE.format(path="st") + " --context-window 2560",
}
LESS_MEMORY = ["--update-freq 2 --max-tokens 4608", "--update-freq 3 --max-tokens 3072"]

SMALL = """--cpu --decoder-layers 2 --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64
    --decoder-ffn-embed-dim 128 --decoder-attention-heads 4 --adaptive-softmax-cutoff 200,600
    --adaptive-input-cutoff 200,600 --max-tokens 192 --warmup-updates 4 --max-lr 0.1 --fp16-init-scale 4
    --max-valid-steps 4"""


def parsed(command, *more):
    words = shlex.split(command)
    words = words[2:] if words[0] == "python" else words[1:]
    parser = get_eval_lm_parser() if command.startswith("fairseq-eval-lm") else get_training_parser()
    return options.parse_args_and_arch(parser, words + runs.words(*more))


def train(name, *more):
    train_command.main(parsed(TRAINING[name], SMALL, *more))


def evaluate(command, *more):
    """Runs a command of EVALUATION; returns loss and perplexity as printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        eval_lm.main(parsed(command, "--cpu", *more))
    assert re.search(r"Evaluated 2670 tokens in [\d.]+s? ?s? \([\d.]+ tokens/s\)", out.getvalue()), out.getvalue()
    loss, perplexity = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", out.getvalue()).groups()
    return float(loss), float(perplexity)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with data where the commands look for it, entered."""
    shutil.copytree(runs.DATA, tmp_path / "data-bin" / "wikitext-103")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TRAINING)
def test_training_command_means_what_it_meant(name):
    args = parsed(TRAINING[name])
    staged_first, cached = name.endswith("1"), name.startswith("shortformer")
    length = 128 if staged_first else 512 if cached else 3072
    assert args.data == "data-bin/wikitext-103"
    expected = {
        "tokens_per_sample": length,
        "tokens_from_prev": length if cached else 0,
        "max_tokens_valid": length if cached else None,
        "max_tokens": 3072 if length == 3072 else 9216,
        "update_freq": [3 if length == 3072 else 1],
        "max_update": {"shortformer 1": 140100, "staged baseline 1": 70050}.get(name, 286000),
        "curriculum": 1000 if cached else 0,
        "required_batch_size_multiple": 8 if length == 3072 else 1,
        "save_interval": {"shortformer 1": 100, "staged baseline 1": 50}.get(name, 1),
        "no_epoch_checkpoints": not staged_first,
        "skip_invalid_size_inputs_valid_test": True,
    }
    expected |= {"max_lr": 1.0, "t_mult": 2, "lr_period_updates": 270000, "lr_shrink": 0.75, "warmup_updates": 16000}
    expected |= {"warmup_init_lr": 1e-7, "min_lr": 1e-9, "lr": [1e-4], "clip_norm": 0.1, "seed": 1, "fp16": True}
    expected |= {"optimizer": "nag", "lr_scheduler": "cosine", "criterion": "adaptive_loss", "ddp_backend": "no_c10d"}
    expected |= {"decoder_layers": 16, "decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "dropout": 0.3}
    expected |= {"adaptive_input_cutoff": [20000, 60000], "tie_adaptive_proj": True, "momentum": 0.99}
    assert {key: getattr(args, key) for key in expected} == expected


@pytest.mark.parametrize("flags", LESS_MEMORY)
@pytest.mark.parametrize("name", ["shortformer 1", "shortformer 2", "shortformer without stages"])
def test_variant_that_needs_less_memory_has_the_same_batch(name, flags):
    args, whole = parsed(TRAINING[name], flags), parsed(TRAINING[name])
    assert args.max_tokens * args.update_freq[0] == whole.max_tokens == 9216


def test_evaluation_commands_mean_what_they_meant():
    args = parsed(EVALUATION["shortformer token by token"])
    assert (args.path, args.gen_subset, args.batch_size) == ("shortformer/checkpoint_best.pt", "valid", 1)
    assert (args.sliding_inf, args.context_window, args.max_tokens) == (1, 511, 512)
    assert parsed(EVALUATION["staged baseline with a window"]).context_window == 2560
    assert parsed(EVALUATION["shortformer"]).sliding_inf != 1


def test_preprocessing_command(tmp_path, monkeypatch):
    text = tmp_path / "examples" / "language_model" / "wikitext-103"
    text.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        shutil.copy(runs.GOLDEN / "text" / f"{split}.txt", text / f"wiki.{split}.tokens")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(PREPROCESS.replace("$TEXT", "examples/language_model/wikitext-103").replace("\\\n", ""))[2:]
    words += ["--workers", "2", "--nwordssrc", "1200"]
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), words))
    for file in runs.DATA.iterdir():
        assert (tmp_path / "data-bin" / "wikitext-103" / file.name).read_bytes() == file.read_bytes()


def test_shortformer_in_two_stages_and_its_evaluations(folder):
    short = "--tokens-per-sample 16 --tokens-from-prev 16 --max-tokens-valid 16 --train-subset test"
    train("shortformer 1", short, "--max-epoch 1 --save-interval 1")
    (folder / "checkpoints128e100" / "checkpoint1.pt").rename(folder / "checkpoints128e100" / "checkpoint100.pt")
    train("shortformer 2", "--tokens-per-sample 32 --tokens-from-prev 32 --max-tokens-valid 32 --max-update 18")
    loss, perplexity = evaluate(EVALUATION["shortformer"])
    sliding = evaluate(EVALUATION["shortformer token by token"], "--context-window 31 --max-tokens 640")
    assert sliding == pytest.approx((loss, perplexity), rel=1e-3)
    assert perplexity < 1200


def test_shortformer_without_stages(folder):
    lengths = "--tokens-per-sample 32 --tokens-from-prev 32 --max-tokens-valid 32"
    train("shortformer without stages", lengths, "--max-update 3")
    assert (folder / "shortformer-no-st" / "checkpoint_best.pt").exists()


def test_variants_that_need_less_memory_run(folder):
    lengths = "--tokens-per-sample 16 --tokens-from-prev 16 --max-tokens-valid 16 --max-update 2"
    train("shortformer without stages", lengths, "--update-freq 2 --max-tokens 32")
    train("shortformer without stages", lengths, "--update-freq 3 --max-tokens 16 --max-update 3 --save-dir other")


def test_baseline_in_two_stages_and_its_evaluations(folder):
    train("staged baseline 1", "--tokens-per-sample 16 --max-epoch 1 --train-subset test --save-interval 1")
    (folder / "checkpoints-st-128e50" / "checkpoint1.pt").rename(folder / "checkpoints-st-128e50" / "checkpoint50.pt")
    train("staged baseline 2", "--tokens-per-sample 64 --max-update 18")
    loss, _ = evaluate(EVALUATION["staged baseline"])
    window, _ = evaluate(EVALUATION["staged baseline with a window"], "--context-window 48")
    assert window != loss


def test_baseline(folder):
    train("baseline", "--tokens-per-sample 64 --max-update 3")
    assert (folder / "baseline" / "checkpoint_best.pt").exists()
