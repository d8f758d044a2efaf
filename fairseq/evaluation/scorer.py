"""Log-probabilities of a corpus's tokens, three ways, with one result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.data.dictionary import Dictionary
from fairseq.data.indexed_dataset import Corpus
from fairseq.data.samplers import BlockSampler, StreamSampler, rows_per_batch
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel
from fairseq.models.inference import Reader
from fairseq.modules.memory import KeyValueCache, Memory, keep_rows
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.precision import Precision

DEFAULT_MAX_TOKENS = 36000  # fairseq's
TOGETHER = {"cpu": 512, "cuda": 16384}  # hidden states that are turned into probabilities together

Progress = Callable[[Iterable[np.ndarray], int], Iterable[np.ndarray]]
"""Shows how far an iterable of known length is: (items, length) → items."""


@dataclass(frozen=True)
class Scores:
    """Tokens of a corpus and their log-probabilities, in the corpus's order.

    Attributes:
        tokens: int64 [N].
        lprobs: natural logarithms, float32 [N].
        lines: int64 [lines + 1]: line i is ``tokens[lines[i] : lines[i + 1]]``.
    """

    tokens: np.ndarray
    lprobs: np.ndarray
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Scoring:
    """How a corpus is scored.

    Attributes:
        tokens_per_sample: tokens L of a block, or of a segment where there is memory.
        break_mode: where blocks end.
        context_window: W: blocks have L − W tokens, each with up to W tokens before it as context.
        token_by_token: one token at a time, as in generation; needs a model with a cache.
        batch_size: rows; with memory, rows of the corpus side by side.
        max_tokens: most tokens in a batch (default without *batch_size*: 36,000; with memory: one row).
        multiple: without memory, batches of this many rows or more are cut to a multiple of it.
        softmax_batch: most tokens whose output distribution exists at once.
        skip_too_long: leave out blocks that are longer than the model's positions.
        add_bos_token: each block begins with ``<s>``, whose own probability is not reported.
    """

    tokens_per_sample: int
    break_mode: str = "none"
    context_window: int = 0
    token_by_token: bool = False
    batch_size: int | None = None
    max_tokens: int | None = None
    multiple: int = 1
    softmax_batch: int | None = None
    skip_too_long: bool = False
    add_bos_token: bool = False


class Scorer:
    """Scores corpora with one model, or with the average of several models' probabilities.

    * *Non-overlapping*: every block by itself. A model with memory reads segments in order, in one row or in several
      rows of contiguous parts of the corpus, and remembers.
    * *Context window*: a block's first tokens too have context, which is read but not scored again.
    * *Token by token*: a segment's tokens one after the other through the key-value cache, one token's work per token.
      The attended span grows from M to M + L and falls back, so with as many rows the numbers are those of
      non-overlapping inference, to rounding. A token's hidden state depends on the tokens before it alone, so that
      embeddings may be looked up, and hidden states turned into probabilities, for many tokens at once: the numbers
      are the same.

    Every token is scored once; with ``break_mode`` ``complete_doc``, blank lines are in no block and not scored.

    Args:
        models: over one dictionary; they are moved to *device*.
        dictionary: of the models and the corpora.
        scoring: how.
        precision: of the forward pass (default: float32), to which weights are cast once; softmax and logarithms are
            float32 in any.
        device: of the models.
        int8: round the weights of matrices to int8, one scale an output.

    Attributes:
        models: the models that are evaluated, of that precision.

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
    ) -> None:
        self.dictionary = dictionary
        self.scoring = scoring
        self.precision = precision or Precision()
        self.device = torch.device(device)
        for model in models:
            _check(scoring, model)
            self.precision.place(model.eval(), self.device)
        self.readers = [Reader(model, self.precision.dtype, int8=int8) for model in models]
        self.models: list[BaseFairseqModel] = [reader.model for reader in self.readers]

    @torch.inference_mode()
    def score(self, corpus: Corpus, progress: Progress | None = None) -> Scores:
        """The log-probability of every token of *corpus*.

        Raises:
            UserError: a block is longer than a model's positions or than ``max_tokens``, or none is left.
        """
        blocks = self._blocks(corpus)
        progress = progress or (lambda items, length: items)
        total: np.ndarray | None = None
        for reader in self.readers:
            model = reader.model
            collector = _Collector(model, len(corpus.tokens), self.scoring.softmax_batch, self.device)
            with self.precision.autocast(self.device):
                if model.memory_length:
                    self._read_streams(reader, blocks, collector, progress)
                else:
                    self._read_blocks(model, blocks, collector, progress)
                lprobs = collector.result()
            total = lprobs if total is None else np.logaddexp(total, lprobs)
        assert total is not None
        if len(self.models) > 1:
            total = total - np.float32(np.log(len(self.models)))
        return _in_order(corpus, blocks, total)

    def _blocks(self, corpus: Corpus) -> TokenBlocks:
        """The blocks that are scored."""
        scoring, dictionary = self.scoring, self.dictionary
        window = 0 if scoring.token_by_token else scoring.context_window
        blocks = TokenBlocks(
            corpus,
            scoring.tokens_per_sample - window,
            scoring.break_mode,
            pad=dictionary.pad(),
            eos=dictionary.eos(),
            bos=dictionary.begin() if scoring.add_bos_token else None,
        )
        limits = [limit for model in self.models if (limit := model.max_positions()) is not None]
        longest = min(limits, default=np.iinfo(np.int32).max) - window
        keep = blocks.sizes <= longest
        if not keep.all():
            if not scoring.skip_too_long:
                raise UserError(
                    f"--tokens-per-sample, --sample-break-mode: {int((~keep).sum())} blocks are longer than the "
                    f"model's {longest} positions; --skip-invalid-size-inputs-valid-test leaves them out"
                )
            blocks = blocks.select(keep)
        if len(blocks) == 0:
            raise UserError(f"--tokens-per-sample {scoring.tokens_per_sample}: no block of the corpus is left to score")
        return blocks

    def _read_blocks(
        self, model: BaseFairseqModel, blocks: TokenBlocks, collector: _Collector, progress: Progress
    ) -> None:
        """Blocks that have nothing to do with one another."""
        scoring = self.scoring
        lengths = blocks.sizes + np.minimum(blocks.starts, scoring.context_window).astype(np.int32)
        max_tokens = scoring.max_tokens
        if max_tokens is None and scoring.batch_size is None:
            max_tokens = max(DEFAULT_MAX_TOKENS, int(lengths.max()))
        sampler = BlockSampler(
            lengths,
            max_tokens=max_tokens,
            batch_size=scoring.batch_size,
            multiple=scoring.multiple,
            seed=1,
            curriculum=0,
            shuffle=False,
            by_size=scoring.break_mode != "none",
        )
        for indices in progress(sampler.epoch(1), len(sampler)):
            sample = blocks.batch(indices, scoring.context_window)
            net_output = model(self._to_device(sample["net_input"]["src_tokens"]))
            collector.add(net_output, sample["target"], *_places(blocks, indices, scoring.context_window))

    def _read_streams(self, reader: Reader, blocks: TokenBlocks, collector: _Collector, progress: Progress) -> None:
        """Segments in rows, each row with the memory of what it has read."""
        scoring = self.scoring
        rows = 1
        if scoring.batch_size is not None or scoring.max_tokens is not None:
            rows = rows_per_batch(scoring.max_tokens, scoring.batch_size, scoring.tokens_per_sample)
        sampler = StreamSampler(len(blocks), rows)
        memory: Memory | KeyValueCache | None = None
        for indices in progress(sampler.epoch(1), len(sampler)):
            sample = blocks.batch(indices)
            tokens = self._to_device(sample["net_input"]["src_tokens"])
            if hasattr(reader.model, "new_cache"):
                net_output, memory = self._read_with_cache(reader, tokens, memory, len(sampler))
            else:
                net_output = reader.model(tokens, memory=keep_rows(memory, len(indices)))  # type: ignore[arg-type]
                memory = net_output[1]["memory"]
            collector.add(net_output, sample["target"], *_places(blocks, indices))

    def _read_with_cache(
        self, reader: Reader, tokens: Tensor, cache: Any, segments: int
    ) -> tuple[tuple[Tensor, Any], KeyValueCache]:
        """One of *segments* segments, its tokens at once or one at a time."""
        if cache is None:
            cache = reader.new_cache(tokens.size(0), segments * self.scoring.tokens_per_sample)
        else:
            cache.keep_rows(tokens.size(0))
            cache.next_segment()
        read = reader.read_each if self.scoring.token_by_token else reader.read
        return (read(tokens, cache), {}), cache

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


