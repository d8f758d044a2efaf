"""Models trained with ``--add-bos-token`` generate and score with ``<s>`` wherever training put
it."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from mistakes import user_error

from fairseq.config import options
from fairseq.data.folders import open_corpus
from fairseq.data.indexed_dataset import IndexedWriter
from fairseq.evaluation import language_models
from fairseq.evaluation.scorer import Scorer, Scoring
from fairseq.hub import LanguageModel
from fairseq.inference import Search
from fairseq.interop.harness.requests import Requests
from fairseq.text.dictionary import Dictionary
from fairseq_cli import analyze, eval_lm, export_model, generate, interactive
from fairseq_cli.analyze import get_attention_parser, get_recl_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser

VOCABULARY, LENGTH = 30, 8
BOS, EOS = 0, 2
FORBIDDEN = [0, 1, 3]  # <s>, <pad>, <unk>


class Reference(naive.NaiveLM):
    """A naive model, and what it makes of a row of tokens."""

    def last(self, row: list[int]) -> torch.Tensor:
        """Log-probabilities of the token after *row*."""
        return self.log_probs(self.hidden(torch.tensor(row))[0][-1:])[0]

    def greedy(self, text: list[int], count: int) -> list[int]:
        """The *count* most probable tokens after *text*, read in windows of LENGTH that begin with
        <s>."""
        window, found = [BOS], list[int]()
        for token in text:
            window = self._with(window, token)
        while len(found) < count:
            lprobs = self.last(window)
            lprobs[FORBIDDEN] = -math.inf
            found.append(int(lprobs.argmax()))
            window = self._with(window, found[-1])
        return found

    @staticmethod
    def _with(window: list[int], token: int) -> list[int]:
        if len(window) == LENGTH:  # the second half is read again
            window = [BOS, *window[LENGTH - (LENGTH - 1) // 2 :]]
        return [*window, token]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A folder with a random checkpoint, its dictionary and a split, and the naive model."""
    folder = tmp_path_factory.mktemp("begin")
    dictionary = Dictionary()
    for word in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(folder / "dict.txt")
    with IndexedWriter(folder / "test", np.dtype(np.uint16)) as writer:
        writer.add(np.array([7, 8, 9, 10, 2, 11, 12, 13, 2, 14, 15, 16, 17, 18, 2]), np.array([5, 4, 6]))
    settings = {"tokens_per_sample": LENGTH, "add_bos_token": True}
    return folder, Reference(*naive.checkpoint(folder / "checkpoint.pt", VOCABULARY, seed=3, **settings))


@pytest.fixture
def model(trained: tuple[Path, Reference]) -> LanguageModel:
    return LanguageModel.from_pretrained(trained[0])


def words(*ids: int) -> str:
    return " ".join(f"w{index - 4}" for index in ids)


def run(command: Any, parser: Any, folder: Path, *flags: str) -> Any:
    argv = [str(folder), "--path", str(folder / "checkpoint.pt"), "--cpu", *flags]
    return command(options.parse_args_and_arch(parser(), argv))


@pytest.mark.parametrize("prompt", [[], [5, 6], [5, 6, 7, 8, 9, 10, 11, 12, 13]])
def test_python_generates_in_windows_that_begin_with_the_symbol(
    trained: tuple[Path, Reference], model: LanguageModel, prompt: list[int]
) -> None:
    expected = trained[1].greedy([EOS, *prompt], 12)
    assert model.sample(words(*prompt), 12, top_k=1) == model.text([*prompt, *expected])


