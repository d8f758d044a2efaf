"""The language-model commands of fairseq 0.12.2's examples: they parse verbatim, and run at a small
size."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.models.roberta import RobertaModel
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, preprocess
from fairseq_cli import train as train_command
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.preprocess import get_preprocessing_parser

TRAIN = {
    "language_model/README.md": """fairseq-train --task language_modeling \\
  data-bin/wikitext-103 \\
  --save-dir checkpoints/transformer_wikitext-103 \\
  --arch transformer_lm --share-decoder-input-output-embed \\
  --dropout 0.1 \\
  --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 \\
  --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 \\
  --tokens-per-sample 512 --sample-break-mode none \\
  --max-tokens 2048 --update-freq 16 \\
  --fp16 \\
  --max-update 50000""",
    "language_model/README.adaptive_inputs.md": """fairseq-train --task language_modeling \\
    data-bin/wikitext-103 \\
    --save-dir checkpoints/transformer_wikitext-103 \\
    --arch transformer_lm_wiki103 \\
    --max-update 286000 --lr 1.0 --t-mult 2 --lr-period-updates 270000 --lr-scheduler cosine --lr-shrink 0.75 \\
    --warmup-updates 16000 --warmup-init-lr 1e-07 --stop-min-lr 1e-09 --optimizer nag --min-lr 0.0001 \\
    --clip-norm 0.1 \\
    --criterion adaptive_loss --max-tokens 3072 --update-freq 3 --tokens-per-sample 3072 --seed 1 \\
    --sample-break-mode none --skip-invalid-size-inputs-valid-test --ddp-backend=legacy_ddp""",
    "truncated_bptt/README.md": """CUDA_VISIBLE_DEVICES=0,1,2,3 fairseq-train \\
    --user-dir examples/truncated_bptt \\
    data-bin/wikitext-103/ \\
    --task truncated_bptt_lm --tokens-per-sample 150 \\
    --batch-size 15 --max-update 200000 \\
    --arch transformer_xl --n-layer 16 --d-model 410 --n-head 10 \\
    --d-head 41 --d-inner 2100 --dropout 0.1 --dropatt 0.0 --mem-len 150 \\
    --optimizer adam --clip-norm 0.25 \\
    --lr-scheduler cosine --warmup-updates 0 --min-lr 0.0 --lr 0.00025  \\
    --log-format json --log-interval 25 \\
    --fp16""",
    "truncated_bptt/README.md of 0.10": """fairseq-train \\
    --user-dir examples/truncated_bptt \\
    data-bin/wikitext-103/ \\
    --task truncated_bptt_lm --tokens-per-sample 150 \\
    --batch-size 15 --max-update 200000 \\
    --arch transformer_xl --n-layer 16 --d-model 410 --n-head 10 \\
    --d-head 41 --d-inner 2100 --dropout 0.1 --dropatt 0.0 --mem-len 150 \\
    --optimizer adam --clip-norm 0.25 \\
    --lr-scheduler cosine --warmup-updates 0 --lr 0.0 --max-lr 0.00025  \\
    --log-format json --log-interval 25 \\
    --fp16""",
}
ROBERTA = {
    "README.pretraining.md of 0.10": """fairseq-train --fp16 data-bin/wikitext-103 \\
    --task masked_lm --criterion masked_lm \\
    --arch roberta_base --sample-break-mode complete --tokens-per-sample 512 \\
    --optimizer adam --adam-betas '(0.9,0.98)' --adam-eps 1e-6 --clip-norm 0.0 \\
    --lr-scheduler polynomial_decay --lr 0.0005 --warmup-updates 10000 --total-num-update 125000 \\
    --dropout 0.1 --attention-dropout 0.1 --weight-decay 0.01 \\
    --batch-size 16 --update-freq 16 \\
    --max-update 125000 --log-format simple --log-interval 1""",
    "README.custom_classification.md": """CUDA_VISIBLE_DEVICES=0 fairseq-train IMDB-bin/ \\
    --restore-file /path/to/roberta.large/model.pt \\
    --max-positions 512 \\
    --batch-size 8 \\
    --max-tokens 4400 \\
    --task sentence_prediction \\
    --reset-optimizer --reset-dataloader --reset-meters \\
    --required-batch-size-multiple 1 \\
    --init-token 0 --separator-token 2 \\
    --arch roberta_large \\
    --criterion sentence_prediction \\
    --classification-head-name imdb_head \\
    --num-classes 2 \\
    --dropout 0.1 --attention-dropout 0.1 \\
    --weight-decay 0.1 --optimizer adam --adam-betas "(0.9, 0.98)" --adam-eps 1e-06 \\
    --clip-norm 0.0 \\
    --lr-scheduler polynomial_decay --lr 1e-05 --total-num-update 7812 --warmup-updates 469 \\
    --fp16 --fp16-init-scale 4 --threshold-loss-scale 1 --fp16-scale-window 128 \\
    --max-epoch 10 \\
    --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric \\
    --shorten-method "truncate" \\
    --find-unused-parameters \\
    --update-freq 4""",
    "README.glue.md of 0.10, STS-B": """CUDA_VISIBLE_DEVICES=0 fairseq-train STS-B-bin/ \\
    --restore-file /path/to/roberta/model.pt \\
    --max-positions 512 \\
    --batch-size 16 \\
    --max-tokens 4400 \\
    --task sentence_prediction \\
    --reset-optimizer --reset-dataloader --reset-meters \\
    --required-batch-size-multiple 1 \\
    --init-token 0 --separator-token 2 \\
    --arch roberta_large \\
    --criterion sentence_prediction \\
    --num-classes 1 --regression-target \\
    --dropout 0.1 --attention-dropout 0.1 \\
    --weight-decay 0.1 --optimizer adam --adam-betas "(0.9, 0.98)" --adam-eps 1e-06 \\
    --clip-norm 0.0 \\
    --lr-scheduler polynomial_decay --lr 2e-05 --total-num-update 3598 --warmup-updates 214 \\
    --fp16 --fp16-init-scale 4 --threshold-loss-scale 1 --fp16-scale-window 128 \\
    --max-epoch 10 \\
    --find-unused-parameters \\
    --best-checkpoint-metric loss;""",
}
PREPROCESS = (
    """fairseq-preprocess --only-source --trainpref train.{0} --validpref dev.{0} --destdir {1}-bin/{0} --workers 60"""
)
EVALUATE = {
    "language_model/README.md": """fairseq-eval-lm data-bin/wikitext-103 \\
    --path checkpoints/transformer_wiki103/checkpoint_best.pt \\
    --batch-size 2 \\
    --tokens-per-sample 512 \\
    --context-window 400""",
    "language_model/README.md of 0.9": """fairseq-eval-lm data-bin/wikitext-103 \\
    --path checkpoints/transformer_wiki103/checkpoint_best.pt \\
    --sample-break-mode complete --max-tokens 3072 \\
    --context-window 2560 --softmax-batch 1024""",
    "truncated_bptt/README.md": """fairseq-eval-lm data-bin/wikitext-103/ \\
    --path checkpoints/checkpoint_best.pt \\
    --user-dir examples/truncated_bptt/ \\
    --task truncated_bptt_lm \\
    --batch-size 1 --required-batch-size-multiple 1 \\
    --model-overrides '{"mem_len":640,"clamp_len":400,"same_length":True}' \\
    --tokens-per-sample 64""",
}
CONVOLUTIONAL = """fairseq-train --task language_modeling \\
    data-bin/wikitext-103 \\
    --save-dir checkpoints/fconv_wikitext-103 \\
    --arch fconv_lm_dauphin_wikitext103 \\
    --adaptive-softmax-cutoff 10000,20000,200000 \\
    --dropout 0.2 \\
    --criterion adaptive_loss \\
    --optimizer nag --clip-norm 0.1 --weight-decay 5e-06 \\
    --lr 1.0 --lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5 \\
    --max-tokens 1024 --tokens-per-sample 1024 \\
    --ddp-backend legacy_ddp \\
    --max-epoch 35"""
EXPECTED: dict[str, dict[str, Any]] = {
    "language_model/README.md": {"adam_betas": [0.9, 0.98], "warmup_init_lr": 1e-7, "update_freq": [16]},
    "language_model/README.adaptive_inputs.md": {"lr": [1.0], "min_lr": 1e-4, "stop_min_lr": 1e-9, "max_lr": None},
    "truncated_bptt/README.md": {"n_layer": 16, "untie_r": True, "cutoffs": [20000, 40000, 200000], "lr": [0.00025]},
    "truncated_bptt/README.md of 0.10": {"lr": [0.0], "max_lr": 0.00025, "memory_start": "zeros"},
}  # fmt: skip
ROBERTA_SMALL = """--cpu --bf16 --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32
    --encoder-attention-heads 2 --max-positions 32 --update-freq 1 --no-epoch-checkpoints"""
BPTT_SMALL = """--cpu --bf16 --n-layer 2 --d-model 32 --n-head 2 --d-head 16 --d-inner 32 --mem-len 16 --batch-size 4
    --tokens-per-sample 16 --max-update 3 --train-subset valid --valid-subset test --cutoffs 200,600,1000000
    --max-valid-steps 4"""
LM_SMALL = """--cpu --bf16 --decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --max-tokens 64
    --decoder-attention-heads 2 --tokens-per-sample 16 --update-freq 1 --max-update 2 --train-subset valid
    --valid-subset test --max-valid-steps 4"""


def words(command: str) -> list[str]:
    """The flags of a command of fairseq's documentation."""
    found = shlex.split(command.replace("\\\n", " "))
    return found[next(i for i, word in enumerate(found) if word.startswith("fairseq-")) + 1 :]


