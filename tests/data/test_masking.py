"""Chosen tokens: how many, which, and what stands in their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import subword_encodings
import torch
from mistakes import user_error
from runs import DATA, arguments

from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.masking import MaskedBlocks, Masking, special_symbols, uniform, word_parts, word_rule
from fairseq.data.token_blocks import TokenBlocks
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer, WordRule
from fairseq.text.tokenizers.rules import BeginMarks, ByteLevelWords, ContinuationMarks, EndMarks, SubwordMarks
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

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


def test_random_symbols_are_drawn_by_their_counts(
    blocks: TokenBlocks, masking: Masking, dictionary: Dictionary
) -> None:
    counts = np.where(masking.special, 0.0, dictionary.count)
    counts[9] = 0
    dataset = MaskedBlocks(blocks, replace(masking, leave_prob=0.0, random_prob=1.0, counts=counts), BOS)
    drawn = np.zeros(len(dictionary))
    for epoch in range(1, 9):
        for batch in batches(dataset.at_epoch(epoch), 64):
            drawn += np.bincount(batch["src_tokens"][batch["target"] != PAD].numpy(), minlength=len(dictionary))
    assert not drawn[counts == 0].any()
    expected = counts / counts.sum()
    np.testing.assert_allclose(drawn / drawn.sum(), expected, atol=4 * float(np.sqrt(expected.max() / drawn.sum())))


def test_the_task_counts_by_its_dictionary() -> None:
    task = setup_task(arguments("--cpu --task masked_lm --arch bert_tiny --freq-weighted-replacement"))
    counts = task.masking().counts
    assert counts[[0, 1, 2, len(counts) - 1]].tolist() == [0, 0, 0, 0] and counts[4] == task.dictionary.count[4] > 0
    task.dictionary.count = [0] * len(counts)
    with user_error("--freq-weighted-replacement: .*dict.txt counts no word; leave it out"):
        task.masking()
    assert setup_task(arguments("--cpu --task masked_lm --arch bert_tiny")).masking().counts is None


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


PIECES = {  # a word of three pieces, and one of one
    "@@": ["st@@", "r@@", "ange", "the"],
    "##": ["st", "##r", "##ange", "the"],
    "sentencepiece": ["▁st", "r", "ange", "▁the"],
    "GPT-2": ["Ġst", "r", "ange", "Ġthe"],
    "ends": ["st", "r", "ange</w>", "the</w>"],
}


@pytest.mark.parametrize("marks", PIECES)
def test_whole_words_are_chosen_together(marks: str) -> None:
    dictionary = Dictionary()
    for piece in PIECES[marks]:
        dictionary.add_symbol(piece)
    rule = word_rule(dictionary)
    dictionary.add_mask()
    *word, the = [dictionary.index(piece) for piece in PIECES[marks]]
    text = _Text([*word, the, *word, *word, the, the, EOS])
    continues, joins = word_parts(dictionary, rule)
    masking = Masking(3, 0.5, 0.0, 0.0, dictionary.mask(), special_symbols(dictionary), continues, joins)
    dataset = MaskedBlocks(TokenBlocks(text, 32, "none", pad=PAD, eos=EOS), masking, BOS)
    words = [[1, 2, 3], [4], [5, 6, 7], [8, 9, 10], [11], [12]]
    counts = set()
    for epoch in range(30):
        chosen = (dataset.at_epoch(epoch).batch(np.array([0]))["target"][0] != PAD).tolist()
        assert all(len({chosen[place] for place in places}) == 1 for places in words)
        counts.add(sum(chosen[places[0]] for places in words))
    assert counts == {3}


def test_a_line_begins_a_word_whether_its_first_symbol_has_a_mark_or_not() -> None:
    dictionary = Dictionary()
    the, is_, at = [dictionary.add_symbol(piece) for piece in ("The", "Ġis", "at")]
    masking = Masking(3, 0.5, 0.0, 0.0, 0, special_symbols(dictionary), *word_parts(dictionary, ByteLevelWords()))
    text = _Text([the, is_, at, EOS, the, at, is_, EOS])
    dataset = MaskedBlocks(TokenBlocks(text, 32, "none", pad=PAD, eos=EOS), masking, BOS)
    patterns = {tuple((dataset.at_epoch(e).batch(np.array([0]))["target"][0] != PAD).tolist()) for e in range(60)}
    words = [[1], [2, 3], [5, 6], [7]]
    assert all(pattern[places[0]] == pattern[places[-1]] for pattern in patterns for places in words)
    assert len({tuple(pattern[places[0]] for places in words) for pattern in patterns}) == 6  # two of four words


def test_a_few_marks_in_the_words_of_a_text_are_no_rule() -> None:
    dictionary = Dictionary()
    for word in [f"word{number}" for number in range(200)] + ["▁", "Ġ", "Ġx", "end</w>"]:
        dictionary.add_symbol(word)
    assert word_rule(dictionary) is None
    assert not np.concatenate(word_parts(dictionary)).any()


@pytest.mark.parametrize("rule", [ContinuationMarks(), BeginMarks("▁"), ByteLevelWords(), EndMarks(), SubwordMarks()])
def test_the_parts_of_words_are_those_of_the_rule_that_groups_lines(rule: WordRule) -> None:
    pieces = ["st@@", "##r", "▁st", "Ġst", "ange", "end</w>", "the"]
    for first in pieces:
        for second in pieces:
            together = len(rule.group([first, second])[0]) == 1
            assert together == (rule.joins(first) or rule.continues(second))


@pytest.mark.parametrize("kind", ["subword_nmt", "sentencepiece", "gpt2", "wordpiece", "byte", "metaspace"])
def test_the_words_of_raw_text_are_chosen_whole_with_every_encoding(kind: str, tmp_path: Path) -> None:
    encoding = subword_encodings.encodings()[kind]
    lines = [encoding.encode([line])[0].split() for line in subword_encodings.TEXT.splitlines()]
    dictionary = Dictionary()
    for piece in [piece for line in lines for piece in line]:
        dictionary.add_symbol(piece)
    dictionary.save(str(tmp_path / "dict.txt"))
    loaded = Dictionary.load(str(tmp_path / "dict.txt"))
    Tokenizer(subwords=encoding).save(tmp_path, loaded.symbols)
    rule = word_rule(loaded)
    assert rule == encoding.words
    loaded.add_mask()
    masking = Masking(3, 0.3, 0.0, 0.0, loaded.mask(), special_symbols(loaded), *word_parts(loaded, rule))
    text = _Text([token for line in lines for token in [*map(loaded.index, line), EOS]])
    dataset = MaskedBlocks(TokenBlocks(text, 500, "none", pad=PAD, eos=EOS), masking, BOS)
    sizes = [size for line in lines for size in [*encoding.words.group(line)[1], 1]]
    assert max(sizes) > 1
    word = np.repeat(np.arange(len(sizes)), sizes)
    for epoch in range(10):
        chosen = (dataset.at_epoch(epoch).batch(np.array([0]))["target"][0] != PAD).numpy()[1:]
        by_word = np.bincount(word, chosen)
        assert set(by_word / np.array(sizes)) == {0, 1}


def test_the_task_groups_by_the_tokenizer_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(subword_encodings.TEXT * 30)
    (tmp_path / "merges.txt").write_bytes(subword_encodings.MERGES)
    flags = [
        "--only-source",
        "--trainpref",
        "text",
        "--validpref",
        "text",
        "--bpe",
        "gpt2",
        "--bpe-codes",
        "merges.txt",
    ]
    flags = [str(tmp_path / flag) if (tmp_path / flag).exists() else flag for flag in flags]
    preprocess.main(get_preprocessing_parser().parse_args([*flags, "--destdir", str(tmp_path / "bin")]))
    words = "--task masked_lm --criterion masked_lm --arch bert_tiny --optimizer adam --lr 0.1 --mask-whole-words --cpu"
    task = setup_task(arguments(words, data=tmp_path / "bin"))
    batch = task.dataset("train").at_epoch(1).batch(np.arange(8))  # type: ignore[attr-defined]
    continues = np.array([not symbol.startswith("Ġ") for symbol in task.source_dictionary.symbols])
    source = np.where(batch["target"] != PAD, batch["target"], batch["net_input"]["src_tokens"])
    chosen, special = (batch["target"] != PAD).numpy(), special_symbols(task.source_dictionary)
    inside = continues[source][:, 1:] & ~special[source][:, 1:] & ~special[source][:, :-1]
    assert inside.any() and (chosen[:, 1:] == chosen[:, :-1])[inside].all()


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
