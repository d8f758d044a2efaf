"""Language models of fairseq-short as classes of Hugging Face transformers.

Without a cache, a row is read as one segment. With one, as in ``generate``, a model reads segments of its training's
length: one with memory keeps the last tokens of a full segment, one without memory reads the second half of its window
again. Padding is not read at all, on whichever side of a row it stands.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from fairseq.inference.rows import Rows
from fairseq.interop.hugging_face.exported.configuration_fairseq import FairseqConfig
from fairseq.interop.hugging_face.exported.decoder_parts import PARTS


def decoder_of(config: FairseqConfig) -> Any:
    """Return the decoder that *config* describes."""
    settings = dict(config.settings or {})
    arch = str(settings.pop("arch", None))
    if arch not in PARTS:
        raise ValueError(f"settings name the model {arch!r}; this code has {', '.join(PARTS)}")
    kind, decoder = PARTS[arch]
    padding = {"padding_idx": config.padding_idx} if arch == "transformer_lm" else {}
    return decoder(kind(**{**settings, "no_apex": True}), config.vocab_size, **padding)


class DecoderReader:
    """What :class:`Rows` needs of a decoder."""

    begin = None

    def __init__(self, decoder: Any) -> None:
        self.model, self.device = decoder, next(decoder.parameters()).device

    def __deepcopy__(self, memo: Any) -> DecoderReader:
        # A copy of a cache reads with the same model.
        return self

    def new_cache(self, rows: int, longest: int | None) -> Any:
        return self.model.new_cache(rows, longest)

    def read(self, tokens: Tensor, cache: Any) -> Tensor:
        hidden: Tensor = self.model(tokens, cache=cache)[0]
        return hidden


class FairseqCache(Cache):
    """What has been read of the rows of a batch, those with equally many tokens together."""

    def __init__(self) -> None:
        # transformers' cache holds keys and values by layer; here they are in the decoder's own cache, with its memory.
        super().__init__(layers=[])
        self.groups: list[tuple[Tensor, Rows]] = []  # positions of rows in the batch [rows], and their tokens
        self.tokens_read = 0  # columns of the batch, with padding

    def __len__(self) -> int:
        return len(self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens_read

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a cache with memory cannot be cropped; use greedy search, sampling or beam search")

    def read(self, decoder: Any, tokens: Tensor, real: Tensor) -> Tensor:
        """Hidden states [B, T, C] of *tokens* [B, T], which continue what was read; zeros where *real* is False."""
        # Rows of a batch differ in their padding, but the decoder's cache has one length for all of its rows: rows with
        # equally many tokens share one.
        parts, groups = [], []
        for positions, rows in self._continued(DecoderReader(decoder), real.sum(1)):
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
                        # The group divides: each part goes on with a cache of its own, cut from the same one.
                        part = copy.deepcopy(rows)
                        part.select_rows(some)
                yield positions[some], part

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make row *indices[i]* the new row i."""
        groups = []
        for positions, rows in self.groups:
            # Which new rows come from which old ones: beam search repeats some and drops others.
            new, old = (indices.to(positions.device)[:, None] == positions).nonzero(as_tuple=True)
            if len(new):
                rows.select_rows(old)
                groups.append((new, rows))
        self.groups = groups

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = sum(len(positions) for positions, _ in self.groups)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))


class FairseqPreTrainedModel(PreTrainedModel):
    """A decoder with its output layer; subclasses add what their tasks need."""

    config_class = FairseqConfig
    _no_split_modules = ["TransformerLayer"]
    # A cache cannot be cropped, so that there is no assisted generation.
    _is_stateful = True

    def __init__(self, config: FairseqConfig) -> None:
        # Up to 4.57 shared weights are left without values, and every probability is NaN.
        if int(transformers.__version__.split(".")[0]) < 5:
            raise ImportError(
                f"{config.model_type}: transformers {transformers.__version__} is too old; install 5 or later"
            )
        super().__init__(config)
        self.decoder = decoder_of(config)
        for module in self.decoder.modules():
            # The hooks would name a shared parameter once for each layer, as checkpoints do; here it has the one name
            # of its module.
            module._state_dict_hooks.clear()
            module._load_state_dict_pre_hooks.clear()
        first: dict[int, str] = {}
        names = [(name, id(value)) for name, value in self.named_parameters(remove_duplicate=False)]
        self._tied_weights_keys = {name: first[key] for name, key in names if first.setdefault(key, name) != name}

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """See transformers; a weight that the file lacks is an error, unless it is a new head's."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        if missing := sorted(name for name in info["missing_keys"] if not name.startswith("score.")):
            raise ValueError(f"the file of weights lacks {', '.join(missing[:3])}; export the model again")
        return (model, info) if output_loading_info else model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: ``generate`` then takes the cache that ``forward`` returns."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("resize_token_embeddings: output layers here have the vocabulary of their training")

    def outputs(self, states: bool | None, as_object: bool | None, others: dict[str, Any]) -> tuple[bool, bool]:
        """Whether hidden states are returned, and an object, by the arguments of ``forward`` or the configuration.

        Raises:
            ValueError: what is asked for does not exist here.
        """
        if others.get("output_attentions") or (self.config.output_attentions and "output_attentions" not in others):
            raise ValueError("output_attentions: not available, attention is fused; see fairseq-attention")
        if others.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds: not available; give input_ids")
        with_states = self.config.output_hidden_states if states is None else states
        return bool(with_states), bool(self.config.return_dict if as_object is None else as_object)

    def read(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        cache: FairseqCache | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of *tokens* [B, T], the inputs of layers being added to *states*: [B, T, C].

        *attention_mask* is 0 at padding: [B, T] or more columns, of which the last T count.
        """
        real = torch.ones_like(tokens, dtype=torch.bool)
        if attention_mask is not None:
            real = attention_mask[:, -tokens.size(1) :].bool()
        if cache is not None:
            if not isinstance(cache, FairseqCache):
                raise ValueError(f"past_key_values {type(cache).__name__}: expected what this model returned")
            if states is not None:
                raise ValueError("output_hidden_states: not with a cache; give use_cache=False")
            return cache.read(self.decoder, tokens, real)
        # Attention is causal: tokens moved to the beginning of their rows do not see the padding after them.
        # Stable: the tokens keep their order, and only the padding moves.
        order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        order = order[:, : max(1, int(real.sum(1).max()))]
        hooks = []
        if states is not None:
            for layer in self.decoder.layers:
                hooks.append(layer.register_forward_pre_hook(lambda _, args: states.append(args[0])))
        try:
            hidden = self.decoder(tokens.gather(1, order))[0]
        finally:
            for hook in hooks:
                hook.remove()
        if states is not None:
            states[:] = [_moved_back(state, order, tokens.size(1)) for state in states]
        return _moved_back(hidden, order, tokens.size(1))


