"""Log-probabilities of a corpus: non-overlapping, with a context window, or token by token.

Three modes, one result: ``(tokens, log-probabilities)`` in corpus order, from which every report is
computed. With more than one row, ``--sliding-inf`` cuts the corpus into as many contiguous parts; a
part's first tokens have no context, as in non-overlapping evaluation with as many rows. The
corpus's last partial block is scored; the Shortformer's original leaves it out.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairseq.data.indexed_dataset import Corpus
from fairseq.data.samplers import Batching, BlockSampler, StreamSampler, rows_per_batch
from fairseq.data.token_blocks import TokenBlocks, document_positions
from fairseq.distributed import World
from fairseq.distributed.tensor_part import rows_of
from fairseq.errors import UserError
from fairseq.evaluation.cache_pointer import SHARPNESS, CachePointer, Pointer, fitted
from fairseq.inference.reader import Reader
from fairseq.logging import Progress, no_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.models.language_model import LogProbabilities, NextTokenModel
from fairseq.modules import devices
from fairseq.modules.memory import KeyValueCache, Memory, keep_rows
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.precision import Precision
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 36000  # fairseq's
PROJECTED_AT_ONCE, PROJECTED_AT_ONCE_ON_GPU = 512, 16384  # hidden states projected to the vocabulary at once


@dataclass(frozen=True)
class Scores:
    """Tokens of a corpus and their log-probabilities, in the corpus's order."""

    tokens: np.ndarray  # int64 [N]
    lprobs: np.ndarray  # natural logarithms, float32 [N]
    lines: np.ndarray  # int64 [lines + 1]: line i is ``tokens[lines[i] : lines[i + 1]]``

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Scoring:
    """Settings of scoring."""

    tokens_per_sample: int  # tokens L of a block, or of a segment with memory
    break_mode: str = "none"  # rule for block boundaries
    # W: blocks have L − W tokens, each with up to W tokens before it as context, so many that the
    # row has at most L; longer lines have less, up to the model's positions.
    context_window: int = 0
    token_by_token: bool = False  # one token at a time, as in generation; needs a model with a cache
    batch_size: int | None = None  # rows; with memory, contiguous parts of the corpus read in parallel
    max_tokens: int | None = None  # most tokens in a batch (default without *batch_size*: 36,000; with memory: one row)
    multiple: int = 1  # without memory, larger batches are cut to a multiple of this number of rows
    softmax_batch: int | None = None  # most tokens whose output distribution is in memory at once
    add_bos_token: bool = False  # each block begins with ``<s>``, whose own probability is not reported
    document_mask: bool = False  # tokens of a row read their own document only
    texts: bool = False  # each line of the corpus is a text of its own, in blocks of its own; rows of a batch are texts
    # Only part *shard*, from 0, of *shards* contiguous parts of the blocks is scored.
    shard: int = 0
    shards: int = 1
    cache_pointer: int = 0  # states of the pointer that :attr:`Scorer.pointer` is to be; 0: none