def parsed(command: str, *more: Any) -> Any:
    make = get_eval_lm_parser if "fairseq-eval-lm" in command else get_training_parser
    given = [word for word in words(command) if word != "--fp16" or not more]
    return options.parse_args_and_arch(make(), given + runs.words(*more))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the commands find data and examples, entered."""
    shutil.copytree(runs.DATA, tmp_path / "data-bin" / "wikitext-103")
    (tmp_path / "examples").symlink_to(runs.ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def perplexity(args: Any) -> float:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        eval_lm.main(args)
    match = re.search(r"Perplexity: ([\d.]+)", out.getvalue())
    assert match is not None
    return float(match[1])


@pytest.mark.parametrize("name", TRAIN)
def test_training_commands_parse_verbatim(name: str, folder: Path) -> None:
    args = parsed(TRAIN[name])
    assert {key: getattr(args, key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EVALUATE)
def test_evaluation_commands_parse_verbatim(name: str, folder: Path) -> None:
    assert parsed(EVALUATE[name]).path.endswith("checkpoint_best.pt")


@pytest.mark.parametrize("name", ["truncated_bptt/README.md", "truncated_bptt/README.md of 0.10"])
def test_truncated_bptt_trains_and_is_evaluated_with_a_longer_memory(name: str, folder: Path) -> None:
    train_command.main(parsed(TRAIN[name], BPTT_SMALL))
    stored = runs.checkpoint.read(Path("checkpoints/checkpoint_best.pt"))["args"]
    assert stored["cutoffs"] == [200, 600] and stored["task"] == "truncated_bptt_lm"
    short = EVALUATE["truncated_bptt/README.md"].replace("640", "48").replace("400", "8")
    assert 0 < perplexity(parsed(short, "--cpu --tokens-per-sample 32")) < 5000


def test_the_readmes_model_trains_and_is_evaluated_with_a_context(folder: Path) -> None:
    train_command.main(parsed(TRAIN["language_model/README.md"], LM_SMALL))
    shutil.move("checkpoints/transformer_wikitext-103", "checkpoints/transformer_wiki103")
    shorter = "--cpu --tokens-per-sample 16 --context-window 8"
    assert perplexity(parsed(EVALUATE["language_model/README.md"], shorter)) > 1
    assert perplexity(parsed(EVALUATE["language_model/README.md of 0.9"], shorter)) > 1


@pytest.mark.parametrize("name", ROBERTA)
def test_commands_of_roberta_parse_verbatim(name: str, folder: Path) -> None:
    args = parsed(ROBERTA[name].rstrip(";"))
    assert args.adam_betas == [0.9, 0.98] and args.max_positions == 512
    if args.task == "sentence_prediction":
        assert (args.init_token, args.separator_token, args.restore_file[:9]) == (0, 2, "/path/to/")


def preprocess_texts(name: str, texts: dict[str, list[str]], *columns: str) -> None:
    """Run the documented preprocessing of *columns*, such as ``input0``, of texts by file name."""
    for file, lines in texts.items():
        Path(file).write_text("".join(f"{line}\n" for line in lines))
    for column in columns:
        flags = words(PREPROCESS.format(column, name).replace("60", "1"))
        dictionary = [] if column == "label" else ["--srcdict", "data-bin/wikitext-103/dict.txt"]
        preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), [*flags, *dictionary]))


def test_roberta_is_pretrained_fine_tuned_to_classes_and_scores_and_predicts(folder: Path) -> None:
    symbols = Dictionary.load(runs.DATA / "dict.txt").symbols[4:44]
    draw = random.Random(1)
    lines = [draw.choices(symbols[10:], k=4) + [draw.choice(symbols[:2])] for _ in range(96)]
    good = [line[-1] == symbols[0] for line in lines]
    parts = {"train": slice(0, 64), "dev": slice(64, 96)}
    subsets = "--train-subset valid --valid-subset test --tokens-per-sample 16 --max-update 3 --warmup-updates 1"
    train_command.main(
        parsed(ROBERTA["README.pretraining.md of 0.10"], ROBERTA_SMALL, subsets, "--save-dir pretrained")
    )

    texts = {f"{split}.input0": [" ".join(line) for line in lines[part]] for split, part in parts.items()}
    labels = {
        f"{split}.label": ["pos" if is_good else "neg" for is_good in good[part]] for split, part in parts.items()
    }
    preprocess_texts("IMDB", texts | labels, "input0", "label")
    small = [ROBERTA_SMALL, "--dropout 0 --attention-dropout 0 --lr 0.01 --total-num-update 200 --warmup-updates 5"]
    small.append("--restore-file pretrained/checkpoint_best.pt --log-interval 100")
    train_command.main(parsed(ROBERTA["README.custom_classification.md"], small))
    roberta = RobertaModel.from_pretrained("checkpoints", "checkpoint_best.pt", "IMDB-bin", bpe=None)
    classes, correct = roberta.task.label_dictionary, 0
    for text, label in zip(texts["dev.input0"], labels["dev.label"], strict=True):
        best = roberta.predict("imdb_head", roberta.encode(text)).argmax().item()
        correct += classes.string([best + classes.nspecial]) == label
    assert correct >= 30

    pairs = {name.replace("0", "1"): [" ".join(symbols[10:12])] * len(text) for name, text in texts.items()}
    preprocess_texts("STS-B", texts | pairs, "input0", "input1")
    Path("STS-B-bin/label").mkdir()
    for split, part in {"train": parts["train"], "valid": parts["dev"]}.items():
        Path(f"STS-B-bin/label/{split}.label").write_text("".join(f"{float(is_good)}\n" for is_good in good[part]))
    train_command.main(
        parsed(ROBERTA["README.glue.md of 0.10, STS-B"].rstrip(";"), small, "--save-dir scores --batch-size 4")
    )
    roberta = RobertaModel.from_pretrained("scores", "checkpoint_best.pt")
    rows = [roberta.encode(*pair) for pair in zip(texts["dev.input0"], pairs["dev.input1"], strict=True)]
    scores = [roberta.predict("sentence_classification_head", row, return_logits=True).item() for row in rows]
    assert [score > 0.5 for score in scores] == good[parts["dev"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mask-multiple-length 3", "--mask-multiple-length 3: spans are not masked; use 1, or --mask-whole-words"),
        ("--skip-masking", "--skip-masking: rows are always masked; leave it out"),
        ("--arch roberta_prenorm", "--arch roberta_prenorm: encoders with pre-norm are not implemented"),
        ("--arch xlm_roberta", "--arch xlm_roberta: .*choose roberta_base or roberta_large"),
    ],
)
def test_what_is_not_there_of_roberta_is_refused_in_one_line(flags: str, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        parsed(ROBERTA["README.pretraining.md of 0.10"], flags)


def test_convolutional_models_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="--arch fconv_lm_dauphin_wikitext103: convolutional language models are not"):
        parsed(CONVOLUTIONAL)


@pytest.mark.parametrize(("arch", "kind"), [("transformer_iwslt_de_en", "translation"), ("wav2vec2", "speech")])
def test_architectures_of_other_tasks_are_refused_by_name(arch: str, kind: str) -> None:
    with pytest.raises(UserError, match=f"--arch {arch}: models of {kind} are not implemented"):
        runs.arguments("--arch", arch)


def test_flags_that_nothing_reads_are_taken_with_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--fast-stat-sync --data-buffer-size 10 --heartbeat-timeout -1 --fp16-no-flatten-grads --num-shards 1"
    args = runs.arguments(runs.BASELINE, flags)
    assert "fast_stat_sync" not in args
    assert capsys.readouterr().err == (
        "note: --fast-stat-sync, --data-buffer-size, --heartbeat-timeout, --fp16-no-flatten-grads: no effect here\n"
    )
    options.parse_args_and_arch(get_eval_lm_parser(), ["d", "--quiet", "--no-seed-provided"])
    assert capsys.readouterr().err == "note: --quiet, --no-seed-provided: no effect here\n"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tpu", "--tpu: there are no TPUs; leave it out"),
        ("--model-parallel-size 2", "--model-parallel-size 2: layers are not split; use 1"),
        ("--store-ema", "--store-ema: use --ema-decay alone, which validates and saves the average"),
        ("--shorten-method truncate", "--shorten-method truncate: lines are not shortened; use none"),
        ("--lr 0", "--lr 0: must be greater than 0, unless --max-lr is given"),
    ],
)
def test_flags_that_would_change_the_result_are_refused(flags: str, message: str, mistake: Any) -> None:
    assert mistake(*flags.split()).startswith(message)


def test_a_plugins_flag_wins_over_an_unread_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "scored").mkdir()
    (tmp_path / "scored" / "__init__.py").write_text(
        "from fairseq.tasks import register_task\nfrom fairseq.tasks.language_modeling import LanguageModelingTask\n"
        '@register_task("scored_lm")\nclass Scored(LanguageModelingTask):\n    @staticmethod\n'
        '    def add_args(parser):\n        parser.add_argument("--scoring", default="none")\n'
    )
    flags = ["--user-dir", tmp_path / "scored", "--task scored_lm --scoring bleu --tokens-per-sample 16"]
    assert runs.arguments(*flags).scoring == "bleu"
