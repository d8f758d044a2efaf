"""Hypotheses are printed in fairseq's lines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error

from fairseq.config import options
from fairseq.config.command_settings import GenerationConfig
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter
from fairseq.hub import LanguageModel
from fairseq.inference.reader import Reader
from fairseq.inference.search import Search
from fairseq.inference.text import detokenizer_of
from fairseq.inference.writer import Writer
from fairseq.text.dictionary import Dictionary
from fairseq_cli import generate, interactive
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser

CHECKPOINT = runs.GOLDEN / "baseline.pt"
COMMAND = f"--path {CHECKPOINT} --cpu --gen-subset valid --prefix-size 3 --beam 2 --nbest 2 --max-len-b 60"


@pytest.fixture(scope="module")
def few_lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose split ``valid`` has three lines."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(runs.DATA / "dict.txt", folder)
    corpus = IndexedCorpus(str(runs.DATA / "valid"))
    with IndexedWriter(str(folder / "valid"), corpus.tokens.dtype) as writer:
        writer.add(corpus.tokens[: corpus.offsets[3]], corpus.sizes[:3])
    return folder


def lines(main: Callable[[Any], Any], parser: Any, flags: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    main(options.parse_args_and_arch(parser, runs.words(flags)))
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def test_generate_prints_fairseqs_lines(few_lines: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = f"{few_lines} {COMMAND} --lenpen 0.5 --no-repeat-ngram-size 3 --quiet --results-path {tmp_path}"
    found = lines(generate.main, get_generation_parser(), flags, capsys)
    assert [line[0] for line in found[:8]] == ["S-0", "T-0", "H-0", "D-0", "P-0", "H-0", "D-0", "P-0"]
    dictionary = Dictionary.load(runs.DATA / "dict.txt")
    corpus = IndexedCorpus(str(runs.DATA / "valid"))
    assert found[8][1] == dictionary.string(corpus.tokens[corpus.offsets[1] : corpus.offsets[2]])
    for source, hypothesis, scores in ((found[0], found[2], found[4]), (found[0], found[5], found[7])):
        prefix = source[1].split()[:3]
        words, numbers = hypothesis[2].split(), [float(number) for number in scores[1].split()]
        assert words[: len(prefix)] == prefix and len(numbers) == len(words) + 1  # with </s>
        assert float(hypothesis[1]) == pytest.approx(sum(numbers) / len(numbers) ** 0.5, abs=1e-3)
    assert float(found[2][1]) >= float(found[5][1])
    assert (tmp_path / "generate-valid.txt").read_text().splitlines() == ["\t".join(line) for line in found]


def test_lines_that_cannot_be_written_are_an_error_in_one_line(
    few_lines: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "generate-valid.txt"
    path.mkdir()
    with user_error(f"--results-path {path}: cannot be written"):
        flags = f"{few_lines} {COMMAND} --results-path {tmp_path}"
        lines(generate.main, get_generation_parser(), flags, capsys)


def test_interactive_prints_fairseqs_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("the\nof the\n")
    flags = f"{runs.DATA} --path {CHECKPOINT} --cpu --input {tmp_path}/prompts --results-format fairseq --beam 2"
    found = lines(interactive.main, get_interactive_generation_parser(), f"{flags} --max-len-b 12", capsys)
    assert [line[0] for line in found] == [f"{kind}-{n}" for n in (0, 1) for kind in "SHDP"]
    alone = lines(
        interactive.main, get_interactive_generation_parser(), f"{flags} --max-len-b 12 --batch-size 1", capsys
    )
    assert [line[-1] for line in alone if line[0][0] in "HD"] == [line[-1] for line in found if line[0][0] in "HD"]
    with user_error("--nbest 3: a beam has 2 hypotheses; raise --beam"):
        lines(interactive.main, get_interactive_generation_parser(), f"{flags} --nbest 3", capsys)


def test_texts_end_with_a_dictionary_without_padding_whose_last_symbol_is_the_end() -> None:
    dictionary = Dictionary.of_listed([*(f"w{word}" for word in range(1199)), "</s>"], {"eos": "</s>"})
    model = LanguageModel.from_pretrained(CHECKPOINT, runs.DATA).model
    task = SimpleNamespace(source_dictionary=dictionary)
    plain = detokenizer_of(task.source_dictionary)
    writer = Writer([Reader(model)], task, Search(), 1, 16, plain, torch.device("cpu"))  # type: ignore[arg-type]
    cfg = GenerationConfig(max_len_b=3)
    [(number, texts)] = writer.hypotheses(cfg, [(0, [5])])
    found = list(writer.lines_of(cfg, number, [5], texts, target=False))
    assert [line[:3] for line in found] == ["S-0", "H-0", "D-0", "P-0"]


@pytest.mark.parametrize(
    "flags, unread",
    [
        ("--results-format fairseq --max-len-b 4 --max-new-tokens 5 --json", ["max_new_tokens", "json"]),
        ("--results-format text --beam 2 --max-new-tokens 5 --nbest 1 --lenpen 2", ["nbest", "lenpen"]),
        ("--beam 2 --nbest 2 --max-len-b 4 --sampling", []),
        ("--beam 2 --max-new-tokens 5 --json", []),
    ],
)
def test_flags_that_the_chosen_lines_do_not_read_are_named(
    flags: str, unread: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("the\n")
    flags = f"{runs.DATA} --path {CHECKPOINT} --cpu --input {tmp_path}/prompts {flags}"
    lines(interactive.main, get_interactive_generation_parser(), flags, capsys)
    found = [record.getMessage() for record in caplog.records if "no effect on" in record.getMessage()]
    assert [re.findall("`([a-z_]+)`", message.split(":")[0]) for message in found] == ([unread] if unread else [])