class Scorer:
    """Scores corpora with one model, or with the average of several models' probabilities.

    * *Non-overlapping*: blocks are independent. A model with memory reads segments in order and
      keeps its memory, in one row or in several rows of contiguous parts of the corpus.
    * *Context window*: the first tokens of a block have context, too, which is read but not scored
      again.
    * *Token by token*: the tokens of a segment are read one by one through the key-value cache. The
      attended span grows from M to M + L and falls back, so with the same number of rows the
      results equal non-overlapping inference up to rounding. Embeddings and output probabilities
      are computed for many tokens at once, which does not change the results.

    Every token is scored once; with ``break_mode`` ``complete_doc``, blank lines are in no block
    and not scored.

    Args:
        models: over one dictionary; they are moved to *device*.
        precision: of weights and forward pass (default:
            float32); softmax and logarithms are always float32.
        int8: round weight matrices to int8, with one scale per output.
        world: processes that share the batches,
            or with memory the rows; all of them get all scores.

    Attributes:
        readers: of the models in that precision.
        pointer: mixed into the probabilities, if it is set.

    Raises:
        UserError: *scoring* contradicts itself or a model.
    """

    def __init__(
        self,
        models: Sequence[BaseFairseqModel],
        dictionary: Dictionary,
        scoring: Scoring,
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
        *,
        int8: bool = False,
        world: World | None = None,
    ) -> None:
        self.dictionary = dictionary
        self.scoring = scoring
        self.world = world or World()
        self.precision = precision or Precision()
        self.device = torch.device(device)
        self.pointer: Pointer | None = None
        if scoring.cache_pointer and (len(models) > 1 or self.world.size > 1):
            raise UserError("`cache_pointer`: one process reads the text in order, with one model; give one")
        for model in models:
            _check(scoring, model)
            self.precision.move(model.eval(), self.device)
        begin = dictionary.begin() if scoring.add_bos_token else None
        dtype = self.precision.on(self.device)
        self.readers = [Reader(model, dtype, int8=int8, begin=begin) for model in models]

    @torch.inference_mode()
    def score(self, corpus: Corpus, progress: Progress = no_progress) -> Scores:
        """The log-probability of every token of *corpus*.

        Raises:
            UserError: no block is left. Blocks that are longer than a model's positions are left
                out, with a warning.
        """
        blocks = self._blocks(corpus)
        lprobs: list[np.ndarray] = []  # of each model
        for reader in self.readers:
            cache = CachePointer(self.pointer.states, [self.pointer.sharpness]) if self.pointer else None
            of_model, pointed = self._read(reader, blocks, len(corpus.tokens), cache, progress)
            if self.pointer is not None and pointed is not None:
                of_model = self.pointer.mixed(torch.from_numpy(of_model), pointed[0]).numpy()
            lprobs.append(of_model)
        # Probabilities of models are averaged, not their logarithms, as in fairseq.
        average = functools.reduce(np.logaddexp, lprobs) - np.float32(np.log(len(lprobs)))
        return _in_order(corpus, blocks, average, self.dictionary.pad())

    @torch.inference_mode()
    def fit_pointer(self, corpus: Corpus, progress: Progress = no_progress) -> Pointer:
        """The pointer over ``cache_pointer`` states with the largest likelihood of *corpus*."""
        states = self.scoring.cache_pointer
        cache = CachePointer(states, SHARPNESS)
        lprobs, pointed = self._read(self.readers[0], self._blocks(corpus), len(corpus.tokens), cache, progress)
        assert pointed is not None
        scored = pointed[0] >= 0
        return fitted(states, torch.from_numpy(lprobs)[scored], pointed[:, scored])

    def _read(
        self, reader: Reader, blocks: TokenBlocks, size: int, cache: CachePointer | None, progress: Progress
    ) -> tuple[np.ndarray, Tensor | None]:
        """Log-probabilities of one model [size], and what *cache* gives."""
        model = reader.model
        collector = _Collector(model.output_layer, size, self.scoring.softmax_batch, self.device, cache)
        with self.precision.autocast(self.device):
            if model.memory_length:
                self._read_streams(reader, blocks, collector, progress)
            else:
                self._read_blocks(model, blocks, collector, progress)
            return collector.result(self.world), collector.pointed_at()

    def _blocks(self, corpus: Corpus) -> TokenBlocks:
        scoring, dictionary = self.scoring, self.dictionary
        # Token by token every token has all of the cache
        # as context; the window only states its length.
        window = 0 if scoring.token_by_token else scoring.context_window
        blocks = TokenBlocks(
            corpus,
            scoring.tokens_per_sample - window,
            "eos" if scoring.texts else scoring.break_mode,
            pad=dictionary.pad(),
            eos=dictionary.eos(),
            bos=dictionary.begin() if scoring.add_bos_token else None,
        )
        if scoring.texts:
            blocks = blocks.cut_long(scoring.tokens_per_sample)
        limits = [limit for reader in self.readers if (limit := reader.model.max_positions()) is not None]
        longest = min(limits, default=np.iinfo(np.int32).max)
        keep = blocks.sizes <= longest
        if not keep.all():
            logger.warning("left out %d of %d blocks, longer than %d positions", (~keep).sum(), len(keep), longest)
            blocks = blocks.select(keep)
        if window:
            blocks = blocks.with_context(window, min(scoring.tokens_per_sample, longest))
        # Contiguous parts, so that words are cut at their ends only.
        if scoring.shards > 1:
            first, end = rows_of(len(blocks), scoring.shard, scoring.shards)
            if first == end and len(blocks):
                few = f"{len(blocks)} blocks, so that part {scoring.shard} has none; give at most {len(blocks)} parts"
                raise UserError(f"`num_shards` {scoring.shards}: there are only {few}")
            number = np.arange(len(blocks))
            blocks = blocks.select((number >= first) & (number < end))
        if len(blocks) == 0:
            raise UserError(
                f"`tokens_per_sample` {scoring.tokens_per_sample}: no block to score; "
                "the split is empty or its blocks are too long"
            )
        return blocks

    def _read_blocks(
        self, model: NextTokenModel, blocks: TokenBlocks, collector: _Collector, progress: Progress
    ) -> None:
        scoring = self.scoring
        lengths = blocks.sizes if blocks.before is None else (blocks.sizes + blocks.before).astype(np.int32)
        max_tokens = scoring.max_tokens
        if max_tokens is None and scoring.batch_size is None:
            # A block longer than fairseq's default is one batch, not an error.
            max_tokens = max(DEFAULT_MAX_TOKENS, int(lengths.max()))
        limits = Batching(max_tokens, scoring.batch_size, scoring.multiple, shuffle=False)
        # Lines and texts differ in length: by size they need less padding.
        sampler = BlockSampler(lengths, limits, by_size=scoring.texts or scoring.break_mode != "none")
        share = range(self.world.rank, len(sampler), self.world.size)
        batches = itertools.islice(sampler.epoch(1), share.start, None, share.step)
        for indices in progress(batches, len(share)):
            sample = blocks.batch(indices)
            tokens, options = sample["net_input"]["src_tokens"], {}
            if scoring.document_mask:
                positions = document_positions(tokens, self.dictionary.eos())
                options["document_positions"] = self._to_device(positions)
            hidden, _ = model(self._to_device(tokens), **options)
            collector.add(hidden, sample["target"], *_positions(blocks, indices))

    def _read_streams(self, reader: Reader, blocks: TokenBlocks, collector: _Collector, progress: Progress) -> None:
        """Score segments in order, each row with its own memory."""
        scoring = self.scoring
        rows = _rows(scoring)
        groups = _text_steps(blocks, rows) if scoring.texts else [list(StreamSampler(len(blocks), rows).epoch(1))]
        memory: Memory | None = None
        cache: KeyValueCache | None = None
        # Processes share rows and not steps: a step needs the memory of the one before.
        share = slice(*rows_of(rows, self.world.rank, self.world.size))
        steps = ((number, len(group), step[share]) for group in groups for number, step in enumerate(group))
        for number, segments, indices in progress(steps, sum(map(len, groups))):
            if number == 0:
                memory = cache = None
            # Rows end from the last one on: this process may have none left.
            if not len(indices):
                continue
            sample = blocks.batch(indices)
            tokens = self._to_device(sample["net_input"]["src_tokens"])
            if reader.model.can_generate:
                if cache is None:
                    cache = reader.new_cache(len(indices), segments * scoring.tokens_per_sample)
                else:
                    cache.select_rows(range(len(indices)))
                    cache.next_segment()
                hidden = (reader.read_each if scoring.token_by_token else reader.read)(tokens, cache)
            else:
                hidden, extra = reader.model(tokens, memory=keep_rows(memory, len(indices)))
                memory = extra["memory"]
            collector.add(hidden, sample["target"], *_positions(blocks, indices))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return devices.move(tensor, self.device)


