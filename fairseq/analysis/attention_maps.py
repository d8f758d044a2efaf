"""Attention of a model's heads over distance, averaged over a corpus (Dai et al. 2019, Appendix D).

Distance 0 is the token at the query's own position, distance 1 the one before it; the prediction is
of the next token. With memory the corpus is read as by ``fairseq-eval-lm``, and only positions of
segments with a full memory are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.data.samplers import StreamSampler
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import SettingError, UserError
from fairseq.logging import Progress, no_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.attention import CAUSAL, AttentionMask
from fairseq.modules.devices import exact
from fairseq.modules.memory import Memory, keep_rows
from fairseq.modules.precision import Precision
from fairseq.system.files import atomic_file
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.tokenizer import readable_symbols

TERMS = ("a", "b", "c", "d")

Call = tuple[Tensor, Tensor | None, Any, AttentionMask]
"""Arguments of an attention module: x [B, T, C], memory [B, M, C] or None, positions, mask."""


@dataclass(frozen=True)
class AtPosition:
    """Attention when one token is predicted; L layers, H heads, S tokens that are attended to."""

    position: int  # index in the split of the predicted token
    weights: np.ndarray  # float32 [L, H, S], at distances 0 … S − 1
    words: list[str]  # the S tokens by distance; "" for the zeros of an initial memory
    target: str


@dataclass(frozen=True)
class AttentionMaps:
    """Mean attention over distance, and attention
    at single positions; L layers, H heads, D distances."""

    # Mean weight at each distance over all counted positions, float64 [L, H, D]; each head's row
    # sums to one.
    attention: np.ndarray
    # Share of the counted positions that have a token at this distance, float64 [D]: 1 up to the
    # length of the memory, less beyond it and in models without memory.
    reach: np.ndarray
    queries: int  # number of counted positions
    # As attention, for the softmax of one term of the score alone:
    # (a) content, (b) content-dependent position, (c) global content bias,
    # (d) global position bias (§3.3). Empty if not requested.
    terms: dict[str, np.ndarray]
    at_positions: list[AtPosition]  # in the order in which the positions were chosen

    def given_reach(self, values: np.ndarray) -> np.ndarray:
        """*values*, ``attention`` or a term, as means over only
        the positions that have a token at the distance."""
        # Where no position has a token at the distance, the mean is 0 / 0 and shown as 0.
        return values / np.maximum(self.reach, 1e-12)

    def mean_distance(self) -> np.ndarray:
        """Mean attention distance of each head in tokens: float64 [L, H]."""
        return (self.attention * np.arange(self.attention.shape[2])).sum(axis=2)

    def widest(self) -> list[tuple[int, int]]:
        """(layer, head) of the largest mean distance in the first, a middle and the last layer."""
        far = self.mean_distance()
        return [(layer, int(far[layer].argmax())) for layer in sorted({0, (len(far) - 1) // 2, len(far) - 1})]

    def save(self, path: Path) -> None:
        """Write the arrays under these names, terms
        as ``term_a`` …, to the NPZ file *path* atomically.

        Of P chosen ``positions``, ``at_position`` is [P, L, H, S] and ``words`` [P, S], padded with
        zeros and "".
        """
        terms: dict[str, Any] = {f"term_{name}": value for name, value in self.terms.items()}
        span = max(len(at.words) for at in self.at_positions)
        padded = [np.pad(at.weights, ((0, 0), (0, 0), (0, span - len(at.words)))) for at in self.at_positions]
        with atomic_file(path, "`results_path`") as file:
            np.savez(
                file,
                attention=self.attention,
                reach=self.reach,
                queries=self.queries,
                positions=np.array([at.position for at in self.at_positions]),
                at_position=np.stack(padded),
                words=np.array([at.words + [""] * (span - len(at.words)) for at in self.at_positions]),
                targets=np.array([at.target for at in self.at_positions]),
                **terms,
            )


def distances(queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """Distance from each query back to each key, the last query at the last key: int64 [T, S];
    later keys: < 0."""
    query = torch.arange(keys - queries, keys, device=device)
    return query[:, None] - torch.arange(keys, device=device)


def sum_by_distance(weights: Tensor, counted: Tensor, span: int) -> Tensor:
    """Attention weights by distance, summed over rows and counted positions.

    Shape: weights [B, H, T, S], counted bool [B, T] → float64 [H, span], span ≥ S.
    """
    # In float64: a corpus adds up millions of weights, most of them far below the sum.
    total = torch.einsum("bhts,bt->hts", exact(weights), exact(counted))
    apart = distances(total.size(1), total.size(2), total.device)
    behind = apart >= 0
    sums = total.new_zeros(total.size(0), span)
    return sums.index_add_(1, apart[behind], total[:, behind])


@contextlib.contextmanager
def record_calls(modules: Sequence[nn.Module]) -> Iterator[list[Call]]:
    """Context manager: a list to which each call of one of *modules* appends its arguments."""
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(("x", "memory", "positions", "visible"), args, strict=False)), **kwargs}
        calls.append(
            (arguments["x"], arguments.get("memory"), arguments.get("positions"), arguments.get("visible", CAUSAL))
        )

    with contextlib.ExitStack() as hooks:
        for module in modules:
            # Fused attention does not return its weights: they are computed again from what each
            # call is given.
            hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield calls


def attention_modules(model: BaseFairseqModel) -> list[Any]:
    """The attention modules of *model*, one a layer;
    UserError if they do not expose their weights."""
    layers = getattr(getattr(model, "decoder", None), "layers", [])
    modules = [getattr(layer, "self_attn", None) for layer in layers]
    if not modules or not all(hasattr(m, "weights") and hasattr(m, "num_heads") for m in modules):
        raise SettingError(f"`path`: {type(model).__name__} exposes no attention weights (self_attn.weights)")
    return modules


def has_terms(modules: Sequence[object]) -> bool:
    """Return whether the scores of these attention modules are sums of the four terms."""
    return all(hasattr(module, "terms") for module in modules)


class AttentionReader:
    """Reads a corpus with a model and accumulates the attention of its heads.

    Args:
        model: moved to *device* and put in evaluation mode.
        blocks: the corpus in segments, cut with break mode ``none``.
        rows: number of contiguous parts of the corpus read in parallel, each with its own memory.
        terms: also accumulate the terms of the scores.
        precision, device: of the forward pass; attention weights are computed from the inputs of
            the layers in it.

    Raises:
        UserError: the attention has no weights or terms,
            or the corpus does not fill the model's memory.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        blocks: TokenBlocks,
        dictionary: Dictionary,
        *,
        rows: int = 1,
        terms: bool = False,
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model.eval()
        self.blocks = blocks
        self.symbols = readable_symbols(dictionary)
        self.sampler = StreamSampler(len(blocks), rows)
        self.device = torch.device(device)
        self.precision = precision or Precision()
        self.precision.move(model, self.device)
        self.modules = attention_modules(model)
        self.terms = TERMS if terms else ()
        if terms and not has_terms(self.modules):
            raise SettingError("`terms`: needs relative attention, which the model does not have; leave it out")
        number = np.arange(len(blocks)) % len(self.sampler)  # of each block in its row
        # A segment's memory is full once as many tokens were read before it in its row.
        self.counted = np.flatnonzero(number * int(blocks.sizes[0]) >= model.memory_length)
        if not len(self.counted):
            raise UserError(self._too_few_tokens(rows))

    def _too_few_tokens(self, rows: int) -> str:
        """The error message for a corpus in which no position has a full memory."""
        ways = ["fewer rows (`batch_size`, `max_tokens`)"] if rows > 1 else []
        if hasattr(getattr(self.model.decoder, "cfg", None), "mem_len"):
            ways.append("a shorter memory (`mem_len`)")
        ways = [*ways, "more tokens (`first_tokens`)", "a longer split"]
        side_by_side = f" in {rows} rows" if rows > 1 else ""
        return (
            f"`gen_subset`: {len(self.blocks.corpus.tokens)} tokens{side_by_side} do not fill the memory of "
            f"{self.model.memory_length}; give {', '.join(ways[:-1])} or {ways[-1]}"
        )

    def choose_position(self, seed: int) -> int:
        """A position at the end of a segment, drawn at random from those with a full memory."""
        # At the end, where most tokens are visible.
        block = np.random.default_rng(seed).choice(self.counted)
        return int(self.blocks.starts[block] + self.blocks.sizes[block] - 1)

    @torch.inference_mode()
    def read(self, positions: Sequence[int], progress: Progress = no_progress) -> AttentionMaps:
        """Read the corpus; *positions*, UserError if out of range,
        are predicted tokens that are shown separately."""
        tokens = len(self.blocks.corpus.tokens)
        for position in positions:
            if not 0 <= position < tokens:
                raise SettingError(f"`positions` {position}: must be from 0 to {tokens - 1}")
        blocks = np.searchsorted(self.blocks.starts, positions, side="right") - 1  # (P,)
        sums = _Sums(self.model.memory_length + int(self.blocks.sizes[0]), len(self.modules))
        at_positions: dict[int, AtPosition] = {}
        memory: Memory | None = None
        # Weights are computed anew from the layers' inputs, in their precision.
        with record_calls(self.modules) as calls, self.precision.autocast(self.device):
            for indices in progress(self.sampler.epoch(1), len(self.sampler)):
                sample = self.blocks.batch(indices)
                calls.clear()
                memory = self._forward(sample["net_input"]["src_tokens"], keep_rows(memory, len(indices)))
                if indices[0] in self.counted:
                    sums.count(sample["target"] != self.blocks.pad, calls)
                    self._add(sums, calls)
                for position, block in zip(positions, blocks, strict=True):
                    if block in indices:
                        row = int(np.flatnonzero(indices == block)[0])
                        offset = position - int(self.blocks.starts[block])
                        at_positions[position] = self._at_position(position, calls, row, offset)
        return AttentionMaps(
            attention=sums.mean("attention"),
            reach=sums.reached.numpy() / sums.queries,
            queries=sums.queries,
            terms={name: sums.mean(name) for name in self.terms},
            at_positions=[at_positions[position] for position in positions],
        )

    def _forward(self, tokens: Tensor, memory: Memory | None) -> Memory | None:
        """Read a segment [B, T]; return the memory after it."""
        tokens = tokens.to(self.device)
        net_output = self.model(tokens) if memory is None else self.model(tokens, memory=memory)
        return net_output[1]["memory"] if self.model.memory_length else None

    def _add(self, sums: _Sums, calls: Sequence[Call]) -> None:
        """Add the attention of all layers in one segment, one layer at a time."""
        for layer, (module, call) in enumerate(zip(self.modules, calls, strict=True)):
            sums.add("attention", layer, module.weights(*call))
            if self.terms:
                terms = module.terms(*call)
                for name in self.terms:
                    term = terms[name].float()
                    bias = call[3].bias(term.size(2), term.size(3), term.device)
                    sums.add(name, layer, (term if bias is None else term + bias).softmax(-1))  # over the visible keys

    def _at_position(self, position: int, calls: Sequence[Call], row: int, offset: int) -> AtPosition:
        """The attention of all layers at one position, *row* and *offset* in a segment."""
        by_distance = []
        for module, call in zip(self.modules, calls, strict=True):
            visible = module.weights(*call)[row, :, offset]  # (H, S)
            behind = distances(call[0].size(1), visible.size(1), visible.device)[offset] >= 0
            by_distance.append(visible[:, behind].flip(1).float().cpu())
        weights = torch.stack(by_distance).numpy()
        tokens = self.blocks.corpus.tokens
        # The query is the token before the predicted one: distance 0 is position − 1.
        indices = position - 1 - np.arange(weights.shape[2])
        words = [self.symbols[int(tokens[index])] if index >= 0 else "" for index in indices]
        if len(words) > position:
            words[position] = self.symbols[int(self.blocks.eos)]  # the token before a corpus
        return AtPosition(position, weights, words, self.symbols[int(tokens[position])])


