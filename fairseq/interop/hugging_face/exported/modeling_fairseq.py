# From fairseq-short. MIT License, Copyright (c) the fairseq-short authors.
"""Language models of fairseq-short for transformers: what is common to all families of decoders.

Without a cache, each row is one segment. With one, as in ``generate``, rows are read in segments of
the training's length: a model with memory attends to the last tokens of the segments before, and a
model without memory reads the second half of its full window again. Padding is not read, on
whichever side of a row it stands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.versions import require_version

require_version("transformers>=4.51")

SPARE = 128  # entries of a cache that are made beyond those needed


class FairseqConfig(PretrainedConfig):
    """Settings of a model.

    Attributes:
        settings: those of fairseq-short, by their names there.
        padding_idx: id of the padding symbol, after which positions are numbered; -1: none.
        segment_length, memory_length: tokens of a segment and of the memory before it, with a
            cache.
    """

    model_type = "fairseq_lm"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        settings: dict[str, Any] | None = None,
        vocab_size: int = 0,
        padding_idx: int = -1,
        segment_length: int = 0,
        memory_length: int = 0,
        **kwargs: Any,
    ) -> None:
        # No parameter has two names: what input and output share is read from the embeddings.
        super().__init__(**{**kwargs, "tie_word_embeddings": False})
        self.settings, self.vocab_size, self.padding_idx = settings or {}, vocab_size, padding_idx
        self.segment_length, self.memory_length = segment_length, memory_length


class SegmentCache(Cache):
    """Keys and values of the tokens of each row, in their order; rows differ in length.

    Entries behind the last token of a row are arbitrary: no query reads them, and the next token
    replaces them.

    Attributes:
        entries: by name, [B, S, …]: keys, values, and tokens, for the next window and for notes.
        constants: what a decoder computes from its weights once.
        lengths, starts: entries of each row, and those before its segment: [B].
        before: the last inputs of a decoder's token shift.
        queries, keys: positions in memory and segment, of the tokens that are read [B, T] and of
            all entries [B, S].
        taken: how many of the tokens that are read belong to each row: [B].
    """

    def __init__(self, rows: int, segment: int, memory: int, device: torch.device) -> None:
        # In place of the constructor of transformers' caches, which differs by version.
        self.layers: list[Any] = []
        self.layer_class_to_replicate, self.offloading = None, False
        self.segment, self.memory = segment, memory
        self.entries: dict[str, Tensor] = {}
        self.constants: dict[str, Any] = {}
        self.lengths = self.starts = torch.zeros(rows, dtype=torch.long, device=device)
        self.before: Tensor | None = None
        self.columns = 0  # that were read, with padding

    @property
    def room(self) -> Tensor:
        """Tokens for which each row's segment has room."""
        return self.segment - (self.lengths - self.starts)

    def begin(self, taken: Tensor, count: int) -> None:
        """Prepare for *count* columns, of which the first *taken* [B] belong to each row."""
        first = (self.starts - self.memory).clamp(min=0)[:, None]
        self.taken, self.size = taken, int(self.lengths.max()) + count
        self.slots = self.lengths[:, None] + torch.arange(count, device=taken.device)
        self.queries = self.slots - first
        self.keys = torch.arange(self.size, device=taken.device) - first

    def add(self, name: str, new: Tensor) -> Tensor:
        """Put *new* [B, T, …] behind the entries *name* of each row; return all, [B, S, …]."""
        old = self.entries.get(name, new[:, :0])
        if old.size(1) < self.size:
            more = new.new_zeros(new.size(0), self.size + SPARE - old.size(1), *new.shape[2:])
            old = torch.cat([old, more], dim=1)
        old[torch.arange(new.size(0), device=new.device)[:, None], self.slots] = new
        self.entries[name] = old
        return old[:, : self.size]

    def next_segment(self, rows: Tensor) -> None:
        """Let a segment begin in *rows* (bool [B]), after which the last entries are memory."""
        self.starts = torch.where(rows, self.lengths, self.starts)
        if self.before is not None:
            self.before = self.before.masked_fill(rows[:, None, None], 0)
        unread = max(0, int(self.starts.min()) - self.memory)
        if unread >= self.segment:
            self.entries = {name: entries[:, unread:] for name, entries in self.entries.items()}
            self.lengths, self.starts = self.lengths - unread, self.starts - unread

    def replace(self, rows: Tensor, other: SegmentCache) -> None:
        """Let *rows* [R] have read what those of *other* have."""
        for name, entries in other.entries.items():
            self.entries[name][rows, : other.size] = entries[:, : other.size]
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)
        if self.before is not None and other.before is not None:
            self.before = self.before.index_copy(0, rows, other.before)

    def __len__(self) -> int:
        return len(self.entries)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: object, **kwargs: object) -> None:
        raise ValueError("a cache with memory cannot be cropped; use greedy search, sampling or beam search")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let row *indices[i]* be row i."""
        self.entries = {name: entries[indices] for name, entries in self.entries.items()}
        self.lengths, self.starts = self.lengths[indices], self.starts[indices]
        self.before = None if self.before is None else self.before[indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))


class Matrix(nn.Module):
    """A linear map around the layers.

    It is no nn.Linear, which adapters and quantization replace: its weight may be read elsewhere,
    too.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class AdaptiveInput(nn.Module):
    """Embeddings in bands of words, each narrower than the one before (Baevski & Auli 2019, §3).

    Each band has a projection to the width *dim*; with *shares*, all have that of the first, or
    none if they have that width already.
    """

    def __init__(self, vocabulary: int, width: int, factor: float, dim: int, cutoffs: list[int], shares: bool) -> None:
        super().__init__()
        self.bounds = [0, *cutoffs, vocabulary]
        self.embeddings: Any = nn.ModuleList()
        for band, (first, last) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            narrow = int(width // factor**band)
            own = not shares or (band == 0 and width != dim)
            self.embeddings.append(
                nn.Sequential(nn.Embedding(last - first, narrow), *([Matrix(narrow, dim)] if own else []))
            )

    def weights(self, band: int) -> list[Tensor]:
        """The embeddings [words, d] of a band and, if there is one, its projection [dim, d]."""
        return [self.embeddings[band][0].weight, *(module.weight for module in self._projection(band))]

    def forward(self, tokens: Tensor) -> Tensor:
        result: Any = None
        for band, (first, last) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            embedded = self.embeddings[band][0]((tokens - first).clamp(0, last - first - 1))
            embedded = self._projection(band)(embedded)
            result = torch.where((tokens >= first)[..., None], embedded, result) if band else embedded
        return result

    def _projection(self, band: int) -> Any:
        return self.embeddings[band][1:] if len(self.embeddings[band]) > 1 else self.embeddings[0][1:]


def tokens_before(tokens: Tensor, cache: SegmentCache | None, back: int) -> Tensor:
    """The tokens [B, T] that stand *back* places before *tokens*, the last ones in *cache*; −1
    where that is before their segment."""
    if cache is None:
        return F.pad(tokens, (back, 0), value=-1)[:, : tokens.size(1)]
    before = cache.entries["tokens"].gather(1, (cache.slots - back).clamp(min=0))
    return before.where(cache.slots - back >= cache.starts[:, None], -1)


class Notes(nn.Module):
    """Vectors for 64-bit keys: rows of a table that keys share by a hash. Row 0 is for tokens
    without a note."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1 + rows, dim, padding_idx=0)

    def notes(self, keys: Tensor, has_note: Tensor) -> Tensor:
        # 2^64 divided by the golden ratio, as a signed number (Knuth 1998, section 6.4).
        rows = 1 + ((keys * -7046029254386353131 >> 32) & 0xFFFFFFFF) % (self.table.num_embeddings - 1)
        return self.table(rows.where(has_note, 0))


class NGramNotes(Notes):
    """A note for each pair of successive tokens of a segment, padding left out."""

    def __init__(self, rows: int, dim: int, config: FairseqConfig) -> None:
        super().__init__(rows, dim)
        self.vocabulary, self.padding_idx = config.vocab_size, config.padding_idx

    def forward(self, tokens: Tensor, cache: SegmentCache | None) -> Tensor:
        """The notes [B, T, C] of *tokens* [B, T], the last ones in *cache*."""
        before = tokens_before(tokens, cache, 1)
        is_pair = (before >= 0) & (before != self.padding_idx) & (tokens != self.padding_idx)
        return self.notes(before * self.vocabulary + tokens, is_pair)


class WordNotes(Notes):
    """A note for the word so far, from its first token, or the seventh before this one.

    ``parts`` says what symbols are to words, as bits: 1 continues one, 2 is continued, 4 neither.
    """

    parts: Tensor

    def __init__(self, rows: int, dim: int, config: FairseqConfig) -> None:
        super().__init__(rows, dim)
        self.register_buffer("parts", torch.zeros(config.vocab_size, dtype=torch.uint8))

    def forward(self, tokens: Tensor, cache: SegmentCache | None) -> Tensor:
        """The notes [B, T, C] of *tokens* [B, T], the last ones in *cache*."""
        key = after = tokens
        inside, has_note, multiplier = torch.ones_like(tokens, dtype=torch.bool), None, 1
        for back in range(1, 8):
            before = tokens_before(tokens, cache, back)
            inside = inside & self._joined(before, after)
            has_note = inside if has_note is None else has_note
            multiplier = multiplier * 6364136223846793005 % 2**62  # (Knuth 1997, section 3.3.4)
            key = key + torch.where(inside, (before + 1) * multiplier, 0)
            after = before
        return self.notes(key, has_note)  # type: ignore[arg-type]

    def _joined(self, before: Tensor, after: Tensor) -> Tensor:
        of_before, of_after = (self.parts[x.clamp(min=0)].where(x >= 0, 4) for x in (before, after))
        continues = (of_after & 1 > 0) & (of_before & 4 == 0)
        return continues | (of_before & 2 > 0) & (of_after & 4 == 0)


class FairseqPreTrainedModel(PreTrainedModel):
    """A decoder, of the class *decoder_class* that a family's file names.

    A decoder has ``embed_tokens`` and, if they are not None, ``ngram_notes`` and ``word_notes``;
    ``forward(embedded, tokens, cache, states, attentions, eager)``, which returns hidden states for
    the output layer, and adds the layers' inputs and these to *states* and weights to *attentions*,
    if they are lists; ``log_probs(hidden)``; ``begin(cache)`` for a new cache; and ``width``, the
    channels of its hidden states.
    """

    config_class = FairseqConfig
    decoder_class: Any
    _no_split_modules = ["Layer"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _is_stateful = True  # a cache cannot be cropped: there is no assisted generation

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.decoder = self.decoder_class(config)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | Matrix):
            nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generation takes the cache that `forward` returns

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError("resize_token_embeddings: output layers here have the vocabulary of their training")

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: object = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states for the arguments of :meth:`FairseqForCausalLM.forward`, and what else they
        ask for."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is None and (self.decoder.ngram_notes, self.decoder.word_notes) != (None, None):
            raise ValueError("inputs_embeds: notes of pairs and words are found by tokens; give input_ids")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask {list(attention_mask.shape)}: give the padding alone, [B, T]")
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        cache = self._cache(past_key_values, len(given)) if use_cache or past_key_values is not None else None
        for name, asked in (("inputs_embeds", inputs_embeds is not None), ("output_attentions", with_weights)):
            if asked and cache is not None:
                raise ValueError(f"{name}: not with a cache; give use_cache=False")
        # Attention is causal: tokens that stand before all padding of their row do not see it.
        columns, order = given.size(1), None
        if attention_mask is not None:
            real = (attention_mask[:, -columns:] != 0).long()
            order = (torch.arange(columns, device=real.device) + columns * (1 - real)).argsort(1)
            given = _in_order(given, order)
        states: list[Tensor] = []
        weights: list[Tensor] = []
        if cache is None:
            embedded = given if input_ids is None else self.decoder.embed_tokens(given)
            tokens = None if input_ids is None else given
            lists = states if with_states else None, weights if with_weights else None
            eager = getattr(self.config, "_attn_implementation", None) == "eager"
            hidden = self.decoder(embedded, tokens, None, *lists, eager)
            states = states or [hidden]
        else:
            counts = torch.full_like(given[:, 0], columns) if attention_mask is None else real.sum(1)
            states = self._read_on(given, counts, cache, bool(with_states))
            cache.columns += columns
        if order is not None:
            back = order.argsort(1)
            states = [_in_order(state, back) for state in states]
            weights = [_attention_in_order(layer, back) for layer in weights]
        return BaseModelOutputWithPast(
            states[-1], cache, tuple(states) if with_states else None, tuple(weights) if with_weights else None
        )

    def _cache(self, given: Any, rows: int) -> SegmentCache:
        """The cache to read with: a new one for None, and for an empty one of transformers."""
        if isinstance(given, SegmentCache):
            return given
        if given is not None and given.get_seq_length():
            raise ValueError(f"past_key_values {type(given).__name__}: expected what this model returned")
        cache = SegmentCache(rows, self.config.segment_length, self.config.memory_length, self.device)
        self.decoder.begin(cache)
        return cache

    def _read_on(self, tokens: Tensor, counts: Tensor, cache: SegmentCache, with_states: bool) -> list[Tensor]:
        """Hidden states of the first *counts* [B] of *tokens* [B, T], which continue *cache*, and
        before them the layers' inputs."""
        done = torch.zeros_like(counts)
        states: list[Tensor] = []
        while bool((done < counts).any()):
            full = (done < counts) & (cache.room == 0)
            if bool(full.any()):
                self._make_room(cache, full)
            taken = torch.minimum(counts - done, cache.room)
            columns = done[:, None] + torch.arange(int(taken.max()), device=tokens.device)
            piece = tokens.gather(1, columns.clamp(max=tokens.size(1) - 1))
            read = self._read_piece(piece, taken, cache, with_states)
            states = states or [state.new_zeros(*tokens.shape, state.size(2)) for state in read]
            rows, places = (columns < (done + taken)[:, None]).nonzero(as_tuple=True)
            for state, part in zip(states, read, strict=True):
                state[rows, columns[rows, places]] = part[rows, places]
            done = done + taken
        return states

    def _read_piece(self, tokens: Tensor, taken: Tensor, cache: SegmentCache, with_states: bool) -> list[Tensor]:
        """The same for *tokens* [B, T], for the first *taken* [B] of which segments have room."""
        cache.begin(taken, tokens.size(1))
        cache.add("tokens", tokens)
        states: list[Tensor] = []
        hidden = self.decoder(self.decoder.embed_tokens(tokens), tokens, cache, states if with_states else None)
        cache.lengths = cache.lengths + taken
        return states or [hidden]

    def _make_room(self, cache: SegmentCache, full: Tensor) -> None:
        """Begin a segment in the rows *full* (bool [B]); without memory, a window with the second
        half of the last one."""
        if cache.memory:
            cache.next_segment(full)
            return
        rows, half = full.nonzero()[:, 0], cache.segment // 2
        window = self._cache(None, len(rows))
        tokens = cache.entries["tokens"][rows, cache.segment - half : cache.segment]
        self._read_piece(tokens, torch.full_like(rows, half), window, with_states=False)
        cache.replace(rows, window)

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        as_object = self.config.return_dict if return_dict is None else return_dict
        return output if as_object else output.to_tuple()


class FairseqModel(FairseqPreTrainedModel):
    """The hidden states that the output layer reads."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states; see :meth:`FairseqForCausalLM.forward`."""
        asked = (past_key_values, use_cache, inputs_embeds, output_hidden_states, output_attentions)
        return self._returned(self.read(input_ids, attention_mask, *asked), return_dict)


class FairseqForCausalLM(FairseqPreTrainedModel, GenerationMixin):
    """A language model."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Log-probabilities of the next token, as logits: an adaptive softmax has no others.

        Args:
            input_ids: [B, T]; with *past_key_values*, those that follow what it holds.
            attention_mask: 0 at padding: [B, T] or more columns, of which the last T count.
            past_key_values: what an earlier call returned; it is changed in place.
            inputs_embeds: [B, T, E], in place of ``input_ids``; not with a cache.
            labels: targets [B, T], aligned with ``input_ids``; -100 is left out of the loss.
            use_cache: return a cache (default: if one is given).
            output_attentions: return the weights of attention [B, H, T, T]; not with a cache.
            output_hidden_states: return the inputs of the layers and what the output layer reads.
            logits_to_keep: compute logits of so many last tokens, or of these positions; 0: of all.
            kwargs: for the loss, such as ``num_items_in_batch``.
        """
        asked = (past_key_values, use_cache, inputs_embeds, output_hidden_states, output_attentions)
        read = self.read(input_ids, attention_mask, *asked)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden: Any = read.last_hidden_state
        logits, loss = self.decoder.log_probs(hidden[:, last]), None
        if labels is not None:
            # Nothing was read before the first token after padding: it has no prediction.
            if attention_mask is not None:
                padding = attention_mask[:, -labels.size(1) :] == 0
                labels = labels.masked_fill(padding.roll(1, dims=1), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss, logits, read.past_key_values, read.hidden_states, read.attentions)
        return self._returned(output, return_dict)


class FairseqForSequenceClassification(FairseqPreTrainedModel):
    """A classifier of texts: a linear map of the hidden state of the last token."""

    accepts_loss_kwargs = False  # the loss is a mean: with gradient accumulation, the caller divides it

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(self.decoder.width, config.num_labels or 2, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: object,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Scores of the classes [B, N]; without a mask, padding is ``config.pad_token_id``."""
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        read = self.read(input_ids, attention_mask, None, False, inputs_embeds, output_hidden_states, output_attentions)
        hidden: Any = read.last_hidden_state
        real = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        last = (real.long() * torch.arange(real.size(1), device=real.device)).argmax(1)
        logits, loss = self.score(hidden[torch.arange(len(hidden), device=last.device), last]), None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, logits=logits)
        output = SequenceClassifierOutputWithPast(loss, logits, None, read.hidden_states, read.attentions)
        return self._returned(output, return_dict)


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """The columns *order* [B, T] of *x* [B, T, …]."""
    return x.gather(1, order if x.dim() == 2 else order[..., None].expand(-1, -1, x.size(2)))


def _attention_in_order(weights: Tensor, order: Tensor) -> Tensor:
    """Rows and columns *order* [B, T] of *weights* [B, H, T, M + T]; the M keys of memory stay."""
    memory = weights.size(3) - order.size(1)
    first = torch.arange(memory, device=order.device).expand(len(order), -1)
    keys = torch.cat([first, order + memory], dim=1)
    rows = weights.gather(2, order[:, None, :, None].expand_as(weights))
    return rows.gather(3, keys[:, None, None].expand_as(weights))