class _Collector:
    """Computes log-probabilities of targets from hidden states
    in chunks, and puts them into the corpus's order."""

    def __init__(
        self,
        layer: OutputLayer,
        size: int,
        chunk: int | None,
        device: torch.device,
        cache: CachePointer | None = None,
    ) -> None:
        self.layer = layer
        self.cache = cache
        self.pointed: list[Tensor] = []
        self.chunk = chunk
        # A row of log-probabilities is V wide: it does not wait for other batches.
        most = PROJECTED_AT_ONCE_ON_GPU if devices.is_accelerator(device) else PROJECTED_AT_ONCE
        together = 1 if isinstance(layer, LogProbabilities) else most
        self.together = min(together, chunk or together)
        self.lprobs = torch.zeros(size)
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.rows = 0
        self.done: list[Tensor] = []
        self.positions: list[np.ndarray] = []

    def add(self, hidden: Tensor, target: Tensor, index: Tensor | None, positions: np.ndarray) -> None:
        """Add a batch: *hidden* states [B, T, C] and targets [B, T], which are on the CPU.

        Args:
            index: indices of the scored targets among B·T; None: all.
            positions: their indices in the corpus.
        """
        self.positions.append(positions)
        hidden, target = hidden.flatten(0, -2), target.flatten()
        if index is not None:
            hidden, target = hidden[index.to(hidden.device)], target[index]
        if self.cache is not None:
            self.pointed.append(self.cache(hidden, target).cpu())
        self.waiting.append((hidden, target))
        self.rows += len(target)
        # Batches wait for one another: for a few rows the whole output matrix would be read, too.
        if self.rows >= self.together:
            self._flush()

    def result(self, world: World) -> np.ndarray:
        """Log-probabilities float32 [N] of all of *world*
        in the corpus's order; 0 where there was no target."""
        self._flush()
        # Copied to the host once, at the end: every copy before would synchronise.
        if self.positions:
            self.lprobs[torch.from_numpy(np.concatenate(self.positions))] = torch.cat(self.done).cpu()
        if world.size == 1:
            return self.lprobs.numpy()
        # Each process adds zeros to what the others computed.
        return world.sum(self.lprobs.to(world.device)).cpu().numpy()

    def pointed_at(self) -> Tensor | None:
        """What the cache gives to the targets, [S, N] in the corpus's order, −1 where there was
        none; None without a cache."""
        if self.cache is None:
            return None
        result = torch.full((len(self.cache.sharpness), len(self.lprobs)), -1.0)
        if self.positions:
            result[:, torch.from_numpy(np.concatenate(self.positions))] = torch.cat(self.pointed, dim=1)
        return result

    def _flush(self) -> None:
        if self.waiting:
            hidden, target = (
                parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self.waiting, strict=True)
            )
            self.done.append(self.layer.target_log_probs(hidden, target, self.chunk))
            self.waiting, self.rows = [], 0


