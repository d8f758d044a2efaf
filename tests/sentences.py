"""Sentence tasks for the tests: TSV files, a dictionary, and an encoder pre-trained on nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fairseq import checkpoint
from fairseq.config import options
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq_cli import preprocess
from fairseq_cli.common import get_training_parser

WORDS = [f"w{number}" for number in range(20)]
GOOD, BAD = WORDS[:5], WORDS[5:10]

SIZES = """--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2
    --max-positions 24"""
SMALL = f"""--cpu --task sentence_prediction --criterion sentence_prediction --arch bert_tiny {SIZES}
    --batch-size 8 --required-batch-size-multiple 1 --optimizer adam --lr-scheduler fixed --lr 0.01 --seed 3
    --log-format json --log-interval 1 --no-epoch-checkpoints"""
NO_DROPOUT = "--dropout 0 --attention-dropout 0"


def write_dictionary(folder: Path) -> Path:
    """A data folder that holds the dictionary of :data:`WORDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for word in WORDS:
        dictionary.add_symbol(word)
    dictionary.save(folder / "dict.txt")
    return folder


def write_tsv(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in ([header] if header else []) + rows))
    return path


def separable(seed: int, count: int) -> list[list[Any]]:
    """Sentences with a word that decides their class, 0 or 1, among words that do not."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        words = draw.choices(WORDS[10:], k=draw.randint(1, 9)) + [draw.choice(GOOD if label else BAD)]
        draw.shuffle(words)
        rows.append([" ".join(words), label])
    return rows


def write_task(folder: Path, train: int = 60, dev: int = 40) -> Path:
    """The folder of a separable task in SST-2's layout, with a test file without labels."""
    write_tsv(folder / "train.tsv", ["sentence", "label"], separable(1, train))
    write_tsv(folder / "dev.tsv", ["sentence", "label"], separable(2, dev))
    write_tsv(folder / "test.tsv", ["index", "sentence"], [[i, row[0]] for i, row in enumerate(separable(4, 7))])
    return folder


def write_folders(data: Path, split: str, columns: dict[str, list[Any]], dictionary: Path) -> Path:
    """The folders ``input0``, ``input1`` and ``label`` of *data* for a split, made as fairseq's
    documentation does."""
    for name, lines in columns.items():
        text = data.with_name(f"{split}.{name}")
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("".join(f"{line}\n" for line in lines))
        flags = ["--only-source", f"--{split}pref", str(text), "--destdir", str(data / name)]
        if name != "label":
            flags += ["--srcdict", str(dictionary / "dict.txt")]
        elif split != "train":
            flags += ["--srcdict", str(data / "label" / "dict.txt")]
        preprocess.main(options.parse_args_and_arch(preprocess.get_preprocessing_parser(), flags))
    return data


def write_pretrained(path: Path, data: Path, *flags: str, tnf: bool = False) -> Path:
    """A checkpoint with the initial weights of a pre-training model."""
    import torch

    words = [word for flag in (SIZES, *flags) for word in flag.split()]
    args = options.parse_args_and_arch(
        get_training_parser(), [str(data), "--task", "masked_lm", "--arch", "bert_tiny", *words]
    )
    torch.manual_seed(7)
    model = setup_task(args).build_model(args)
    parameters = dict(model.state_dict())
    stored = {name: value for name, value in vars(args).items() if value is not None}
    if tnf:
        parameters["notes.table"] = torch.zeros(3, 16)
        stored.update(arch=f"tnf_{args.arch}", task="tnf_masked_lm", note_lambda=0.5)
    checkpoint.save(path, {"args": stored, "model": parameters, "optimizer_history": [], "extra_state": {}})
    return path
