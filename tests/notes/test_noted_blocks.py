"""The spans that a model is given are the whole rare words of its rows, without those it is to
predict anything of."""

from __future__ import annotations

import noted
import numpy as np
import pytest
import runs
import torch

from fairseq.tasks import setup_task


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


@pytest.fixture(scope="module", params=["complete", "none", "eos"])
def task(request, data):
    return setup_task(runs.arguments(noted.TNF_BERT, "--sample-break-mode", request.param, data=data))


def naive_words(task, symbols, continued):
    """(first, end, number in notes.txt) of the rare words of a row that are whole."""
    numbers = {word: number for number, word in enumerate(task.extensions["notes"].words.words)}
    first, found = 0, []
    for end, symbol in enumerate(symbols, 1):
        if not symbol.endswith("@@"):
            word = "".join(symbols[first:end]).replace("@@", "")
            found.append((first, end, numbers.get(word)))
            first = end
    return [w for w in found if w[2] is not None and not (continued and w[0] == 0)]


def test_spans_are_the_whole_rare_words_without_a_chosen_token(task):
    blocks = noted.examples(task, training=True).at_epoch(2)
    sample = blocks.batch(np.arange(len(blocks)))
    source, target = sample["net_input"]["src_tokens"], sample["target"]
    pad = task.dictionary.pad()
    original = torch.where(target != pad, target, source)
    plain, offset = blocks.blocks.blocks, 1
    expected, words = [], []
    for row, tokens in enumerate(original.tolist()):
        start = int(plain.starts[row])
        before = plain.corpus.tokens[start - 1] if start else task.dictionary.eos()
        symbols = [task.dictionary[t] for t in tokens[offset : offset + int(plain.sizes[row])]]
        continued = task.dictionary[int(before)].endswith("@@")
        for first, end, number in naive_words(task, symbols, continued):
            words.append([row, first + offset, end + offset, number])
            if not (target[row, first + offset : end + offset] != pad).any():
                expected.append(words[-1])
    assert sample["rare_words"].tolist() == words
    assert sample["net_input"]["spans"].tolist() == expected
    assert 0 < len(expected) < len(words)
    assert sample["net_input"]["longest_span"] == max(end - first for _, first, end, _ in expected)


def test_batches_and_chosen_tokens_are_those_without_notes(task, data):
    plain = setup_task(
        runs.arguments(noted.BERT, "--sample-break-mode", task.cfg.sample_break_mode, data=data)
    ).dataset("train", training=True)
    blocks = noted.examples(task, training=True)
    assert len(plain) == len(blocks) and (plain.sizes == blocks.sizes).all()
    one, other = (d.at_epoch(3).batch(np.array([0, 2])) for d in (plain, blocks))
    assert torch.equal(one["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
    assert torch.equal(one["target"], other["target"])


def test_selected_rows_keep_their_words(task):
    blocks = noted.examples(task, "valid")
    keep = np.arange(len(blocks)) % 2 == 1
    chosen, every = blocks.select(keep).batch(np.array([0])), blocks.batch(np.array([1]))
    assert torch.equal(chosen["net_input"]["spans"], every["net_input"]["spans"])
