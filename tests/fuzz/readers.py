"""What is fuzzed: each reader of files, its seeds, and what it makes of them."""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.training.callbacks import callbacks_of

from fairseq import checkpoint
from fairseq.config import options
from fairseq.config.settings import TrainingSettings, training_settings
from fairseq.config.settings_file import read_yaml
from fairseq.data import sentence_folders
from fairseq.data.folders import load_dictionary, open_corpus
from fairseq.data.glue import GLUE, Example, Layout, read_examples
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.notes.spans import NoteSpans
from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import format_of, lines_of, read_blocks
from fairseq.text.tokenizers import Tokenizer
from fairseq.training.build import build_state
from fairseq.training.loop import train_stage
from fairseq.training.resume import restore, restoring
from fairseq_cli.common import get_training_parser
from fuzz import mutations

SEEDS = Path(__file__).parent / "seeds"
DATA = SEEDS / "data"
Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Reader:
    """One reader of files.

    Attributes:
        seeds: a folder of files, or of folders, each a valid input.
        read: reads an input, and returns what it found in comparable form.
        names: the files of a folder that are damaged; empty where inputs are files.
        exact: whether a damaged input must be rejected, or give what the seed gives.
        damage: the damage.
    """

    seeds: Path
    read: Callable[[Path], Any]
    names: tuple[str, ...] = ()
    exact: bool = False
    damage: Damage = mutations.damaged


def read_dictionary(path: Path) -> Any:
    """Read a dictionary twice: what is read must be what is written."""
    dictionary = Dictionary.load(path)
    with tempfile.TemporaryDirectory() as folder:
        dictionary.save(f"{folder}/dict.txt")
        again = Dictionary.load(f"{folder}/dict.txt")
    assert again == dictionary, "a dictionary that is saved is another one"
    assert max(dictionary.eos(), dictionary.unk(), dictionary.pad()) < len(dictionary)
    return dictionary.symbols, dictionary.count


def read_corpus(folder: Path) -> Any:
    """Read a whole data folder."""
    corpus = open_corpus(folder, "train", load_dictionary(folder))
    return np.asarray(corpus.tokens).tolist(), np.asarray(corpus.sizes).tolist()


def read_unchecked_corpus(folder: Path) -> Any:
    """Read a folder made by fairseq, which has no checksums; indices must lie within the
    dictionary."""
    with tempfile.TemporaryDirectory() as place:
        plain = Path(shutil.copytree(folder, f"{place}/plain"))
        (plain / "checksums.txt").unlink()
        tokens, sizes = read_corpus(plain)
        words = len(load_dictionary(plain))
    assert sum(sizes) == len(tokens) and max(tokens) < words and min(sizes) >= 0
    return tokens, sizes


