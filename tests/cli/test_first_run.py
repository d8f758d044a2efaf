"""What a new user tries first: a model trained without a list of flags, text as it comes, and help
on the way."""

from __future__ import annotations

import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from mistakes import user_error

import fairseq
from fairseq.config import options
from fairseq.config.command_settings import TextFormatConfig
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.distributed import World
from fairseq.errors import nearest
from fairseq.inference.loading import read_text
from fairseq.system.opening import BOM
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_hints import raw_text as signs_of_raw_text
from fairseq.text.text_hints import wrapped_at
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq_cli import eval_lm, preprocess
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.preprocess import get_preprocessing_parser

# tomllib is new in Python 3.11
SCRIPTS = dict(
    re.findall(r'^(fairseq-[\w-]+) = "([\w.:]+)"$', (runs.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
)
PROSE = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 90


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_has_a_version(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, name = SCRIPTS[script].split(":")
    monkeypatch.setattr(sys, "argv", [script, "--version"])
    try:
        getattr(importlib.import_module(module), name)()
    except SystemExit as end:
        assert not end.code
    assert capsys.readouterr().out == f"fairseq-short {fairseq.__version__}\n"


OBJECTIVES = {
    "shortformer_tiny": ("language_modeling", "adaptive_loss"),
    "transformer_lm_wiki103": ("language_modeling", "adaptive_loss"),
    "transformer_lm": ("language_modeling", "cross_entropy"),
    "transformer_lm --adaptive-softmax-cutoff 200,600": ("language_modeling", "adaptive_loss"),
    "transformer_lm_tiny --criterion cross_entropy": ("language_modeling", "cross_entropy"),
    "transformer_xl_tiny": ("language_modeling", "cross_entropy"),
    "lstm_lm_tiny": ("language_modeling", "cross_entropy"),
    "bert_tiny": ("masked_lm", "masked_lm"),
    "roberta_base": ("masked_lm", "masked_lm"),
    "electra_tiny": ("masked_lm", "electra"),
    "tnf_bert_tiny": ("tnf_masked_lm", "masked_lm"),
    "tnf_electra_tiny": ("tnf_masked_lm", "electra"),
    "bert_tiny --task sentence_prediction": ("sentence_prediction", "sentence_prediction"),
    "bert_tiny --task language_modeling": ("language_modeling", "cross_entropy"),
}


@pytest.mark.parametrize("arch", OBJECTIVES)
def test_task_and_criterion_follow_from_the_architecture(arch: str, tmp_path: Path) -> None:
    args = runs.arguments("--arch", arch)
    assert (args.task, args.criterion) == OBJECTIVES[arch]
    name, *flags = arch.split()
    settings = "".join(f"{flag[2:]}: {value}\n" for flag, value in zip(flags[::2], flags[1::2], strict=True))
    (tmp_path / "c.yaml").write_text(f"arch: {name}\n{settings}")
    args = runs.arguments("--config", tmp_path / "c.yaml")
    assert (args.task, args.criterion) == OBJECTIVES[arch]


@pytest.mark.parametrize("arch", ["shortformer_tiny", "bert_tiny"])
def test_data_and_an_architecture_are_enough_to_train(arch: str, tmp_path: Path) -> None:
    flags = "--cpu --train-subset valid --valid-subset test --max-update 1 --disable-validation --tokens-per-sample 16"
    log = runs.train(tmp_path, "--arch", arch, flags, "--no-save --log-format json --log-interval 1")
    assert [line["num_updates"] for line in runs.updates(log)] == [1]


def preprocessed(folder: Path, text: bytes, *flags: Any) -> Path:
    (folder / "text").write_bytes(text)
    words = runs.words("--trainpref", folder / "text", "--destdir", folder / "bin", *flags)
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), words))
    return folder / "bin"