def test_generated_passages_and_prompts_begin_with_the_symbol(
    trained: tuple[Path, Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, reference = trained
    flags = ["--context-tokens", "4", "--max-new-tokens", "3", "--num-samples", "2", "--beam", "1", "--results-path"]
    for passage in run(generate.main, get_generation_parser, folder, *flags, str(tmp_path)):
        assert passage.continuation.tokens == reference.greedy(passage.context.tokens, 3)
    capsys.readouterr()
    (tmp_path / "in").write_text(words(5, 6) + "\n\n")
    flags = ["--input", str(tmp_path / "in"), "--max-new-tokens", "4", "--beam", "1", "--json"]
    run(interactive.main, get_interactive_generation_parser, folder, *flags)
    found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert found == [reference.greedy([EOS, 5, 6], 4), reference.greedy([EOS], 4)]


def test_fairseqs_lines_are_scored_after_the_symbol_alone(
    trained: tuple[Path, Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, reference = trained
    (tmp_path / "in").write_text(words(5, 6) + "\n")
    flags = ["--input", str(tmp_path / "in"), "--beam", "2", "--nbest", "1", "--max-len-b", "4"]
    run(interactive.main, get_interactive_generation_parser, folder, *flags)
    lines = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines() if re.match(r"[HP]-", line))
    text = [4 + int(word[1:]) for word in lines["H-0"].split("\t")[1].split()]
    ids = [*text, EOS]
    expected = [float(reference.last([BOS, *ids[:i]])[token]) / math.log(2) for i, token in enumerate(ids)]
    assert [float(value) for value in lines["P-0"].split()] == pytest.approx(expected, abs=1e-3)


def test_both_kinds_of_likelihood_of_the_harness_agree(trained: tuple[Path, Reference], model: LanguageModel) -> None:
    ids = [5, 6, 7, 8, 9]
    row = [BOS, EOS, *ids]
    want = sum(float(trained[1].last(row[: i + 2])[token]) for i, token in enumerate(ids))
    requests = Requests(model)
    [(likelihood, _)] = requests.log_likelihoods([("", words(*ids))])
    assert likelihood == pytest.approx(want, abs=1e-4)
    assert requests.rolling([words(*ids)]) == pytest.approx([want], abs=1e-4)


def test_windows_of_a_long_likelihood_begin_with_the_symbol(
    trained: tuple[Path, Reference], model: LanguageModel
) -> None:
    ids = [EOS, *range(5, 5 + 13)]
    want = 0.0
    for place in range(1, len(ids)):  # windows of LENGTH are counted from the end
        start = max(0, len(ids) - 1 - LENGTH * ((len(ids) - 1 - place) // LENGTH + 1))
        want += float(trained[1].last([BOS, *ids[start:place]])[ids[place]])
    [(likelihood, _)] = Requests(model).log_likelihoods([("", words(*ids[1:]))])
    assert likelihood == pytest.approx(want, abs=1e-4)


def test_a_context_window_stands_before_the_symbol(trained: tuple[Path, Reference], model: LanguageModel) -> None:
    corpus = open_corpus(trained[0], "test", model.dictionary)
    text = [EOS, *map(int, corpus.tokens)]
    scoring = Scoring(LENGTH, context_window=3, add_bos_token=True, batch_size=2)
    want = []
    for block in range(1, len(text), LENGTH - 3):
        # A row has at most LENGTH tokens: <s> takes the place of one of the context.
        first = max(0, block - 1 - (LENGTH - 1 - min(LENGTH - 3, len(text) - block)))
        for end in range(block, min(block + LENGTH - 3, len(text))):
            row = [*text[max(first, block - 1 - 3) : block - 1], BOS, *text[block - 1 : end]]
            want.append(float(trained[1].last(row)[text[end]]))
    found = Scorer([model.model], model.dictionary, scoring).score(corpus).lprobs
    assert found.tolist() == pytest.approx(want, abs=1e-4)
    with user_error("--context-window 5: with --add-bos-token needs"):
        Scorer([model.model], model.dictionary, replace(scoring, context_window=5))


def test_the_sample_of_an_evaluation_begins_with_the_symbol(
    trained: tuple[Path, Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_models, "Search", functools.partial(Search, temperature=0))
    run(eval_lm.main, get_eval_lm_parser, trained[0], "--sample", str(tmp_path / "sample"))
    text = LanguageModel.from_pretrained(trained[0]).text(trained[1].greedy([EOS], 100))
    assert (tmp_path / "sample").read_text() == text + "\n"


def test_what_reads_rows_without_the_symbol_refuses_the_model(trained: tuple[Path, Reference], tmp_path: Path) -> None:
    folder = trained[0]
    with user_error(r"checkpoint\.pt: was trained with --add-bos-token"):
        run(analyze.attention, get_attention_parser, folder, "--results-path", str(tmp_path / "a"))
    with user_error(r"checkpoint\.pt: was trained with --add-bos-token"):
        flags = ["--results-path", str(tmp_path / "r"), "--step", "2", "--max-context", "6"]
        run(analyze.recl, get_recl_parser, folder, *flags)
    with user_error(r"checkpoint\.pt: was trained with --add-bos-token"):
        flags = [str(folder / "checkpoint.pt"), "--to", "hf", "--out", str(tmp_path / "e")]
        export_model.main(get_export_parser().parse_args(flags))


def test_fairseqs_hub_scores_words_after_the_symbol_and_no_end(trained: tuple[Path, Reference], tmp_path: Path) -> None:
    from fairseq.models.transformer_lm import TransformerLanguageModel

    folder, reference = trained
    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    state["args"].add_bos_token = False
    torch.save(state, tmp_path / "plain.pt")
    shutil.copy(folder / "checkpoint.pt", tmp_path)
    ids = [5, 6, 7, 8]
    for file, start in (("checkpoint.pt", BOS), ("plain.pt", EOS)):
        hub = TransformerLanguageModel.from_pretrained(str(tmp_path), file, str(folder))
        want = [float(reference.last([start, *ids[:i]])[token]) for i, token in enumerate(ids)]
        found = hub.score(words(*ids))
        assert found["tokens"].tolist() == ids
        assert found["positional_scores"].tolist() == pytest.approx(want, abs=1e-4)
        assert float(found["score"]) == pytest.approx(sum(want) / len(want), abs=1e-4)
        assert hub.score([words(5)])[0]["tokens"].tolist() == [5]
        with pytest.raises(ValueError, match="no symbol"):
            hub.score(" ")
