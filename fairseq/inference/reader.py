"""Models that read for inference: weights cast once, single tokens computed by kernels in C, rows
of tokens through the key-value cache.

At one token a step, calling a hundred small operators costs several times what reading the weights
does: on CPUs kernels in C read one token through the whole model in one call. They are compiled at
first use and cached; without a compiler torch's operators run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.inference.kernels import PackedModel, decoding_kernels, dequantized, packable
from fairseq.models.base import BaseFairseqModel
from fairseq.models.decoder import DecoderModel
from fairseq.models.language_model import language_model
from fairseq.modules.memory import KeyValueCache

M = TypeVar("M", bound=BaseFairseqModel)


class Reader:
    """A model for inference; its weights must not change meanwhile.

    On CPUs, compiled kernels compute single tokens of supported models; everything else runs the
    modules of the model. Both share one cache.

    Args:
        model: in evaluation mode, on its device.
        dtype: type of matrices and caches, bfloat16 or float16; None: unchanged. Norms, softmax and
            log-probabilities are always float32.
        int8: round matrices to int8 with one scale an output; the kernels read int8.
        kernels: use the compiled kernels.
        begin: id that stands before every row of text in training (``--add-bos-token``), for
            :class:`Rows` to put there; None: nothing does.

    Attributes:
        module: the model with cast weights; *model* itself if nothing was cast.
        model: *module* as what is used of it.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        dtype: torch.dtype | None = None,
        *,
        int8: bool = False,
        kernels: bool = True,
        begin: int | None = None,
    ) -> None:
        self.dtype, self.int8, self.kernels, self.begin = dtype, int8, kernels, begin
        self.module: BaseFairseqModel = inference_copy(model, dtype, int8) if dtype is not None or int8 else model
        self.model = language_model(self.module)
        self.device = next(model.parameters(), torch.empty(0)).device
        if int8:
            # From the original, which is not kept: values rounded twice would differ.
            self.packed = self._packed_with(model)

    @functools.cached_property
    def packed(self) -> PackedModel | None:
        """The model packed for the kernels; None if they do not support it."""
        return self._packed_with(self.module)

    def _packed_with(self, source: BaseFairseqModel) -> PackedModel | None:
        """The model packed for the kernels, with the matrices of *source*."""
        if not self.kernels or self.device.type != "cpu" or not packable(self.module):
            return None
        library = decoding_kernels()
        if library is None:
            return None
        assert isinstance(self.module, DecoderModel) and isinstance(source, DecoderModel)
        # The packed weights serve later calls, too, which need not be in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return PackedModel(library, self.module, source, int8=self.int8)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which :attr:`model` is called."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def new_cache(self, rows: int, longest: int | None = None) -> KeyValueCache:
        """Return an empty cache; see ``new_cache`` of the models."""
        with self.autocast():
            return self.model.new_cache(rows, longest)

    def read(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Hidden states of *tokens* [B, T], which continue *cache* and are appended to it:
        [B, T, C]."""
        # Several tokens at once fill the matrix products of torch, which are then faster.
        if tokens.size(1) == 1 and self.packed is not None:
            return self.packed.read(self.packed.embed(tokens, cache), cache)
        with self.autocast():
            return self.model(tokens, cache=cache)[0]

    def read_each(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Like :meth:`read`, one token at a time, with one embedding lookup for all."""
        with self.autocast():
            embedded = self.model.embed(tokens, cache)
            if self.packed is not None:
                states = self.packed.read(embedded.float(), cache)
                return states if self.dtype is not None else states.to(embedded.dtype)
            hidden = [
                self.model(tokens[:, i : i + 1], cache=cache, embedded=embedded[:, i : i + 1])[0]
                for i in range(tokens.size(1))
            ]
        return torch.cat(hidden, dim=1)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words after hidden states [B, C]: [B, V], float32."""
        if self.packed is not None:
            return self.packed.log_probs(hidden)
        with self.autocast():
            return self.model.output_layer.log_probs(hidden)

    def best(self, hidden: Tensor, count: int, forbidden: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The *count* most probable words that are not *forbidden*, in falling order.

        Returns:
            Log-probabilities up to a constant a row, float32, and words: both [B, count].
        """
        if self.packed is not None:
            return self.packed.best(hidden, count, forbidden)
        lprobs = self.log_probs(hidden)
        lprobs[:, list(forbidden)] = -torch.inf
        return lprobs.topk(min(count, lprobs.size(-1)))


def inference_copy(model: M, dtype: torch.dtype | None, int8: bool = False) -> M:
    """*model* with matrices rounded to int8 and then cast to *dtype*;
    norms are kept, *model* is not modified."""
    # By name as well: apex's layer norm is no subclass of torch's.
    normed = {
        id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) or "Norm" in type(m).__name__
        for p in m.parameters(recurse=False)
    }  # fmt: skip
    biases = ("r_w_bias", "r_r_bias", "r_bias")  # two-dimensional: one row for each head
    linear = {id(p) for name, p in model.named_parameters() if p.dim() == 2 and name.rsplit(".", 1)[-1] not in biases}
    # Parameters that deepcopy takes from its memo:
    # tied ones stay tied, and the originals are not copied first.
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        value = parameter.detach()
        if int8 and id(parameter) in linear:
            value = dequantized(value)
        if dtype is not None and id(parameter) not in normed:
            value = value.to(dtype)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    return copy.deepcopy(model, memo).eval()


