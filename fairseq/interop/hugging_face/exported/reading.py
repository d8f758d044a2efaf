"""How exported models read: a decoder through :class:`Rows`, and the cache that ``generate`` passes
on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fairseq.inference.reader import Rows


class DecoderReader:
    """What :class:`Rows` needs of a decoder.

    *states*: the inputs of the layers are read, too, in channels before the hidden states.
    """

    begin = None

    def __init__(self, decoder: Any, states: bool = False) -> None:
        self.model, self.states, self.device = decoder, states, next(decoder.parameters()).device

    def __deepcopy__(self, memo: object) -> DecoderReader:
        # A copy of a cache reads with the same model.
        return self

    def new_cache(self, rows: int, longest: int | None) -> Any:
        with plain_projections(layer.self_attn for layer in self.model.layers):
            return self.model.new_cache(rows, longest)

    def read(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Hidden states, and the inputs of the layers before them, of *tokens* [B, T]:
        [B, T, channels]."""
        if not self.states:
            hidden: Tensor = self.model(tokens, cache=cache)[0]
            return hidden
        with noted(self.model.layers) as calls:
            hidden = self.model(tokens, cache=cache)[0]
        return torch.cat([*(x.to(hidden.dtype) for x, _ in calls), hidden], dim=-1)

    def parts(self, read: Tensor) -> tuple[Tensor, ...]:
        """What :meth:`read` gave, one tensor for each layer, and the hidden states."""
        if not self.states:
            return (read,)
        layers = len(self.model.layers)
        width = self.model.layers[0].fc1.in_features
        return read.split([width] * layers + [read.size(-1) - width * layers], dim=-1)


@contextlib.contextmanager
def noted(modules: Any) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
    """A list to which each call of one of *modules* adds its input and its other arguments."""
    calls: list[tuple[Tensor, dict[str, object]]] = []

    def noting(forward: Any) -> Any:
        def call(x: Tensor, **kwargs: Any) -> Any:
            calls.append((x, kwargs))
            return forward(x, **kwargs)

        return call

    # In place of hooks, which a step of one token does not call.
    former = [module.__dict__.get("forward") for module in modules]
    try:
        for module in modules:
            module.forward = noting(module.forward)
        yield calls
    finally:
        for module, forward in zip(modules, former, strict=True):
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


@contextlib.contextmanager
def plain_projections(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give the attention *modules* plain linear maps where an adapter or a quantizer has put others
    in their place.

    A cache joins their weights, which others do not have or do not use alone.
    """
    slots = [(module, name) for module in modules for name in ("q_proj", "k_proj", "v_proj")]
    former = [module.get_submodule(name) for module, name in slots]
    try:
        for (module, name), projection in zip(slots, former, strict=True):
            module._modules[name] = projection if isinstance(projection, nn.Linear) else _plain(projection)
        yield
    finally:
        for (module, name), projection in zip(slots, former, strict=True):
            module._modules[name] = projection


@torch.no_grad()
def _plain(projection: Any) -> nn.Linear:
    """The linear map that *projection* is."""
    some = next(projection.parameters(), torch.zeros(()))
    plain = nn.Linear(projection.in_features, projection.out_features, dtype=some.dtype, device=some.device)
    start = projection(some.new_zeros(1, projection.in_features))
    # What it makes of the unit vectors are the columns of its weight.
    columns = projection(torch.eye(projection.in_features, dtype=some.dtype, device=some.device)) - start
    plain.weight.copy_(columns.t())
    plain.bias.copy_(start[0])
    return plain


class FairseqCache(Cache):
    """What has been read of the rows of a batch, those with equally many tokens together."""

    def __init__(self) -> None:
        # transformers' cache holds keys and values by layer; here they are in the decoder's own
        # cache, with its memory. Its constructor wants something else in every version.
        self.layers: list[Any] = []
        self.layer_class_to_replicate, self.offloading = None, False
        self.groups: list[tuple[Tensor, Rows]] = []  # positions of rows in the batch [rows], and their tokens
        self.tokens_read = 0  # columns of the batch, with padding

    def __len__(self) -> int:
        return len(self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens_read

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # without limit

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: object, **kwargs: object) -> None:
        raise ValueError("a cache with memory cannot be cropped; use greedy search, sampling or beam search")

    def read(self, reader: DecoderReader, tokens: Tensor, real: Tensor) -> Tensor:
        """What *reader* gives for *tokens* [B, T], which continue what was read; zeros where *real*
        is False."""
        # Rows of a batch differ in their padding, but the decoder's cache has one length for all of
        # its rows: rows with equally many tokens share one.
        parts, groups = [], []
        for positions, rows in self._continued(reader, real.sum(1)):
            rows.reader = reader
            count = int(real[positions[0]].sum())
            if count:
                parts.append((positions, rows.read(tokens[positions][real[positions]].view(len(positions), count))))
            groups.append((positions, rows))
        self.groups, self.tokens_read = groups, self.tokens_read + tokens.size(1)
        hidden = parts[0][1].new_zeros(*tokens.shape, parts[0][1].size(-1))
        for positions, states in parts:
            hidden[positions[:, None], real[positions].nonzero()[:, 1].view(len(positions), -1)] = states
        return hidden

    def _continued(self, reader: DecoderReader, counts: Tensor) -> Iterator[tuple[Tensor, Rows]]:
        """The groups, divided where their rows go on with different *counts* [B] of tokens."""
        groups: list[tuple[Tensor, Rows | None]] = [*self.groups]
        for positions, rows in groups or [(torch.arange(len(counts), device=counts.device), None)]:
            for count in counts[positions].unique():
                some = (counts[positions] == count).nonzero()[:, 0]
                if rows is None:
                    part = Rows(reader, len(some))
                else:
                    part = rows
                    if len(some) < len(positions):
                        # The group divides: each part continues with its own cache, cut from the
                        # same one.
                        part = copy.deepcopy(rows)
                        part.select_rows(some.tolist())
                yield positions[some], part

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make row *indices[i]* the new row i."""
        groups = []
        for positions, rows in self.groups:
            # Which new rows come from which old ones: beam search repeats some and drops others.
            new, old = (indices.to(positions.device)[:, None] == positions).nonzero(as_tuple=True)
            if len(new):
                rows.select_rows(old.tolist())
                groups.append((new, rows))
        self.groups = groups

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = sum(len(positions) for positions, _ in self.groups)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))
