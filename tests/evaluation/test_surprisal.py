"""Surprisal of words: naive sums over their tokens, in Python and from the command."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import runs
from evaluations import evaluate
from subword_encodings import encodings

from fairseq import checkpoint
from fairseq.evaluation.scorer import Scores
from fairseq.evaluation.surprisal import surprisals
from fairseq.hub import LanguageModel
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.moses import Moses

BASELINE = runs.GOLDEN / "baseline.pt"
TEXTS = ["the  low,  the new riverbed isn't\nwide \n", "", "river", " the lowest \r\n\r\n the"]


def tokens_by_hand(text: str, encode: Any) -> list[tuple[str, int, int, int]]:
    """Words with their characters and their number of tokens, for an encoding whose words do not
    depend on one another: each word is encoded alone with the white space before it."""
    rows, start = [], 0
    for line in text.splitlines(keepends=True) or [""]:
        content, at = line.rstrip("\r\n"), 0
        for word in content.split():
            begin = content.index(word, at)
            rows.append((word, start + begin, start + begin + len(word), len(encode(content[at : begin + len(word)]))))
            at = begin + len(word)
        rows.append(("</s>", start + len(content), start + len(content), 1 + len(encode(content[at:]))))
        start += len(line)
    return rows


@pytest.mark.parametrize("kind", ["none", "byte", "gpt2", "subword_nmt", "moses"])
def test_tokens_belong_to_the_word_that_they_begin_in_or_stand_before(kind: str) -> None:
    subwords = encodings().get(kind)
    tokenizer = None if kind == "none" else Tokenizer(Moses() if kind == "moses" else None, subwords)
    split = (lambda text: text.split()) if tokenizer is None else (lambda text: tokenizer.encode(text).split())
    dictionary = Dictionary()
    for text in TEXTS:
        for line in text.splitlines():
            for symbol in split(line):
                dictionary.add_symbol(symbol)
    reader = TextReader(dictionary, tokenizer)
    corpus = reader.documents(TEXTS)
    lprobs = -(2.0 ** -np.arange(len(corpus.tokens), dtype=np.float32))  # every sum tells which tokens are in it
    found = list(surprisals(reader, TEXTS, Scores(corpus.tokens, lprobs, corpus.offsets)))
    first = 0
    for text, rows in zip(TEXTS, found, strict=True):
        assert [(row.word, row.start, row.end, row.tokens) for row in rows] == tokens_by_hand(text, split)
        for row in rows:
            assert row.word == "</s>" or text[row.start : row.end] == row.word
            of_word = lprobs[first : first + row.tokens].astype(np.float64)
            assert row.surprisal == pytest.approx(-of_word.sum() / math.log(2), rel=1e-9)
            first += row.tokens
    assert first == len(lprobs)


@pytest.mark.parametrize("flags", ["", "--context-window 12"])
def test_the_table_of_the_command_is_that_of_naive_probabilities(flags: str, tmp_path: Path) -> None:
    words = (runs.GOLDEN / "text" / "test.txt").read_text(encoding="utf-8").split()
    lines = [" ".join(words[:9]), f'"{words[9]} NA "', "", " ".join(words[10:24])]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = tmp_path / "out.tsv"
    files = f"--text {tmp_path}/text.txt --surprisal {out} --path {BASELINE}"
    figures = evaluate("--cpu --tokens-per-sample 16", flags, files)
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, dialect="excel-tab"))

    state = checkpoint.load(BASELINE)
    dictionary = Dictionary.load(runs.DATA / "dict.txt")
    ids = [np.append([dictionary.index(word) for word in line.split()], dictionary.eos()).astype(int) for line in lines]
    model = naive.NaiveLM(state["args"], state["model"])
    score = [model.score(one, 16) for one in ids] if not flags else [model.score(np.concatenate(ids), 16, 12)]
    expected = -np.concatenate(score) / math.log(2)
    assert [row["word"] for row in rows] == [word for line in lines for word in [*line.split(), "</s>"]]
    assert [int(row["document"]) for row in rows] == [n for n, line in enumerate(ids, 1) for _ in line]
    np.testing.assert_allclose([float(row["surprisal"]) for row in rows], expected, atol=1e-4)
    for row in rows:
        assert (
            row["word"] == "</s>" or lines[int(row["document"]) - 1][int(row["start"]) : int(row["end"])] == row["word"]
        )
    assert figures["loss_base2"] * figures["tokens"] == pytest.approx(expected.sum(), rel=1e-5)
    if not flags:
        overrides = {"tokens_per_sample": 16}
        of_python = LanguageModel.from_pretrained(BASELINE, runs.DATA, overrides=overrides).surprisal(lines)
        np.testing.assert_allclose([row.surprisal for text in of_python for row in text], expected, atol=1e-4)


def test_rows_of_json_lines_are_documents_of_several_lines(tmp_path: Path) -> None:
    text, out = "= =\n= x\n", tmp_path / "out.tsv"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "="}) + "\n")
    evaluate(f"--cpu --text {tmp_path}/text.jsonl --surprisal {out} --path {BASELINE}")
    rows = [line.split("\t")[:4] for line in out.read_text().splitlines()[1:]]
    assert [(int(n), word, int(start)) for n, word, start, _ in rows] == [
        *((1, "=", 0), (1, "=", 2), (1, "</s>", 3), (1, "=", 4), (1, "x", 6), (1, "</s>", 7)),
        *((2, "=", 0), (2, "</s>", 1)),
    ]


def test_texts_that_are_read_in_blocks_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    overrides = {"tokens_per_sample": 4}
    for name, found in (("baseline", ["1 text of more than 4 tokens"]), ("shortformer_stage2", [])):
        caplog.clear()
        LanguageModel.from_pretrained(runs.GOLDEN / f"{name}.pt", runs.DATA, overrides=overrides).surprisal(
            ["= = =", "= = = ="]
        )
        lines = [record.getMessage() for record in caplog.records if "read in blocks" in record.getMessage()]
        assert [line.partition(":")[0] for line in lines] == found


ODD = [
    "ﬁne ½\u00a0the",
    "a <unk> b<unk>c",
    "𝄞 é e\u0301 the\r\nlow\r\rend",
    "“stop” -- co-op @-@ U.S.A.",
    "low\u200b \ufeffx",
    "語the\x85low",
]


@pytest.mark.parametrize("kind", [None, "subword_nmt", "sentencepiece", "gpt2", "wordpiece", "byte", "metaspace"])
@pytest.mark.parametrize("reads_lines", [False, True])
def test_every_token_belongs_to_one_row_and_every_word_has_its_characters(kind: str | None, reads_lines: bool) -> None:
    dictionary = Dictionary()
    dictionary.nspecial = 0 if reads_lines else dictionary.nspecial  # as of a model from elsewhere
    reader = TextReader(dictionary, None if kind is None else Tokenizer(None, encodings()[kind]))
    corpus = reader.documents(ODD)
    lprobs = -np.random.default_rng(0).random(len(corpus.tokens)).astype(np.float32)
    found = list(surprisals(reader, ODD, Scores(corpus.tokens, lprobs, corpus.offsets)))
    rows = [row for text in found for row in text]
    assert sum(row.tokens for row in rows) == len(lprobs)
    assert sum(row.surprisal for row in rows) == pytest.approx(-lprobs.sum(dtype=np.float64) / math.log(2))
    for text, words in zip(ODD, found, strict=True):
        assert [text[row.start : row.end] for row in words if row.word != "</s>"] == text.split()
