"""Blocks agree with a plain reading of fairseq's rules, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError

PAD, EOS = 1, 2


@dataclass
class Lines:
    """A corpus in memory: each line a run of different tokens and an ``</s>``."""

    words: list[int]

    def __post_init__(self) -> None:
        self.sizes = np.array([count + 1 for count in self.words], dtype=np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        self.tokens = np.arange(10, 10 + self.offsets[-1]).astype(np.uint16)
        self.tokens[self.offsets[1:] - 1] = EOS

    def lines(self) -> list[list[int]]:
        return [self.tokens[a:b].tolist() for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


def plain_blocks(lines: list[list[int]], block_size: int, mode: str) -> list[list[int]]:
    """The blocks, made with lists and one rule at a time."""
    if mode == "none":
        stream = [token for line in lines for token in line]
        return [stream[i : i + block_size] for i in range(0, len(stream), block_size)]
    if mode == "eos":
        return lines
    blocks: list[list[int]] = [[]]
    for line in lines:
        if mode == "complete_doc" and line == [EOS]:
            blocks.append([])
        elif blocks[-1] and len(blocks[-1]) + len(line) > block_size:
            blocks.append(list(line))
        else:
            blocks[-1] += line
    return [block for block in blocks if block]


def shifted(corpus: Lines) -> list[int]:
    return [EOS, *corpus.tokens[:-1].tolist()]


corpora = st.lists(st.integers(0, 9), min_size=1, max_size=30).map(Lines)


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
@given(corpus=corpora, block_size=st.integers(1, 25))
def test_blocks_are_those_of_the_plain_rules(mode: str, corpus: Lines, block_size: int) -> None:
    blocks = TokenBlocks(corpus, block_size, mode, pad=PAD, eos=EOS)
    found = [
        corpus.tokens[start : start + size].tolist() for start, size in zip(blocks.starts, blocks.sizes, strict=True)
    ]
    assert found == plain_blocks(corpus.lines(), block_size, mode)
    assert blocks.starts.dtype == np.int64 and blocks.sizes.dtype == np.int32
    assert len(blocks) == len(found)


def test_no_break_mode_is_none() -> None:
    corpus = Lines([3, 4])
    assert TokenBlocks(corpus, 4, None, pad=PAD, eos=EOS).sizes.tolist() == [4, 4, 1]


def test_an_empty_line_is_only_a_document_break_in_complete_doc() -> None:
    corpus = Lines([0, 2, 0, 0, 1, 1, 0])
    assert TokenBlocks(corpus, 5, "complete_doc", pad=PAD, eos=EOS).sizes.tolist() == [3, 4]
    assert TokenBlocks(corpus, 5, "complete", pad=PAD, eos=EOS).sizes.tolist() == [5, 5, 1]


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
@given(corpus=corpora, block_size=st.integers(1, 12), context=st.integers(0, 15), data=st.data())
def test_a_batch_holds_context_block_and_padding(
    mode: str, corpus: Lines, block_size: int, context: int, data: st.DataObject
) -> None:
    blocks = TokenBlocks(corpus, block_size, mode, pad=PAD, eos=EOS)
    if len(blocks) == 0:
        return
    indices = np.array(data.draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=5)))
    ranges = [slice(start, start + size) for start, size in zip(blocks.starts, blocks.sizes, strict=True)]
    sources, targets = [], []
    for index in indices:
        block = shifted(corpus)[ranges[index]]
        before = [token for other in ranges[:index] for token in shifted(corpus)[other]]
        room = max(0, min(context, block_size + context - len(block), len(before)))
        sources.append(before[len(before) - room :] + block)
        targets.append([PAD] * room + corpus.tokens[ranges[index]].tolist())
    longest = max(map(len, sources))
    sample = blocks.with_context(context, block_size + context).batch(indices)
    assert sample["net_input"]["src_tokens"].tolist() == [row + [PAD] * (longest - len(row)) for row in sources]
    assert sample["target"].tolist() == [row + [PAD] * (longest - len(row)) for row in targets]
    assert sample["id"].tolist() == indices.tolist()
    assert sample["nsentences"] == len(indices)
    assert sample["ntokens"] == int(blocks.sizes[indices].sum()) and type(sample["ntokens"]) is int


def test_a_padding_symbol_in_the_text_is_not_counted() -> None:
    corpus = Lines([4])
    corpus.tokens[1] = PAD
    assert TokenBlocks(corpus, 5, "none", pad=PAD, eos=EOS).batch(np.array([0]))["ntokens"] == 4


def test_selected_blocks_are_numbered_anew() -> None:
    corpus = Lines([3, 8, 2, 9, 1])
    blocks = TokenBlocks(corpus, 5, "eos", pad=PAD, eos=EOS)
    short = blocks.select(blocks.sizes <= 5)
    assert len(short) == 3 and len(blocks) == 5
    assert short.batch(np.array([2]))["target"].tolist() == [corpus.lines()[4]]


def test_an_unknown_break_mode_and_a_block_of_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="sample_break_mode compleet: did you mean complete"):
        TokenBlocks(Lines([3]), 5, "compleet", pad=PAD, eos=EOS)
    with pytest.raises(UserError, match="tokens_per_sample 0"):
        TokenBlocks(Lines([3]), 0, "none", pad=PAD, eos=EOS)


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
@given(corpus=corpora, block_size=st.integers(1, 25), longest=st.integers(1, 25))
def test_long_blocks_are_cut_and_blocks_are_selected(mode: str, corpus: Lines, block_size: int, longest: int) -> None:
    expected = plain_blocks(corpus.lines(), block_size, mode)
    cut = TokenBlocks(corpus, block_size, mode, pad=PAD, eos=EOS).cut_long(longest)
    pieces = [block[i : i + longest] for block in expected for i in range(0, len(block), longest)]
    assert texts(corpus, cut) == pieces
    keep = cut.sizes != min(2, longest)
    selected = cut.select(keep)
    assert texts(corpus, selected) == [block for block in pieces if len(block) != min(2, longest)]
    assert selected.selection is not None and selected.selection.tolist() == keep.tolist()


def texts(corpus: Lines, blocks: TokenBlocks) -> list[list[int]]:
    return [
        corpus.tokens[start : start + size].tolist() for start, size in zip(blocks.starts, blocks.sizes, strict=True)
    ]