def _check(scoring: Scoring, model: BaseFairseqModel) -> None:
    """Reject settings that contradict each other or the model."""
    length, window = scoring.tokens_per_sample, scoring.context_window
    if window >= length:
        raise UserError(f"`context_window` {window}: must be less than `tokens_per_sample` {length}")
    if scoring.token_by_token:
        if not model.memory_length or not model.can_generate:
            raise UserError(
                "`sliding_inf` 1: the model has no memory (`tokens_from_prev`, `mem_len`); leave it out, or use "
                "`context_window`"
            )
        if window not in (0, length - 1):
            raise UserError(
                f"`context_window` {window}: with `sliding_inf` 1 must be {length - 1}, one less than "
                "`tokens_per_sample`; or leave it out"
            )
    elif model.memory_length and window:
        raise UserError(
            f"`context_window` {window}: the model uses its memory as context; leave it out, or add `sliding_inf` 1"
        )
    if scoring.add_bos_token and model.memory_length:
        raise UserError("`add_bos_token`: needs independent blocks and excludes a model with memory; leave it out")
    if scoring.add_bos_token and window and (scoring.break_mode != "none" or window > length - window):
        raise UserError(
            f"`context_window` {window}: with `add_bos_token` needs `sample_break_mode` none, and at most half of "
            f"`tokens_per_sample` {length}"
        )
    if scoring.cache_pointer:
        if scoring.break_mode != "none":
            raise UserError(
                f"`sample_break_mode` {scoring.break_mode}: `cache_pointer` reads one text in order; use none"
            )
        rows = "batch_size" if scoring.max_tokens is None else "max_tokens"
        if model.memory_length and _rows(scoring) > 1:
            raise UserError(
                f"`{rows}` {getattr(scoring, rows)}: with a memory its rows are parts of the text, which "
                "`cache_pointer` reads in order; leave it out"
            )
        if isinstance(model.output_layer, LogProbabilities):
            raise UserError("`cache_pointer`: the model has no states but probabilities; leave it out")
    if scoring.texts and (window or scoring.break_mode != "none"):
        what = f"`context_window` {window}" if window else f"`sample_break_mode` {scoring.break_mode}"
        raise UserError(f"{what}: documents are read in blocks of their own; leave it out")
    if scoring.document_mask and not model.reads_documents:
        raise UserError(f"`document_mask`: {type(model).__name__} does not read several documents in a row")
    if model.memory_length and scoring.break_mode != "none":
        raise UserError(f"`sample_break_mode` {scoring.break_mode}: a model with memory reads streams; use none")