def read_notes(folder: Path) -> Any:
    """Read the rare words of a folder."""
    spans = NoteSpans(folder / "train", load_dictionary(folder))
    return spans.notes.words, spans.spans(
        np.arange(0, len(spans) - 8, 8), np.full((len(spans) - 8 + 7) // 8, 8)
    ).tolist()


def read_glue(path: Path) -> Any:
    """Read a table as each task's file; accepted rows have sentences and a label of the task."""
    found: list[list[Example]] = []
    rejected: list[UserError] = []
    for layout in GLUE.values():
        try:
            examples = read_examples(path, layout)
        except UserError as error:
            rejected.append(error)
            continue
        for example in examples:
            assert len(example.sentences) == len(layout.sentences) and all(map(str.strip, example.sentences))
            label = example.label
            assert math.isfinite(label) if layout.is_regression else 0 <= label < len(layout.labels)
        found.append(examples)
    if not found:
        raise rejected[0]
    return found


def read_sentences(folder: Path) -> Any:
    """Read folders of pairs with classes and with scores, as fairseq leaves them, without
    checksums."""
    dictionary = load_dictionary(folder / "input0")
    sentences = sentence_folders.read_sentences(folder, "train", dictionary)
    assert all(len(pair) == 2 and all((ids >= 0).all() for ids in pair) for pair in sentences)
    classes = tuple(sentence_folders.classes_of(folder))
    labels = sentence_folders.read_labels(folder, "train", Layout(PAIR, labels=classes), len(sentences))
    assert all(label is not None and 0 <= label < len(classes) for label in labels)
    scores = sentence_folders.read_labels(folder, "train", Layout(PAIR, labels=()), len(sentences))
    assert all(score is not None and math.isfinite(score) for score in scores)
    return labels, scores


def read_tokenizer(folder: Path) -> Any:
    """Read a tokenizer and use it."""
    tokenizer = Tokenizer.load(folder / "tokenization.json", Dictionary.load(folder / "dict.txt").symbols)
    return list(tokenizer.encode("The cat  sat on\ta mat, żółw."))


def read_table(path: Path) -> Any:
    """Read the texts of a table."""
    form = format_of(str(path), "text", False)
    return [line for block in read_blocks(str(path), form) for line in lines_of(block, form)]


def read_checkpoint(path: Path) -> Any:
    """Read a checkpoint and build its model."""
    models, _, _ = load_models([path], DATA / "plain")
    return {name: value.tolist() for name, value in models[0].state_dict().items()}


FLAGS = """--cpu --arch shortformer_tiny --decoder-layers 1 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8
    --decoder-attention-heads 2 --decoder-input-dim 8 --decoder-output-dim 8 --tokens-per-sample 8 --max-tokens 32
    --adaptive-input-cutoff 8 --adaptive-softmax-cutoff 8 --criterion adaptive_loss --required-batch-size-multiple 1
    --optimizer adam --lr 0.01 --average-weights-from 2 --max-update 3 --log-format none --seed 1 --no-save
    --disable-validation"""


def settings_of(*flags: str) -> TrainingSettings:
    """The settings of a training run on the seeds' data."""
    words = [str(DATA / "plain"), *FLAGS.split(), *flags]
    args = options.parse_args_and_arch(get_training_parser(), words)
    return training_settings(args)


def resume(path: Path) -> Any:
    """Resume a run from a checkpoint, and train on."""
    state = checkpoint.load(path)
    settings = settings_of("--max-update", "4")
    run = build_state(settings, World())
    with restoring(str(path)):
        restore(run, state, str(path))
    assert run.batches.epoch < 2**40
    if run.num_updates < 4:
        train_stage(run, callbacks_of(settings, World()))
    return None


def damaged_state(content: bytes, chance: random.Random) -> bytes:
    """A checkpoint with values replaced."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    written = io.BytesIO()
    torch.save(mutations.damaged_values(state, chance), written)
    return written.getvalue()


def as_namespace(content: bytes, chance: random.Random) -> bytes:
    """The same with the settings in a Namespace, as fairseq stores them."""
    state = torch.load(io.BytesIO(damaged_state(content, chance)), weights_only=True)
    if isinstance(state.get("args"), dict) and all(isinstance(key, str) for key in state["args"]):
        state["args"] = argparse.Namespace(**state["args"])
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


PAIR = ("sentence1", "sentence2")
SENTENCES = ("input1/train.bin", "input1/train.idx", "label/dict.txt", "label/train.bin", "label/train.label")
NOTES = ("notes.txt", "train.notes.bin", "train.notes.idx")
READERS = {
    "dictionary": Reader(SEEDS / "dictionary", read_dictionary),
    "corpus": Reader(DATA, read_corpus, ("dict.txt", "train.bin", "train.idx"), exact=True),
    "corpus-without-checksums": Reader(DATA, read_unchecked_corpus, ("dict.txt", "train.bin", "train.idx")),
    "notes": Reader(DATA, read_notes, NOTES, exact=True),
    "checksums": Reader(DATA, read_corpus, ("checksums.txt",), exact=True),
    "glue": Reader(SEEDS / "glue", read_glue),
    "sentences": Reader(SEEDS / "sentences", read_sentences, SENTENCES),
    "yaml": Reader(SEEDS / "yaml", read_yaml),
    "tokenizer": Reader(SEEDS / "tokenizer", read_tokenizer, ("tokenization.json",)),
    "checkpoint": Reader(SEEDS / "checkpoint", read_checkpoint, exact=True),
    "checkpoint-records": Reader(SEEDS / "checkpoint", read_checkpoint, damage=mutations.damaged_archive),
    "checkpoint-values": Reader(SEEDS / "checkpoint", read_checkpoint, damage=as_namespace),
    "resume": Reader(SEEDS / "checkpoint", resume, damage=damaged_state),
}
if importlib.util.find_spec("pyarrow") is not None:
    READERS["table"] = Reader(SEEDS / "table", read_table)


def prepare(reader: Reader, chance: random.Random, work: Path) -> tuple[Path, Path]:
    """Make a damaged input in *work*; return it and the seed that it was made of."""
    seed = chance.choice(sorted(reader.seeds.iterdir()))
    target = work / seed.name
    if reader.names:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(seed, target)
        file = target / chance.choice(reader.names)
        file.write_bytes(reader.damage(file.read_bytes(), chance))
    else:
        target.write_bytes(reader.damage(seed.read_bytes(), chance))
    return target, seed