class Rows:
    """Rows of tokens that a model reads through its cache:
    segment after segment, or window after window.

    A model with memory reads each token once, at a constant cost. A model without memory has a
    window of positions; when it is full, its second half is read again as the start of the next
    window. Every window begins with the reader's ``begin``, as every row does in training.

    Args:
        reader: reads the tokens.
        rows: number of rows B.
        longest: most tokens that will be read of a row; None: no limit.
    """

    def __init__(self, reader: Reader, rows: int, longest: int | None = None) -> None:
        self.reader, self.count = reader, rows
        self.cache = reader.new_cache(rows, longest)
        self.window: Tensor | None = None
        if not reader.model.memory_length:
            self.window = torch.zeros(rows, self.cache.segment_length, dtype=torch.long, device=reader.device)
        # A window of one position would have no room for text beside it.
        self.begin = reader.begin if self.cache.segment_length > 1 else None

    def read(self, tokens: Tensor) -> Tensor:
        """Hidden states of *tokens* [B, T], which continue the rows, after a first ``begin``:
        [B, T, C]."""
        parts: list[Tensor] = []
        if self.cache.length == 0:
            tokens = self._begun(tokens)
        while tokens.size(1):
            again = 0
            if self.cache.room == 0:
                new, tokens = tokens.size(1), self._make_room(tokens)
                again = tokens.size(1) - new
            piece, tokens = tokens[:, : self.cache.room], tokens[:, self.cache.room :]
            if self.window is not None:
                start = self.cache.in_segment
                # The tokens of the window are needed once more when it is full.
                self.window[:, start : start + piece.size(1)] = piece
            # Without what was read again: its states were returned before.
            parts.append(self.reader.read(piece, self.cache)[:, again:])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def select_rows(self, parents: Sequence[int]) -> None:
        """Make row ``parents[i]`` the new row i; rows may be dropped and repeated."""
        if [*parents] == [*range(self.count)]:
            return
        self.count = len(parents)
        self.cache.select_rows(parents)
        if self.window is not None:
            self.window = self.window[torch.tensor(parents, device=self.window.device)]

    def _make_room(self, tokens: Tensor) -> Tensor:
        """Begin a new segment or window; return *tokens*
        [B, T] preceded by the tokens to read again."""
        if self.window is None:
            self.cache.next_segment()
            return tokens
        self.cache.clear()
        length = self.window.size(1)
        # A half: with less, tokens after it would have little context; with more, most would be
        # read several times.
        again = (length - (self.begin is not None)) // 2
        return self._begun(torch.cat([self.window[:, length - again :], tokens], dim=1))

    def _begun(self, tokens: Tensor) -> Tensor:
        """*tokens* [B, T] after the symbol that rows begin with."""
        return tokens if self.begin is None else F.pad(tokens, (1, 0), value=self.begin)


