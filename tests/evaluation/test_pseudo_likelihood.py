"""Pseudo-log-likelihoods equal a loop that masks one token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import imported
from mistakes import user_error
from runs import model_of
from torch import Tensor

from fairseq.errors import UserError
from fairseq.evaluation import pseudo_likelihood
from fairseq.evaluation.pseudo_likelihood import PseudoScorer
from fairseq.hub import MaskedLanguageModel, load_model
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_encoders" / "bert"
SYMBOLS = ["un@@", "believ@@", "able", "cat", "##s", "sat"]
SIZES = "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --max-positions 9"


class _Task:
    """A task of a dictionary with subwords of two kinds."""

    def __init__(self) -> None:
        self.source_dictionary = Dictionary()
        for symbol in SYMBOLS:
            self.source_dictionary.add_symbol(symbol)
        self.source_dictionary.add_mask()


def a_model(arch: str) -> tuple[Any, Dictionary]:
    """A model with random weights, and its dictionary."""
    task, template = _Task(), model_of(f"--task masked_lm --criterion masked_lm --arch {arch} {SIZES}")
    model = type(template).build_model(template.cfg, task).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model, task.source_dictionary


@torch.no_grad()
def literal(predict: Any, words: Dictionary, ids: list[int], groups: list[int] | None = None) -> Tensor:
    """One row at a time; *groups* is the word of each token, whose tokens to the right are masked,
    too."""
    lprobs = []
    for place, token in enumerate(ids):
        row = [words.bos(), *ids, words.eos()]
        for later in range(place, len(ids)):
            if later == place or (groups is not None and groups[later] == groups[place]):
                row[1 + later] = words.mask()
        lprobs.append(predict(torch.tensor([row]))[0, 1 + place].log_softmax(-1)[token])
    return torch.stack(lprobs)


@pytest.mark.parametrize("arch", ["bert_tiny", "electra_tiny"])
@pytest.mark.parametrize("within_words", [False, True])
def test_tokens_in_batches_have_the_probabilities_of_a_literal_loop(arch: str, within_words: bool) -> None:
    model, words = a_model(arch)
    encoder = model.encoder if arch == "bert_tiny" else model.generator
    lines = [["un@@", "believ@@", "able", "cat", "##s"], ["sat"], [], ["cat", "sat", "un@@", "able", "cat"]]
    groups = [[0, 0, 0, 1, 1], [0], [], [0, 1, 2, 2, 3]]
    ids = [[words.index(symbol) for symbol in line] for line in lines]
    found = PseudoScorer(model, words, within_words, batch_size=3).score(ids)
    assert [len(line) for line in found] == [5, 1, 0, 5]
    for line, group, lprobs in zip(ids, groups, found, strict=True):
        if line:
            want = literal(
                lambda rows: encoder.lm_head(encoder.sentence_encoder(rows)),
                words,
                line,
                group if within_words else None,
            )
            torch.testing.assert_close(lprobs, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("within_words", [False, True])
def test_corpus_has_the_scores_of_its_lines_whole_in_shards_and_in_parts(
    within_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = a_model("bert_tiny")
    scorer = PseudoScorer(model, words, within_words, batch_size=3)
    text = "un@@ believ@@ able cat ##s\n\nsat\n\n\ncat sat un@@ able cat\nsat sat"
    corpus, lines = TextReader(words, None).corpus(text), text.split("\n")
    ids = [[words.index(symbol) for symbol in line.split()] for line in lines]
    want = torch.cat(scorer.score(ids)).numpy()
    for together in (1, 4, 4096):
        monkeypatch.setattr(pseudo_likelihood, "SORTED_TOKENS", together)
        found = scorer.score_corpus(corpus)
        np.testing.assert_allclose(found.lprobs, want, atol=1e-6)
        assert found.tokens.tolist() == [token for line in ids for token in line]
        assert np.diff(found.lines).tolist() == [len(line) for line in ids]
        shards = [scorer.score_corpus(corpus, shard=shard, shards=3) for shard in range(3)]
        np.testing.assert_allclose(np.concatenate([part.lprobs for part in shards]), want, atol=1e-6)
        assert sum(np.diff(part.lines) for part in shards).tolist() == [len(line) for line in ids]


@pytest.mark.parametrize("within_words", [False, True])
def test_end_of_a_line_has_the_scores_of_a_literal_loop(within_words: bool) -> None:
    model, words = a_model("bert_tiny")
    ids = [words.index(symbol) for symbol in ["cat", "un@@", "able", "</s>", "believ@@", "able", "sat"]]
    lines = [(ids, 1), (ids[:3], 0), (ids, 7), (ids * 2, 9)]
    found = PseudoScorer(model, words, within_words, batch_size=2).score_after(lines)
    groups = [0, 1, 1, 2, 3, 3, 4] if within_words else None
    predict = lambda rows: model(rows)[0]  # noqa: E731
    whole, greedy = literal(predict, words, ids, groups), []
    for place in (1, 2, 4, 5, 6):
        row = torch.tensor([[words.bos(), *ids, words.eos()]])
        later = {1: [1, 2], 4: [4, 5]}.get(place, [place]) if within_words else [place]
        row[0, [1 + at for at in later]] = words.mask()
        greedy.append(int(predict(row)[0, 1 + place].argmax()) == ids[place])
    assert found[0] == (pytest.approx(float(whole[[1, 2, 4, 5, 6]].sum()), abs=1e-4), all(greedy))
    alone = literal(predict, words, ids[:3], groups[:3] if groups else None)
    assert found[1][0] == pytest.approx(float(alone.sum()), abs=1e-4)
    assert found[2] == (0.0, True)
    # Seven positions remain: the second copy alone, from its third token on.
    assert found[3][0] == pytest.approx(float(whole[[2, 4, 5, 6]].sum()), abs=1e-4)


def test_text_without_tokens_has_no_probabilities() -> None:
    model, words = a_model("bert_tiny")
    assert PseudoScorer(model, words).score([]) == []
    assert [len(line) for line in PseudoScorer(model, words).score([[], []])] == [0, 0]
    for symbols, lprobs in MaskedLanguageModel(model, words).score(["", "\n"]):
        assert symbols == [] and len(lprobs) == 0


def test_corpus_without_tokens_is_rejected() -> None:
    model, words = a_model("bert_tiny")
    scorer = PseudoScorer(model, words)
    with user_error("no tokens to score"):
        scorer.score_corpus(TextReader(words, None).corpus("\n\n"))
    with user_error("no tokens to score: .*fewer --num-shards"):
        scorer.score_corpus(TextReader(words, None).corpus("cat\nsat"), shard=2, shards=3)


def test_line_longer_than_the_positions_is_read_in_parts() -> None:
    model, words = a_model("bert_tiny")
    line = [words.index(symbol) for symbol in ["cat", "sat", "able"] * 4]
    whole, parts = PseudoScorer(model, words).score([line]), PseudoScorer(model, words).score([line[:7], line[7:]])
    torch.testing.assert_close(whole[0], torch.cat(parts), atol=1e-6, rtol=0)


def test_imported_bert_scores_text_as_a_literal_loop(tmp_path: Path) -> None:
    out = imported(GOLDEN, tmp_path / "out")
    model, task = load_model(out)
    words = task.source_dictionary
    texts = [" ".join(words.symbols[20:26]), f"{words[30]}\n{words[31]} {words[32]}"]
    scored = MaskedLanguageModel.from_pretrained(out).score(texts, batch_size=4)
    lines = [list(range(20, 26)), [30], [31, 32]]
    want = [literal(lambda rows: model(rows)[0], words, line) for line in lines]
    assert [symbols for symbols, _ in scored] == [words.symbols[20:26], words.symbols[30:33]]
    torch.testing.assert_close(scored[0][1], want[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(scored[1][1], torch.cat(want[1:]), atol=1e-5, rtol=0)


def test_imported_bert_has_the_pseudo_likelihood_that_transformers_gives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForMaskedLM.from_pretrained(GOLDEN).eval()
    model, task = load_model(imported(GOLDEN, tmp_path / "out"))
    line = [20, 21, 22, 23]
    [lprobs] = PseudoScorer(model, task.source_dictionary).score([line])
    want = literal(lambda rows: theirs(rows).logits, task.source_dictionary, line)
    torch.testing.assert_close(lprobs, want, atol=1e-4, rtol=0)


def test_discriminator_without_generator_is_rejected() -> None:
    model, words = a_model("electra_tiny")
    model.generator = None
    with pytest.raises(UserError, match="cannot be computed"):
        PseudoScorer(model, words)
