"""The rare words of a causal model's input are those that are whole in what it reads, shuffled
lines or not."""

from __future__ import annotations

import noted
import numpy as np
import pytest
import torch

from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.masking import word_parts
from fairseq.data.token_blocks import TokenBlocks
from fairseq.notes.blocks import NotedStream
from fairseq.notes.spans import NoteSpans
from fairseq.text.dictionary import Dictionary


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


def stream(data, shuffled):
    dictionary = Dictionary.load(data / "dict.txt")
    corpus = IndexedCorpus(str(data / "train"))
    blocks = TokenBlocks(
        corpus, 10, "none", pad=dictionary.pad(), eos=dictionary.eos(), shuffle_lines=5 if shuffled else None
    )
    return NotedStream(blocks, NoteSpans(data / "train"), word_parts(dictionary)[1]).at_epoch(2), dictionary


@pytest.mark.parametrize("shuffled", [False, True])
def test_spans_are_the_rare_words_whole_in_the_source(data, shuffled):
    rows, dictionary = stream(data, shuffled)
    indices = np.arange(len(rows))
    sample = rows.batch(indices)
    source, target = sample["net_input"]["src_tokens"], sample["target"]
    numbers = {word: number for number, word in enumerate(rows.spans.notes.words)}
    text = [dictionary[int(t)] for t in [source[0, 0], *target[target != dictionary.pad()]]]
    found, rare, first = [], np.zeros(len(text), dtype=bool), 0
    for end, symbol in enumerate(text, 1):
        if not symbol.endswith("@@"):
            number = numbers.get("".join(text[first:end]).replace("@@", ""))
            if number is not None:
                rare[first:end] = True
                row, place = divmod(first, 10)
                if place + end - first <= int(rows.sizes[row]):
                    found.append([row, place, place + end - first, number])
            first = end
    assert sample["net_input"]["spans"].tolist() == found
    marks = sample["subsets"]["rare"].numpy()[(target != dictionary.pad()).numpy()]
    assert np.array_equal(marks, rare[1:])


def test_a_word_that_only_the_line_ends_has_no_span(data):
    rows, dictionary = stream(data, False)
    every = rows.batch(np.arange(len(rows)))["net_input"]["spans"]
    rows.joins = np.ones(len(dictionary), dtype=bool)
    assert len(every) and not len(rows.batch(np.arange(len(rows)))["net_input"]["spans"])


def test_selected_blocks_keep_their_words(data):
    rows, _ = stream(data, False)
    keep = np.arange(len(rows)) >= 4
    one, other = rows.select(keep).batch(np.array([0])), rows.batch(np.array([4]))
    assert torch.equal(one["net_input"]["spans"], other["net_input"]["spans"])