def _rows(scoring: Scoring) -> int:
    """Parts of the corpus that a model with memory reads at once."""
    if scoring.batch_size is None and scoring.max_tokens is None:
        return 1
    return rows_per_batch(scoring.max_tokens, scoring.batch_size, scoring.tokens_per_sample)


def _text_steps(blocks: TokenBlocks, rows: int) -> list[list[np.ndarray]]:
    """Blocks of texts for a model with memory: *rows* texts at a time, the longest first; a step
    has a block of each.

    Texts end from the last row on, so that the texts
    that continue are the first rows of the memory.
    """
    # A block that begins where a line does is the first of its text; texts are lines here.
    first = np.flatnonzero(np.isin(blocks.starts, blocks.corpus.offsets))
    counts = np.diff(np.append(first, len(blocks)))
    order = np.argsort(-np.add.reduceat(blocks.sizes, first), kind="stable")
    groups = [order[start : start + rows] for start in range(0, len(order), rows)]
    return [[first[group][counts[group] > step] + step for step in range(counts[group[0]])] for group in groups]


def _positions(blocks: TokenBlocks, indices: np.ndarray) -> tuple[Tensor | None, np.ndarray]:
    """Indices of the scored targets of ``blocks.batch(indices)``
    (None: all), and those in the corpus."""
    starts, sizes = blocks.starts[indices], blocks.sizes[indices]
    before = np.zeros_like(starts) if blocks.before is None else blocks.before[indices]
    before = before + (blocks.bos is not None)
    column = np.arange(int((before + sizes).max()))
    inside = (column >= before[:, None]) & (column < (before + sizes)[:, None])
    positions = (starts - before)[:, None] + column
    if inside.all():
        return None, positions.ravel()
    return torch.from_numpy(np.flatnonzero(inside)), positions[inside]


def _in_order(corpus: Corpus, blocks: TokenBlocks, lprobs: np.ndarray, padding: int) -> Scores:
    """The scored tokens of *corpus*, by lines; no loss counts *padding*, which other programs'
    corpora may have."""
    tokens = np.asarray(corpus.tokens).astype(np.int64)
    lines = np.asarray(corpus.offsets, dtype=np.int64)
    real = tokens != padding
    # Without gaps nothing has to be selected: the usual case, and three arrays less.
    if int(blocks.sizes.sum(dtype=np.int64)) == len(tokens) and real.all():
        return Scores(tokens, lprobs, lines)
    steps = np.zeros(len(tokens) + 1, dtype=np.int64)
    # +1 where a block begins and −1 behind its end: the running sum is 1 inside of blocks.
    np.add.at(steps, blocks.starts, 1)
    np.add.at(steps, blocks.starts + blocks.sizes, -1)
    scored = (np.cumsum(steps[:-1]) > 0) & real
    before = np.concatenate([[0], np.cumsum(scored)])
    return Scores(tokens[scored], lprobs[scored], before[lines])