class _Sums:
    """Sums of attention by distance over the counted positions."""

    def __init__(self, span: int, layers: int) -> None:
        self.span = span
        self.layers = layers
        self.queries = 0
        self.reached = torch.zeros(span, dtype=torch.float64)
        self.counted = torch.empty(0)
        self.sums: dict[str, list[Tensor]] = {}

    def count(self, counted: Tensor, calls: Sequence[Call]) -> None:
        """Begin a new segment with its counted positions, bool [B, T]."""
        x, memory, *_ = calls[0]
        keys = x.size(1) + (0 if memory is None else memory.size(1))
        self.counted = counted.to(x.device)
        self.queries += int(counted.sum())
        # A view of one number: nothing of that size is allocated.
        every = torch.ones(1, 1, 1, 1).expand(counted.size(0), 1, counted.size(1), keys)
        self.reached += sum_by_distance(every, counted, self.span)[0]

    def add(self, name: str, layer: int, weights: Tensor) -> None:
        """Add the weights [B, H, T, S] of a layer in this segment."""
        layers = self.sums.setdefault(name, [torch.zeros(())] * self.layers)
        layers[layer] = layers[layer] + sum_by_distance(weights, self.counted, self.span)

    def mean(self, name: str) -> np.ndarray:
        """Mean of a named sum over the counted positions: float64 [L, H, D]."""
        return torch.stack(self.sums[name]).cpu().numpy() / self.queries
