"""Chosen tokens: how many, which, and what stands in their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import DATA

from fairseq.data.dictionary import Dictionary
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.masking import MaskedBlocks, Masking, special_symbols, uniform, word_parts
from fairseq.data.token_blocks import TokenBlocks

PAD, BOS, EOS = 1, 0, 2


@pytest.fixture(scope="module")
def dictionary() -> Dictionary:
    loaded = Dictionary.load(DATA / "dict.txt")
    loaded.add_mask()
    return loaded


@pytest.fixture(scope="module")
def blocks() -> TokenBlocks:
    return TokenBlocks(IndexedCorpus(str(Path(DATA) / "train")), 63, "complete", pad=PAD, eos=EOS)


@pytest.fixture(scope="module")
def masking(dictionary: Dictionary) -> Masking:
    return Masking(1, 0.15, 0.1, 0.1, dictionary.mask(), special_symbols(dictionary))


def batches(dataset: MaskedBlocks, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(dataset), rows):
        sample = dataset.batch(np.arange(start, min(start + rows, len(dataset))))
        yield {**sample, "src_tokens": sample["net_input"]["src_tokens"]}


def test_the_symbol_mask_is_added_last_and_only_once() -> None:
    dictionary = Dictionary.load(DATA / "dict.txt")
    dictionary.add_mask()
    dictionary.add_mask()
    assert dictionary.mask() == 1200 and dictionary.symbols[1200:] == ["<mask>"]


def test_shares_of_chosen_masked_random_and_unchanged_tokens_are_those_asked_for(
    blocks: TokenBlocks, masking: Masking
) -> None:
    totals = np.zeros(5)
    dataset = MaskedBlocks(blocks, masking, BOS)
    for epoch in range(1, 9):
        for batch in batches(dataset.at_epoch(epoch), 64):
            source, target = batch["src_tokens"], batch["target"]
            chosen = target != PAD
            masked, kept = source[chosen] == masking.mask, source[chosen] == target[chosen]
            words = ~torch.from_numpy(masking.special)[torch.where(chosen, target, source)]
            totals += [int(x.sum()) for x in (words, chosen, masked, kept, ~(masked | kept))]
    assert totals[1] / totals[0] == pytest.approx(0.15, abs=0.002)
    assert totals[2:] / totals[1] == pytest.approx([0.8, 0.1, 0.1], abs=0.01)


def test_special_symbols_are_neither_chosen_nor_drawn_and_other_tokens_stay(
    blocks: TokenBlocks, masking: Masking
) -> None:
    dataset = MaskedBlocks(blocks, replace(masking, prob=0.9, random_prob=0.9), BOS).at_epoch(1)
    special = torch.from_numpy(masking.special)
    for batch, plain in zip(batches(dataset, 50), range(0, len(blocks), 50), strict=True):
        text = blocks.batch(np.arange(plain, min(plain + 50, len(blocks))))["target"]
        source, target = batch["src_tokens"], batch["target"]
        chosen = target != PAD
        assert (source[:, 0] == BOS).all() and not chosen[:, 0].any()
        assert not special[target[chosen]].any()
        assert not special[source[chosen & (source != masking.mask)]].any()
        assert torch.equal(torch.where(chosen, target, source)[:, 1:], text)
        assert batch["ntokens"] == int((source != PAD).sum())
        assert len(batch["noise"]) == int(chosen.sum())


def test_choice_depends_on_seed_epoch_and_block_only(blocks: TokenBlocks, masking: Masking) -> None:
    dataset = MaskedBlocks(blocks, masking, BOS)

    def rows(view: MaskedBlocks, indices: list[int]) -> list[tuple[list[int], list[int]]]:
        sample = view.batch(np.array(indices))
        length = view.sizes[indices]
        both = zip(sample["net_input"]["src_tokens"].tolist(), sample["target"].tolist(), length, strict=True)
        return [(source[:size], target[:size]) for source, target, size in both]

    third = dataset.at_epoch(3)
    together = rows(third, [5, 2, 40, 7])
    assert together == [rows(dataset.at_epoch(3), [index])[0] for index in (5, 2, 40, 7)]
    keep = np.arange(len(blocks)) % 2 == 0
    assert rows(third.select(keep), [1, 20]) == [together[1], together[2]]
    for other in (dataset.at_epoch(4), MaskedBlocks(blocks, replace(masking, seed=2), BOS).at_epoch(3)):
        assert rows(other, [5, 2, 40, 7]) != together


def test_validation_chooses_the_same_tokens_in_every_epoch(blocks: TokenBlocks, masking: Masking) -> None:
    dataset = MaskedBlocks(blocks, masking, BOS, fixed=True)
    first, fifth = (dataset.at_epoch(epoch).batch(np.arange(9)) for epoch in (1, 5))
    assert torch.equal(first["net_input"]["src_tokens"], fifth["net_input"]["src_tokens"])


class _Text:
    """A corpus of one line."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = np.array(tokens, dtype=np.int32)
        self.sizes = np.array([len(tokens)], dtype=np.int32)
        self.offsets = np.array([0, len(tokens)])


@pytest.mark.parametrize("marks", ["@@", "##"])
def test_whole_words_are_chosen_together(marks: str) -> None:
    dictionary = Dictionary()
    pieces = ["st@@", "r@@", "ange", "the"] if marks == "@@" else ["st", "##r", "##ange", "the"]
    for piece in pieces:
        dictionary.add_symbol(piece)
    dictionary.add_mask()
    word, the = [dictionary.index(piece) for piece in pieces[:3]], dictionary.index("the")
    text = _Text([*word, the, *word, *word, the, the, EOS])
    continues, joins = word_parts(dictionary)
    masking = Masking(3, 0.5, 0.0, 0.0, dictionary.mask(), special_symbols(dictionary), continues, joins)
    dataset = MaskedBlocks(TokenBlocks(text, 32, "none", pad=PAD, eos=EOS), masking, BOS)
    words = [[1, 2, 3], [4], [5, 6, 7], [8, 9, 10], [11], [12]]
    counts = set()
    for epoch in range(30):
        chosen = (dataset.at_epoch(epoch).batch(np.array([0]))["target"][0] != PAD).tolist()
        assert all(len({chosen[place] for place in places}) == 1 for places in words)
        counts.add(sum(chosen[places[0]] for places in words))
    assert counts == {3}


def test_random_numbers_are_uniform_and_independent_of_one_another() -> None:
    places = np.arange(-1, 200_000)
    drawn = [uniform(places, 1, epoch, kind) for epoch in (1, 2) for kind in (0, 1)]
    assert all(numbers.min() >= 0 and numbers.max() < 1 for numbers in drawn)
    for numbers in drawn:
        share = np.histogram(numbers, bins=20, range=(0, 1))[0] / len(places)
        assert share == pytest.approx(np.full(20, 0.05), abs=0.003)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.01


def test_long_lines_are_cut_and_no_token_is_lost(blocks: TokenBlocks) -> None:
    longer = TokenBlocks(blocks.corpus, 9, "complete", pad=PAD, eos=EOS)
    assert longer.sizes.max() > 9
    cut = longer.cut_long(9)
    assert cut.sizes.max() == 9 and cut.sizes.min() >= 1
    places = [place for start, size in zip(cut.starts, cut.sizes, strict=True) for place in range(start, start + size)]
    assert places == list(range(len(blocks.corpus.tokens)))
