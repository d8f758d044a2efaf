"""Decoders of transformers: the loop over layers,
with memory and caches, that all of them share."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.config.shared import ModelConfig
from fairseq.data.masking import special_symbols, word_parts, word_rule
from fairseq.models.base import FairseqLanguageModel
from fairseq.modules.attention import Causal, CausalInDocuments
from fairseq.modules.memory import KeyValueCache, Memory, TokenCache, extend_memory
from fairseq.modules.ngram_notes import CONTINUES, HISTORY, IS_CONTINUED, STANDS_ALONE, NGramNotes, WordNotes
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.transformer_layer import EmbeddingHook
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import ByteLevelWords
from fairseq.text.tokenizers.tokenizer import readable_symbols

logger = logging.getLogger(__name__)


class Decoder(nn.Module):
    """Embeddings, layers, and the output layer that criterions and the scorer use.

    A subclass makes the parts, in the order that fixes its initial random
    numbers and the numbering of its parameters, and defines what differs:
    embeddings, positions, and what happens around the layers.
    """

    embed_tokens: nn.Module
    embed_scale: float
    layers: nn.ModuleList

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.adaptive_softmax: OutputLayer | None = None
        self.output_projection: OutputLayer | None = None
        self.ngram_notes: NGramNotes | None = None
        self.word_notes: WordNotes | None = None

    @property
    def output_distribution(self) -> OutputLayer:
        """The distribution over words."""
        layer = self.adaptive_softmax or self.output_projection
        assert layer is not None
        return layer

    @property
    def memory_length(self) -> int:
        """Tokens of the memory, unless :meth:`forward` is told another number."""
        return self.cfg.memory_length

    @property
    def segment_length(self) -> int:
        """Tokens that a cache reads before the next segment begins."""
        raise NotImplementedError

    def max_positions(self) -> int | None:
        """The largest number of tokens in a row; None: rows have no limit."""
        return None

    def forward(
        self,
        src_tokens: Tensor,
        memory: Memory | None = None,
        cache: KeyValueCache | None = None,
        embedded: Tensor | None = None,
        infuse: EmbeddingHook | None = None,
        memory_length: int | None = None,
        document_positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states of *src_tokens*, each from the tokens up to it.

        Args:
            src_tokens: [B, T].
            memory: what the previous segment returned; None at a start.
            cache: incremental inference: *src_tokens* continue what it holds, and are added to it.
            embedded: what :meth:`embed` gives for *src_tokens*, where that is known already.
            infuse: see :meth:`embed`.
            memory_length: tokens of the new memory; None: as the settings say. A cache has its own.
            document_positions: int64 [B, T], the position of each token in its document: each is
                read as a row of its own. Without memory and cache; None: a row is one document.

        Returns:
            Hidden states [B, T, C] for the output layer, and
            ``{"memory": the new memory or None}``.
        """
        tokens = src_tokens.size(1)
        # A new token moves all positions before it: everything is read anew.
        if isinstance(cache, TokenCache):
            hidden, extra = self(cache.append(src_tokens))
            return hidden[:, -tokens:], extra
        # 0 is a length, too.
        length = self.memory_length if memory_length is None else memory_length
        past_length = cache.length if cache is not None else 0
        x = self.embed(src_tokens, cache, infuse, document_positions) if embedded is None else embedded
        if memory is None and cache is None:
            memory = self._first_memory(x, length)
        remembered = memory[0].size(1) if memory else 0
        positions = self._positions(remembered + tokens if cache is None else None)
        visible = self._visible(length)
        if document_positions is not None:
            positions = self._document_positions(positions, document_positions)
            visible = CausalInDocuments(visible.window, {}, positions=document_positions)
        keys = past_length + remembered + tokens
        keys = keys if cache is None else visible.reach(tokens, keys)  # a cache's others are left out
        visible = self.layers[0].self_attn.prepare(visible, tokens, keys, x.device)  # type: ignore
        # A cache holds the memory already, as keys and values.
        new_memory: Memory | None = [] if length and cache is None else None
        for i, layer in enumerate(self.layers):
            x = self._layer_input(i, x, src_tokens)
            old = memory[i] if memory is not None else None
            x, new = layer(
                x,
                memory=old,
                positions=positions,
                visible=visible,
                cache=cache.layers[i] if cache is not None else None,
                past_length=past_length,
                skip=self._skips_layer(),
            )
            if new_memory is not None:
                # `new` are the layer's inputs: keys and values of the memory are computed anew,
                # with the current weights.
                new_memory.append(extend_memory(old, new, length))
        if cache is not None:
            cache.advance(tokens)
        return self._output(x), {"memory": new_memory}

    @torch.no_grad()
    def new_cache(self, batch: int, longest: int | None = None) -> KeyValueCache:
        """A cache for reading *batch* rows from their start on, a segment or a token at a time.

        *longest*, the most tokens that will be read of a row,
        bounds the room that is made for memory.
        """
        # A text of 100 tokens needs no room for a memory of 1,600.
        remembered = self.memory_length if longest is None else min(self.memory_length, longest)
        length = self.segment_length + remembered
        positions = self._positions(length)
        layers = [layer.self_attn.new_cache(batch, length, positions) for layer in self.layers]  # type: ignore
        return KeyValueCache(layers, self.segment_length, remembered)

    def embed(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        infuse: EmbeddingHook | None = None,
        document_positions: Tensor | None = None,
    ) -> Tensor:
        """The first layer's input for *tokens* [B, T], which continue *cache* and are read next:
        [B, T, C].

        *infuse* is applied to the summed embeddings, before layer norm and dropout. Under autocast
        the result has the lower precision, and so has the sum of all layers.
        """
        raise NotImplementedError

    def _add_notes(
        self, x: Tensor, tokens: Tensor, cache: KeyValueCache | None, document_positions: Tensor | None = None
    ) -> Tensor:
        """*x* [B, T, C] with the notes of *tokens* [B, T], if the model has any, on the scale of
        the embeddings."""
        if self.ngram_notes is None and self.word_notes is None:
            return x
        before = cache.last_tokens if cache else None
        text = F.pad(tokens, (HISTORY, 0), value=-1) if before is None else torch.cat([before, tokens], dim=1)
        if cache is not None:
            cache.last_tokens = text[:, -HISTORY:]
        for notes in (self.ngram_notes, self.word_notes):
            if notes is not None:
                x = torch.add(x, notes(text, document_positions).to(x.dtype), alpha=self.embed_scale)
        return x

    def mark_words(self, dictionary: Dictionary) -> None:
        """Tell the notes of words, if there are any, which symbols of *dictionary* continue a word,
        as far as the tokenizer beside it or their marks show."""
        if self.word_notes is None:
            return
        continues, is_continued = word_parts(dictionary, word_rule(dictionary))
        if not (continues.any() or is_continued.any()):
            logger.warning("`word_notes` have no effect: the dictionary's symbols are whole words")
        # Punctuation is no part of a word: words before a comma would take rows of their own.
        space = ByteLevelWords.mark  # a letter
        texts = (symbol.replace(space, "") for symbol in readable_symbols(dictionary))
        letters = np.array([any(map(str.isalnum, text)) for text in texts])
        stands_alone = special_symbols(dictionary) | ~letters
        parts = np.where(stands_alone, STANDS_ALONE, CONTINUES * continues + IS_CONTINUED * is_continued)
        self.word_notes.parts.copy_(torch.from_numpy(parts.astype(np.uint8)))

    def _first_memory(self, x: Tensor, length: int) -> Memory | None:
        """The memory before the first segment, whose layers read *x* [B, T, C]."""
        return None

    def _positions(self, count: int | None) -> Any:
        """Positions of *count* keys, the last one the last query's, as attention reads them; None:
        a cache has them."""
        raise NotImplementedError

    def _document_positions(self, positions: Any, document_positions: Tensor) -> Any:
        """*positions* of a row as attention reads them, for rows of several documents."""
        raise NotImplementedError

    def _visible(self, memory_length: int) -> Causal:
        """The keys that each query reads; a new value for each forward pass, whose layers share
        masks."""
        return Causal(made={})

    def _layer_input(self, number: int, x: Tensor, src_tokens: Tensor) -> Tensor:
        """The input of layer *number*, where the layer before it gave *x* [B, T, C] for
        *src_tokens*."""
        return x

    def _skips_layer(self) -> bool:
        """Draw whether the next layer is skipped."""
        return False

    def _output(self, x: Tensor) -> Tensor:
        """The hidden states of the output layer where the last layer gave *x* [B, T, C]."""
        return x

    def _device(self) -> torch.device:
        return next(self.parameters()).device


class DecoderModel(FairseqLanguageModel):
    """A language model that is a :class:`Decoder`; a plug-in's may have any other decoder, and
    cannot generate."""

    decoder: Any

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        if isinstance(decoder, Decoder):
            self.memory_length = decoder.memory_length

    @property
    def can_generate(self) -> bool:
        return isinstance(self.decoder, Decoder)

    def new_cache(self, batch: int, longest: int | None = None) -> KeyValueCache:
        """See :meth:`Decoder.new_cache`."""
        return self.decoder.new_cache(batch, longest)

    def embed(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """See :meth:`Decoder.embed`."""
        return self.decoder.embed(tokens, cache)