class _Collector:
    """Turns hidden states into log-probabilities of targets, some hundreds at a time, and puts them in order."""

    def __init__(self, model: BaseFairseqModel, size: int, chunk: int | None, device: torch.device) -> None:
        self.model = model
        self.layer = getattr(model, "output_layer", None)
        self.chunk = chunk
        together = TOGETHER.get(device.type, 512)
        self.together = min(together, chunk or together)
        self.lprobs = np.full(size, np.nan, dtype=np.float32)
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.rows = 0
        self.done: list[Tensor] = []
        self.places: list[np.ndarray] = []

    def add(self, net_output: Any, target: Tensor, index: Tensor | None, places: np.ndarray) -> None:
        """Take a batch.

        Args:
            net_output: the model's, [B, T, …].
            target: [B, T], on the CPU.
            index: which of the B·T targets count; None: all.
            places: where those are in the corpus.
        """
        self.places.append(places)
        target = target.flatten()
        if index is not None:
            target = target[index]
        if not isinstance(self.layer, OutputLayer):
            lprobs = self.model.get_normalized_probs(net_output, log_probs=True).flatten(0, -2)
            lprobs = lprobs if index is None else lprobs[index.to(lprobs.device)]
            self.done.append(lprobs.gather(-1, target.to(lprobs.device)[:, None]).squeeze(-1).float())
            return
        hidden = net_output[0].flatten(0, -2)
        if index is not None:
            hidden = hidden[index.to(hidden.device)]
        self.waiting.append((hidden, target))
        self.rows += len(target)
        if self.rows >= self.together:
            self._flush()

    def result(self) -> np.ndarray:
        """Log-probabilities float32 [N] in the corpus's order, not a number where there was no target."""
        self._flush()
        self.lprobs[np.concatenate(self.places)] = torch.cat(self.done).cpu().numpy()
        return self.lprobs

    def _flush(self) -> None:
        if self.waiting:
            hidden, target = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
            self.done.append(self.layer.target_log_probs(hidden, target, self.chunk))  # type: ignore[union-attr]
            self.waiting, self.rows = [], 0


