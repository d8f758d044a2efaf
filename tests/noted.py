"""A small corpus with rare words, and runs on it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import runs
import torch

from fairseq.config.settings import training_settings
from fairseq.notes.dictionary import NoteDictionary
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

COMMON = [a + b for a in "abcdefgh" for b in "xyz"]
RARE = [f"{a}@@ {b}@@ {c}" for a in "kl" for b in "mn" for c in "opq"]  # of three subwords each

SIZES = """--cpu --tokens-per-sample 24 --max-tokens 96 --required-batch-size-multiple 1 --encoder-layers 1
    --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0.1 --lr 0.01
    --optimizer adam --lr-scheduler fixed --clip-norm 1 --seed 3
    --log-format json --log-interval 1 --max-positions 32"""
BERT = f"--arch bert_tiny --task masked_lm --criterion masked_lm {SIZES}"
TNF_BERT = f"--arch tnf_bert_tiny --task tnf_masked_lm --criterion masked_lm {SIZES}"
ELECTRA = f"--arch electra_tiny --task masked_lm --criterion electra {SIZES}"
TNF_ELECTRA = f"--arch tnf_electra_tiny --task tnf_masked_lm --criterion electra --note-readers both {SIZES}"
CAUSAL = """--arch shortformer_tiny --criterion cross_entropy --tokens-from-prev 12
    --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20
    --decoder-layers 1 --cpu --tokens-per-sample 12 --max-tokens 48 --required-batch-size-multiple 1 --optimizer adam
    --lr 0.01 --lr-scheduler fixed --log-format json"""


def text(lines: int, seed: int) -> str:
    """Lines of words, every seventh of them rare."""
    chance = random.Random(seed)
    words = [
        [chance.choice(RARE if chance.random() < 1 / 7 else COMMON) for _ in range(chance.randint(3, 12))]
        for _ in range(lines)
    ]
    return "".join(" ".join(line) + "\n" for line in words)


def corpus(folder: Path, high: int = 25) -> Path:
    """A data folder with notes for :data:`RARE`."""
    (folder / "train").write_text(text(120, 1))
    (folder / "valid").write_text(text(20, 2))
    flags = ["--only-source", "--notes", "--note-min-count", 3, "--note-max-count", high, "--destdir", folder / "bin"]
    words = runs.words(*map(str, flags), "--trainpref", str(folder / "train"), "--validpref", str(folder / "valid"))
    preprocess.main(get_preprocessing_parser().parse_args(words))
    return folder / "bin"


def examples(task: Any, split: str = "train", training: bool = False) -> Any:
    """The examples of *split* as a model with notes is given them."""
    model: Any = SimpleNamespace(notes=NoteDictionary(1, 1))
    folder = Path(task.settings.data_path)
    blocks = task.dataset(split, training=training)
    return task.extensions["notes"].extend_dataset(blocks, model, split, folder, training=training)


def trainer(data: Path, *flags: Any, **changed: Any) -> TrainingState:
    """A trainer of the model of *flags* on *data*, settings *changed* from Python."""
    args = runs.arguments(*flags, data=data)
    vars(args).update(changed)
    torch.manual_seed(1)
    task = setup_task(args)
    return TrainingState(training_settings(args), task, task.build_model(args), task.build_criterion(args))
