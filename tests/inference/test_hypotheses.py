"""Hypotheses end at ``</s>``, have the scores of fairseq's generator, and are printed in its
lines."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import naive
import pytest
import runs
import torch
from mistakes import user_error

from fairseq.config import options
from fairseq.config.command_settings import GenerationConfig
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter
from fairseq.inference.decoding import Decoding
from fairseq.inference.engine import Reader
from fairseq.inference.generation_lines import lines_of
from fairseq.inference.hypotheses import Hypothesis, Search, hypotheses
from fairseq.inference.loading import load_models
from fairseq.inference.text import detokenizer_of
from fairseq.modules.memory import KeyValueCache
from fairseq.text.dictionary import Dictionary
from fairseq_cli import generate, interactive
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser

VOCABULARY, EOS, PAD = 12, 2, 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random model and a naive one."""
    folder = tmp_path_factory.mktemp("models")
    dictionary = Dictionary()
    for word in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(folder / "dict.txt")
    args, state = naive.checkpoint(folder / "c.pt", VOCABULARY, tokens_per_sample=16)
    return load_models([folder / "c.pt"], folder / "dict.txt")[0][0], naive.NaiveLM(args, state)


def lprobs_of(reference: Any, text: tuple[int, ...]) -> list[float]:
    """The log-probability of each token after ``</s>``, by the naive model."""
    hidden, _ = reference.hidden(torch.tensor([EOS, *text[:-1]]), None)
    found = reference.log_probs(hidden)
    return [float(found[i, token]) for i, token in enumerate(text)]


def find(pair: tuple[Any, Any], prefix: list[int], **settings: Any) -> list[Hypothesis]:
    generator = torch.Generator().manual_seed(3)
    return hypotheses([pair[0]], prefix, Search(**settings), eos=EOS, forbidden=[PAD], generator=generator)


@pytest.mark.parametrize("lenpen", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("prefix", [[], [7, 5]])
def test_a_wide_beam_finds_the_best_of_all_texts(pair: tuple[Any, Any], prefix: list[int], lenpen: float) -> None:
    others = [token for token in range(VOCABULARY) if token not in (EOS, PAD)]
    texts = [(*prefix, *middle, EOS) for length in (0, 1, 2) for middle in itertools.product(others, repeat=length)]
    texts = [text for text in texts if len(text) > 1]  # min_len is 1
    scores = {text: math.fsum(lprobs_of(pair[1], text)) / len(text) ** lenpen for text in texts}
    best = sorted(texts, key=lambda text: -scores[text])[:5]
    found = find(pair, prefix, beam=len(texts), max_len=len(prefix) + 2, lenpen=lenpen)[:5]
    assert [tuple(hypothesis.tokens) for hypothesis in found] == best
    assert [hypothesis.score for hypothesis in found] == pytest.approx([scores[text] for text in best], rel=1e-4)
    assert found[0].lprobs == pytest.approx(lprobs_of(pair[1], best[0]), rel=1e-4)


def test_no_ngram_is_repeated_and_lengths_are_kept(pair: tuple[Any, Any]) -> None:
    for hypothesis in find(pair, [4, 5, 4, 5], beam=3, max_len=14, min_len=12, no_repeat_ngram=2):
        pairs = list(itertools.pairwise(hypothesis.tokens[3:]))
        assert len(pairs) == len(set(pairs))
        assert 12 <= len(hypothesis.tokens) - 1 <= 14 and hypothesis.tokens[-1] == EOS


def test_one_text_is_continued_without_a_copy_of_its_cache(pair: tuple[Any, Any], monkeypatch: Any) -> None:
    monkeypatch.delattr(KeyValueCache, "select_rows")
    assert len(find(pair, [7], beam=1, max_len=8)) == 1


def test_sampled_texts_are_as_many_as_the_beam_and_have_their_own_scores(pair: tuple[Any, Any]) -> None:
    found = find(pair, [6], beam=4, max_len=8, sampling=Decoding(1, 1.0))
    assert len(found) == 4 and len({tuple(hypothesis.tokens) for hypothesis in found}) > 1
    for hypothesis in found:
        assert hypothesis.lprobs == pytest.approx(lprobs_of(pair[1], tuple(hypothesis.tokens)), rel=1e-3, abs=1e-4)


def test_a_prefix_without_room_is_the_text_up_to_its_length(
    pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for prefix in ([4, 5], [4, 5, 6, 7]):
        [hypothesis] = find(pair, prefix, max_len=2)
        assert hypothesis.tokens == [4, 5, EOS]
        assert hypothesis.lprobs == pytest.approx(lprobs_of(pair[1], (4, 5, EOS)), rel=1e-3, abs=1e-4)
    assert caplog.messages[0] == "`max_len_b` 2: a prefix of 2 tokens fills the text"


def test_texts_end_with_a_dictionary_without_padding_whose_last_symbol_is_the_end(pair: tuple[Any, Any]) -> None:
    dictionary = Dictionary.of_listed([*(f"w{word}" for word in range(VOCABULARY - 1)), "</s>"], {"eos": "</s>"})
    task = SimpleNamespace(source_dictionary=dictionary)
    plain = detokenizer_of(task.source_dictionary)
    writer: Any = SimpleNamespace(task=task, models=[Reader(pair[0])], seed=1, detokenizer=plain)
    found = list(lines_of(writer, GenerationConfig(max_len_b=3), 0, [5], target=False))
    assert [line[:3] for line in found] == ["S-0", "H-0", "D-0", "P-0"]


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
    with user_error("--nbest 3: a beam has 2 hypotheses; raise --beam"):
        lines(interactive.main, get_interactive_generation_parser(), f"{flags} --nbest 3", capsys)


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