def _check(scoring: Scoring, model: BaseFairseqModel) -> None:
    """Refuse what contradicts itself or the model."""
    length, window = scoring.tokens_per_sample, scoring.context_window
    if window >= length:
        raise UserError(f"--context-window {window}: must be less than the {length} of --tokens-per-sample")
    if scoring.token_by_token:
        if not model.memory_length or not hasattr(model, "new_cache"):
            raise UserError(
                "--sliding-inf 1: the model has no memory (--tokens-from-prev, --mem-len); leave it out, or use "
                "--context-window"
            )
        if window not in (0, length - 1):
            raise UserError(
                f"--context-window {window}: with --sliding-inf 1 it is {length - 1}, one less than the tokens per "
                "sample, or left out"
            )
    elif model.memory_length and window:
        raise UserError(
            f"--context-window {window}: a model with memory has that as context; leave it out, or add --sliding-inf 1"
        )
    if scoring.add_bos_token and (window or model.memory_length):
        what = "--context-window" if window else "a model with memory"
        raise UserError(f"--add-bos-token: begins every block anew, which {what} does not; leave one of them out")
    if model.memory_length and scoring.break_mode != "none":
        raise UserError(f"--sample-break-mode {scoring.break_mode}: a model with memory reads streams; use none")


def _places(blocks: TokenBlocks, indices: np.ndarray, context: int = 0) -> tuple[Tensor | None, np.ndarray]:
    """Which targets of ``blocks.batch(indices, context)`` count (None: all), and where they are in the corpus."""
    starts, sizes = blocks.starts[indices], blocks.sizes[indices]
    before = np.minimum(starts, context) + (blocks.bos is not None)
    column = np.arange(int((before + sizes).max()))
    inside = (column >= before[:, None]) & (column < (before + sizes)[:, None])
    places = (starts - before)[:, None] + column
    if inside.all():
        return None, places.ravel()
    return torch.from_numpy(np.flatnonzero(inside)), places[inside]


def _in_order(corpus: Corpus, blocks: TokenBlocks, lprobs: np.ndarray) -> Scores:
    """The scored tokens of *corpus*, in its lines."""
    tokens = np.asarray(corpus.tokens).astype(np.int64)
    lines = np.asarray(corpus.offsets, dtype=np.int64)
    if int(blocks.sizes.sum(dtype=np.int64)) == len(tokens):
        return Scores(tokens, lprobs, lines)
    steps = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(steps, blocks.starts, 1)
    np.add.at(steps, blocks.starts + blocks.sizes, -1)
    scored = np.cumsum(steps[:-1]) > 0
    before = np.concatenate([[0], np.cumsum(scored)])
    return Scores(tokens[scored], lprobs[scored], before[lines])
