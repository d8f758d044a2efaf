"""A corpus cut into the blocks that a language model is trained and scored on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fairseq.config.shared import BREAK_MODES
from fairseq.data.dataset import Examples, Sample
from fairseq.data.indexed_dataset import Corpus, IndexedCorpus, JoinedCorpus
from fairseq.data.position import SEQUENCE, EpochLayout, order_generator
from fairseq.errors import SettingError, nearest

__all__ = ["Sample", "TokenBlocks"]

_LINES = 1  # purpose of the order of lines: that of blocks, which has none, is another


class ShuffledLines:
    """Map from positions in a corpus with shuffled lines to positions in the corpus.

    A line is moved whole, with the ``</s>`` that ends it. 16 bytes a line are kept, whatever the
    number of tokens; a look-up is a binary search among the lines.

    Args:
        sizes: int [lines], the tokens of each line.
        generator: what draws the order.
    """

    def __init__(self, sizes: np.ndarray, generator: np.random.RandomState) -> None:
        sizes = np.asarray(sizes)
        count = len(sizes)
        order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
        generator.shuffle(order)
        shuffled = sizes[order]
        self._ends = np.cumsum(shuffled, dtype=np.int64)
        starts = np.cumsum(sizes, dtype=np.int64)
        # In place: each of these arrays takes 8 bytes a line.
        starts -= sizes
        self._shifts = starts[order]
        self._shifts -= self._ends
        self._shifts += shuffled

    def positions(self, positions: np.ndarray) -> np.ndarray:
        """Positions in the corpus of the tokens at *positions*
        (any shape, 0 … tokens − 1) of the shuffled lines."""
        return positions + self._shifts[np.searchsorted(self._ends, positions, side="right")]


class TokenBlocks(Examples):
    """Blocks of a corpus: block i scores ``tokens[starts[i] : starts[i] + sizes[i]]``.

    Starts and sizes are in memory, 12 bytes a block.

    Args:
        corpus: the tokens and their lines.
        block_size: tokens a block (``--tokens-per-sample``).
        break_mode: ``none``: the corpus is one stream, cut every *block_size* tokens, the last
            block may be shorter. ``complete``: whole lines, as many as fit; a longer line is a
            block of its own. ``complete_doc``: the same, but an empty line ends a document, is in
            no block, and no block spans two documents. ``eos``: one line a block.
        pad: padding id.
        eos: id that stands before the first token of the corpus.
        shuffle_lines: seed from which :meth:`at_epoch` shuffles the corpus's lines anew for each
            epoch; None: never.
        bos: id that stands before each row's source and before its targets (``--add-bos-token``);
            None: nothing does. Sizes do not count it, as in fairseq.

    Raises:
        UserError: *break_mode* or *block_size* is not possible,
            or *shuffle_lines* is not with *break_mode*.

    Attributes:
        starts: int64 [n].
        sizes: int32 [n].
        selection: bool [blocks that were cut]: those that :meth:`select` left; None: all.
        before: int64 [n], tokens of context that :meth:`with_context`
            puts before each block; None: no context.
    """

    def __init__(
        self,
        corpus: Corpus,
        block_size: int,
        break_mode: str | None,
        *,
        pad: int,
        eos: int,
        shuffle_lines: int | None = None,
        bos: int | None = None,
    ) -> None:
        if block_size < 1:
            raise SettingError(f"`tokens_per_sample` {block_size}: must be at least 1")
        if shuffle_lines is not None and break_mode not in (None, "none"):
            raise SettingError(
                f"`shuffle_lines`: with `sample_break_mode` {break_mode} blocks are whole lines and come in a random "
                "order anyway; use `sample_break_mode` none or leave out `shuffle_lines`"
            )
        self.corpus = corpus
        self.pad = pad
        self.eos = eos
        self.bos = bos
        self._seed = shuffle_lines
        self._rule = SEQUENCE
        self._lines: ShuffledLines | None = None
        self._set(*_cut(corpus, block_size, break_mode or "none"))
        self.selection: np.ndarray | None = None
        self.before: np.ndarray | None = None
        self._context: _Context | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def checksums(self) -> dict[str, int]:
        return self.corpus.checksums() if isinstance(self.corpus, IndexedCorpus | JoinedCorpus) else {}

    def at_epoch(self, epoch: int) -> TokenBlocks:
        """Return the blocks of *epoch*: sizes are the same in every epoch, the order of lines is
        new if shuffled.

        The order follows from the seed and *epoch* alone.
        """
        if self._seed is None:
            return self
        blocks = copy.copy(self)
        blocks._lines = ShuffledLines(self.corpus.sizes, order_generator(self._rule, self._seed, epoch, _LINES))
        return blocks

    def continuing(self, saved: EpochLayout) -> TokenBlocks:
        """Return these blocks with their lines in the order of a run that stored *saved*."""
        blocks = copy.copy(self)
        blocks._rule = saved.rule
        return blocks

    def cut_long(self, longest: int) -> TokenBlocks:
        """These blocks, cut where they have more than *longest* tokens."""
        if int(self.sizes.max(initial=0)) <= longest:
            return self
        cut = copy.copy(self)
        cut._set(*_cut_long(self.starts, self.sizes.astype(np.int64), longest))
        return cut

    def with_context(self, window: int, longest: int) -> TokenBlocks:
        """Return these blocks, each read after up to *window* tokens
        of context, in rows of at most *longest* tokens.

        As in fairseq, context is what the blocks before hold: blank lines of ``complete_doc`` and
        blocks that were left out are not read. A block longer than *longest* has none.
        """
        context = _Context(self.starts, np.cumsum(self.sizes, dtype=np.int64) - self.sizes)
        blocks = copy.copy(self)
        # With `<s>` a row is longer than its block.
        room = longest - (self.bos is not None) - self.sizes.astype(np.int64)
        blocks.before = np.minimum(context.first, np.clip(room, 0, window))
        blocks._context = context if (context.first != context.starts).any() else None
        return blocks

    def select(self, keep: np.ndarray) -> TokenBlocks:
        """Return the blocks for which *keep*, bool [n], is true, renumbered."""
        selected = copy.copy(self)
        selected._set(self.starts[keep], self.sizes[keep])
        selected.before = None if self.before is None else self.before[keep]
        # An order that is drawn once is drawn for all blocks, those left out included.
        selected.selection = np.ones(len(keep), bool) if self.selection is None else self.selection.copy()
        selected.selection[selected.selection] = keep
        return selected

    def _set(self, starts: np.ndarray, sizes: np.ndarray) -> None:
        self.starts, self.sizes = starts, sizes.astype(np.int32, copy=False)

    def batch(self, indices: np.ndarray) -> Sample:
        """Blocks *indices* [B], at least one, as rows padded on the right.

        The source is the target shifted right by one: it begins with the token before the block, at
        the beginning of the corpus with ``</s>``. The targets of a block's context are padding.

        Returns:
            ``id`` int64 [B]; ``nsentences`` B; ``ntokens``, the number of targets that are no
            padding; ``net_input.src_tokens`` and ``target``, int64 [B, T].
        """
        before = np.zeros(len(indices), np.int64) if self.before is None else self.before[indices]
        lengths = before + self.sizes[indices]
        # Each row is one window of the corpus,
        # from the token before its first target to its last target.
        positions = self.positions(indices)  # [B, T + 1]
        # Columns behind a row's end, and before the corpus,
        # read any token: they are overwritten below.
        window = self.corpus.tokens[np.clip(positions, 0, len(self.corpus.tokens) - 1)].astype(np.int64)
        # Position −1 was clipped to 0 above: before the corpus stands `</s>`, as after a line.
        window[positions[:, 0] < 0, 0] = self.eos
        source, target = window[:, :-1].copy(), window[:, 1:].copy()
        column = np.arange(target.shape[1])
        if int(lengths.min()) < len(column):
            # −1, which is no id, where the dictionary has no padding symbol.
            source[column >= lengths[:, None]] = self.pad
            target[column >= lengths[:, None]] = self.pad
        if before.any():
            target[column < before[:, None]] = self.pad
        if self.bos is not None:
            source, target = _inserted(source, before, self.bos), _inserted(target, before, self.bos)
        return {
            "id": torch.from_numpy(np.asarray(indices, dtype=np.int64)),
            "nsentences": len(indices),
            "ntokens": int(np.count_nonzero(target != self.pad)),
            "net_input": {"src_tokens": torch.from_numpy(source)},
            "target": torch.from_numpy(target),
        }

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """The positions in the corpus that blocks *indices* [B] read, with their context: int64
        [B, T + 1].

        Column t is the source's token t, column t + 1 its target;
        −1 stands for the ``</s>`` before the corpus. Columns behind a row's
        last target hold positions of other blocks, or behind the corpus.
        """
        starts = self.starts[indices]
        before = np.zeros_like(starts) if self.before is None else self.before[indices]
        length = int((before + self.sizes[indices]).max()) + 1
        positions = (starts - before - 1)[:, None] + np.arange(length)
        if self._context is not None:
            positions = self._context.positions(starts, positions)
        if self._lines is None:
            return positions
        inside = (positions >= 0) & (positions < len(self.corpus.tokens))
        return np.where(inside, self._lines.positions(np.where(inside, positions, 0)), positions)


def document_positions(tokens: torch.Tensor, eos: int) -> torch.Tensor:
    """The position of each of *tokens* [B, T] in its document, of several in a row: int64 [B, T].

    A document begins with the ``</s>`` of the blank line before it, as a corpus begins with one: it
    follows the ``</s>`` of another line.
    """
    ends = tokens == eos
    first = F.pad(ends[:, 1:] & ends[:, :-1], (1, 0), value=True)
    at = torch.arange(tokens.size(1), device=tokens.device)
    return at - (first * at).cummax(1).values


def _inserted(rows: np.ndarray, columns: np.ndarray, token: int) -> np.ndarray:
    """*rows* [B, T] with *token* before column ``columns[r]`` of each row r: [B, T + 1]."""
    column = np.arange(rows.shape[1] + 1)
    longer = np.take_along_axis(rows, np.minimum(column - (column > columns[:, None]), rows.shape[1] - 1), axis=1)
    longer[np.arange(len(rows)), columns] = token
    return longer


@dataclass(frozen=True)
class _Context:
    """The tokens of blocks as one sequence, for a corpus of which some are in no block."""

    starts: np.ndarray  # position of each block's first token in the corpus, int64 [n]
    first: np.ndarray  # number of tokens in the blocks before each, int64 [n]

    def positions(self, starts: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Replace *positions* [B, T] before the blocks
        at *starts* [B] by the positions of their context.

        −1 stands for the token before the first block.
        """
        block = np.searchsorted(self.starts, starts)
        number = self.first[block][:, None] + positions - starts[:, None]  # of a token in the sequence
        block = np.searchsorted(self.first, number, side="right") - 1
        context = np.where(number < 0, -1, self.starts[block] + number - self.first[block])
        return np.where(positions < starts[:, None], context, positions)