class FairseqModel(FairseqPreTrainedModel):
    """The hidden states that the output layer reads."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: FairseqCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states; see :meth:`FairseqForCausalLM.forward`."""
        cache = FairseqCache() if use_cache and past_key_values is None else past_key_values
        with_states, as_object = self.outputs(output_hidden_states, return_dict, kwargs)
        states: list[Tensor] | None = [] if with_states else None
        hidden = self.read(input_ids, attention_mask, cache, states)
        output = BaseModelOutputWithPast(hidden, cache, None if states is None else (*states, hidden))
        return output if as_object else output.to_tuple()


class FairseqForCausalLM(FairseqPreTrainedModel, GenerationMixin):
    """A language model."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: FairseqCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Log-probabilities of the next token, as logits.

        Args:
            input_ids: [B, T]; with *past_key_values*, those that follow what it holds.
            attention_mask: 0 at padding: [B, T] or more columns, of which the last T count.
            past_key_values: what an earlier call returned; it is changed in place.
            labels: targets [B, T], aligned with ``input_ids``; -100 is left out of the loss.
            use_cache: return a cache (default: if one is given).
            output_hidden_states: return the inputs of the layers and what the output layer reads; not with a cache.
            logits_to_keep: compute logits for the last of so many tokens, or for these positions; 0: for all.
            kwargs: for the loss, such as ``num_items_in_batch``.
        """
        cache = FairseqCache() if use_cache and past_key_values is None else past_key_values
        with_states, as_object = self.outputs(output_hidden_states, return_dict, kwargs)
        states: list[Tensor] | None = [] if with_states else None
        hidden = self.read(input_ids, attention_mask, cache, states)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        # Log-probabilities are logits, too (their softmax is itself), and an adaptive softmax has no others.
        logits = self.decoder.output_distribution.log_probs(hidden[:, last])
        loss = None
        if labels is not None:
            # Nothing was read before the first token after padding, which therefore has no prediction.
            if attention_mask is not None:
                padding = attention_mask[:, -labels.size(1) :] == 0
                labels = labels.clone().masked_fill_(padding.roll(1, dims=1), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss, logits, cache, None if states is None else (*states, hidden))
        return output if as_object else output.to_tuple()


class FairseqForSequenceClassification(FairseqPreTrainedModel):
    """A classifier of texts: a linear map of the hidden state of the last token."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        projection = getattr(self.decoder, "project_out_dim", None)
        width = config.hidden_size if projection is None else projection.out_features
        self.score = nn.Linear(width, config.num_labels or 2, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Scores of the classes [B, N]; without *attention_mask* the padding is what ``config.pad_token_id`` says."""
        if attention_mask is None and self.config.pad_token_id is not None:
            attention_mask = input_ids != self.config.pad_token_id
        with_states, as_object = self.outputs(output_hidden_states, return_dict, kwargs)
        states: list[Tensor] | None = [] if with_states else None
        hidden = self.read(input_ids, attention_mask, None, states)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # The last real token, on whichever side the padding is.
        last = (real.long() * torch.arange(real.size(1), device=real.device)).argmax(1)
        logits = self.score(hidden[torch.arange(len(hidden), device=last.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, logits=logits)
        output = SequenceClassifierOutputWithPast(loss, logits, None, None if states is None else (*states, hidden))
        return output if as_object else output.to_tuple()


def _moved_back(states: Tensor, order: Tensor, columns: int) -> Tensor:
    """*states* [B, S, C] of the columns *order* [B, S] at these columns of [B, T, C]; zeros elsewhere."""
    result = states.new_zeros(states.size(0), columns, states.size(2))
    return result.scatter(1, order[..., None].expand_as(states), states)