@pytest.mark.parametrize("flags", ["", "--tokenizer space", "--workers 2", "--srcdict {folder}/dict.txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(flags: str, tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text("a 2\nb 1\n")
    data = preprocessed(tmp_path, BOM + b"a b\na\n", flags.format(folder=tmp_path), "--padding-factor 1")
    dictionary = Dictionary.load(data / "dict.txt")
    tokens = IndexedCorpus(str(data / "train")).tokens
    assert [dictionary[token] for token in np.asarray(tokens)] == ["a", "b", "</s>", "a", "</s>"]


def test_a_text_on_stdin_is_the_text_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("= dun =\nthe horse\n")
    found = []
    for name in (tmp_path / "text", "-"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "text").read_bytes())))
        words = runs.words(runs.DATA, "--cpu --path", runs.GOLDEN / "baseline.pt", "--text", name)
        found.append(eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), words)))
    assert found[0]["perplexity"] == found[1]["perplexity"] and found[0]["tokens"] == 7
    with user_error("--text -: 2 processes cannot share stdin"):
        read_text("-", TextFormatConfig(), str(runs.DATA), Dictionary.load(runs.DATA / "dict.txt"), World(size=2))


def wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)


def test_hard_wrapped_text_is_told_from_paragraphs_and_sentences() -> None:
    assert wrapped_at(wrapped(PROSE, 72)) in range(66, 73)
    assert wrapped_at(["", *wrapped(PROSE, 60), "", *wrapped(PROSE, 60)]) in range(54, 61)
    assert wrapped_at([PROSE] * 50) is None, "paragraphs"
    assert wrapped_at(["It was the best of times, it was the worst of times today."] * 50) is None, "sentences"
    assert wrapped_at(["= Title =", "short"] * 50) is None and wrapped_at(wrapped(PROSE, 72)[:20]) is None


def test_raw_text_is_told_from_symbols() -> None:
    assert signs_of_raw_text([PROSE]) == "punctuation is part of words"
    assert signs_of_raw_text([PROSE.replace(",", " ,").replace(".", " .").replace(";", " ;")]) is None
    assert (
        signs_of_raw_text(["道可道非常道名可名非常名無名天地之始有名萬物之母故常無欲以觀其妙"] * 20)
        == "words are not separated"
    )
    wiki = (runs.GOLDEN / "text" / "test.txt").read_text(encoding="utf-8")
    assert signs_of_raw_text(wiki.splitlines()) is None


@pytest.mark.parametrize(
    "flags, hints",
    [("", ["--join-lines", "--bpe hf --learn-bpe 6000"]), ("--join-lines --tokenizer space", [])],
)
def test_hints_name_the_missing_flags(
    flags: str, hints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocessed(tmp_path, "\n".join(wrapped(PROSE, 72)).encode(), flags)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(hints) and all(hint in note for hint, note in zip(hints, notes, strict=True))


def many_characters() -> list[str]:
    """Chinese words of many rare characters, and emoji: merges show a small share of them."""
    rng = np.random.RandomState(0)
    rare = [chr(0x4E00 + number) for number in rng.permutation(3000)]
    emoji = [chr(0x1F600 + number) for number in range(60)]
    words = [a + b for a, b in zip(rare[::2], rare[1::2], strict=True)] + emoji * 9
    return [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)] * 2


def test_codes_that_are_learned_on_a_text_of_many_characters_fit_it(tmp_path: Path) -> None:
    text = "\n".join(many_characters()).encode()
    data = preprocessed(tmp_path, text, "--bpe subword_nmt --learn-bpe 150")
    assert len(IndexedCorpus(str(data / "train")).tokens) > 1000


def test_codes_know_the_scripts_that_they_were_learned_on() -> None:
    lines = many_characters()
    counts = {word: 2 for line in lines for word in line.split()}
    codes = SubwordNMT(SubwordNMT.learn(counts, 150), "codes")
    assert codes.knows("".join(lines)) > 0.8 and codes.knows("a text in English, with 3 digits") == 0


def test_names_that_contain_the_word_are_near() -> None:
    assert nearest("wiki103", ["transformer_lm_wiki103", "bert"]) == "did you mean transformer_lm_wiki103?"
    with user_error("--arch enwik8: no such architecture; did you mean transformer_xl_enwik8_"):
        runs.arguments("--arch enwik8")
    with user_error("--arch shortformer-tiny: no such architecture; did you mean shortformer_tiny"):
        runs.arguments("--arch shortformer-tiny")