def _cut(corpus: Corpus, block_size: int, break_mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts, int64, and sizes of the blocks."""
    if break_mode == "none":
        starts = np.arange(0, len(corpus.tokens), block_size, dtype=np.int64)
        return starts, np.minimum(len(corpus.tokens) - starts, block_size)
    if break_mode not in BREAK_MODES:
        raise SettingError(f"`sample_break_mode` {break_mode}: {nearest(break_mode, BREAK_MODES)}")
    lines = np.asarray(corpus.sizes)
    offsets = np.zeros(len(lines) + 1, dtype=np.int64)
    np.cumsum(lines, dtype=np.int64, out=offsets[1:])
    if break_mode == "eos":
        starts, sizes = offsets[:-1], lines
    else:
        ends = _ends(lines, offsets, block_size, documents=break_mode == "complete_doc")
        first = np.fromiter(_chain(ends), dtype=np.int64)
        starts, sizes = offsets[first], offsets[ends[first]] - offsets[first]
        if break_mode == "complete_doc":
            # A line of one token is a blank one: its `</s>`.
            sizes = np.where(lines[first] == 1, 0, sizes)
    return starts[sizes > 0], sizes[sizes > 0]


def _cut_long(starts: np.ndarray, sizes: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """The same tokens as blocks of at most *longest*."""
    parts = -(-sizes // longest)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a part in its block
    return np.repeat(starts, parts) + number * longest, np.minimum(np.repeat(sizes, parts) - number * longest, longest)


def _ends(lines: np.ndarray, offsets: np.ndarray, block_size: int, documents: bool) -> np.ndarray:
    """The line after a block that starts at each line;
    every *documents*' separator is a block of its own."""
    numbers = np.arange(len(lines))
    # For every line where a block beginning there would end,
    # at once; the loop then only follows the chain.
    ends = np.searchsorted(offsets, offsets[:-1] + block_size, side="right") - 1
    # A line that is longer than a block is a block of its own.
    np.maximum(ends, numbers + 1, out=ends)
    separators = np.flatnonzero(lines == 1) if documents else numbers[:0]
    if len(separators):
        next_separator = np.append(separators, len(lines))[np.searchsorted(separators, numbers)]
        np.minimum(ends, np.maximum(next_separator, numbers + 1), out=ends)
    return ends


def _chain(ends: np.ndarray) -> Iterator[int]:
    """0, ends[0], ends[ends[0]], … while there is a line."""
    # A memory view: indexing it gives Python integers,
    # faster than numpy's scalars, in a loop over all blocks.
    following = np.ascontiguousarray(ends).data
    line, count = 0, len(ends)
    while line < count:
        yield line
        line = following[line]