class Predictor:
    """Models that read the same rows of tokens, each through a cache of its own.

    Args:
        readers: on one device, over one dictionary.
        rows: number of rows.
        forbidden: tokens that get probability zero.
        longest: most tokens that will be read of a row (default: no limit); limits the memory's
            allocation.
    """

    def __init__(
        self, readers: Sequence[Reader], rows: int, forbidden: Sequence[int] = (), longest: int | None = None
    ) -> None:
        self.rows = [Rows(reader, rows, longest) for reader in readers]
        self.device = readers[0].device
        self.forbidden = list(forbidden)
        self.is_checked = False

    def read(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Hidden states of *tokens* [rows, T] by each model: [rows, T, C], at the start of rows
        that begin with ``<s>`` one more."""
        source = torch.tensor(tokens, dtype=torch.long, device=self.device)
        return [rows.read(source) for rows in self.rows]

    def log_probs(self, hidden: Sequence[Tensor]) -> Tensor:
        """Log-probabilities of all words after the *hidden* states [B, C] of each model: [B, V],
        float32."""
        pairs = zip(self.rows, hidden, strict=True)
        lprobs = self._mean([rows.reader.log_probs(states) for rows, states in pairs])
        lprobs[:, self.forbidden] = -torch.inf
        return lprobs

    def best(self, hidden: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
        """The *count* most probable words in falling order.

        Returns:
            Log-probabilities up to a constant for each row, float32, and words: both [B, count],
            with fewer columns if the dictionary is smaller.
        """
        if len(hidden) > 1:
            lprobs = self.log_probs(hidden)
            return lprobs.topk(min(count, lprobs.size(-1)))
        scores, words = self.rows[0].reader.best(hidden[0], count, self.forbidden)
        return self._mean([scores]), words

    def target_log_probs(self, hidden: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of *targets* [B, T] after *hidden* states [B, T, C]."""
        words = torch.tensor(targets, dtype=torch.long, device=self.device)
        of_models = []
        for rows, states in zip(self.rows, hidden, strict=True):
            with rows.reader.autocast():
                layer = rows.reader.model.output_layer
                of_models.append(layer.target_log_probs(states.flatten(0, 1), words.flatten()).float())
        lprobs: list[list[float]] = self._mean(of_models).view_as(words).tolist()
        return lprobs

    def select_rows(self, parents: Sequence[int]) -> None:
        """Make row ``parents[i]`` the new row i; rows may be dropped and repeated."""
        for rows in self.rows:
            rows.select_rows(parents)

    def _mean(self, of_models: Sequence[Tensor]) -> Tensor:
        """The mean of probabilities, as in fairseq's ensembles, not of their logarithms.

        Raises:
            UserError: a model's probabilities are NaN.
        """
        lprobs = of_models[0]
        if len(of_models) > 1:
            lprobs = torch.stack([*of_models]).logsumexp(0) - math.log(len(of_models))
        # Only once: reading a value synchronises with the GPU, and NaN weights give NaN at the
        # first token.
        if not self.is_checked and bool(lprobs.isnan().any()):
            raise UserError(
                "the model's probabilities are NaN: its training diverged, or it exceeds the range of float16; "
                "use bfloat16 or float32"
            )
        self.is_checked = True
        return lprobs


def reach(model: BaseFairseqModel | Reader) -> int:
    """The longest distance, in tokens, that the model attends over, the current token included."""
    used = model.model if isinstance(model, Reader) else language_model(model)
    # A cache knows how long a segment is; one row and one token make it small.
    return used.new_cache(1, 1).segment_length + used.memory_length
