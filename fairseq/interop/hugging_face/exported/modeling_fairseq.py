"""Language models of fairseq-short as classes of Hugging Face transformers.

Without a cache, a row is read as one segment. With one, as in ``generate``, a model reads segments
of its training's length: one with memory keeps the last tokens of a full segment, one without
memory reads the second half of its window again. Padding is not read at all, on whichever side of a
row it stands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from fairseq.interop.hugging_face.exported.decoder_parts import PARTS
from fairseq.interop.hugging_face.exported.reading import DecoderReader, FairseqCache, noted

OLDEST = (4, 51)  # transformers that this code is tested with


class FairseqConfig(PretrainedConfig):
    """Settings of a model; ``config.json`` also has the usual names of a few sizes, for other
    programs.

    Attributes:
        settings: the model's settings in fairseq-short, with its architecture as ``arch``.
        vocab_size: number of words.
        padding_idx: id of the padding symbol, from which positions are numbered; -1: there is none.
        tied: names of parameters that are another one, and its name.
    """

    model_type = "fairseq_lm"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        settings: dict[str, object] | None = None,
        vocab_size: int = 0,
        padding_idx: int = -1,
        tied: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        # transformers loads shared parameters (`tied`) once only where this is set.
        super().__init__(**{**kwargs, "tie_word_embeddings": True})
        self.settings, self.vocab_size, self.padding_idx, self.tied = settings, vocab_size, padding_idx, tied or {}


def decoder_of(config: FairseqConfig) -> Any:
    """Return the decoder that *config* describes."""
    settings = dict(config.settings or {})
    arch = str(settings.pop("arch", None))
    if arch not in PARTS:
        raise ValueError(f"settings name the model {arch!r}; this code has {', '.join(PARTS)}")
    kind, decoder = PARTS[arch]
    padding = {"padding_idx": config.padding_idx} if arch == "transformer_lm" else {}
    return decoder(kind(**{**settings, "no_apex": True}), config.vocab_size, **padding)


class Projection(nn.Module):
    """A linear map that is no ``nn.Linear``."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class FairseqPreTrainedModel(PreTrainedModel):
    """A decoder with its output layer; subclasses add what their tasks need."""

    config_class = FairseqConfig
    _no_split_modules = ["TransformerLayer"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    # A cache cannot be cropped, so that there is no assisted generation.
    _is_stateful = True

    def __init__(self, config: FairseqConfig) -> None:
        version = transformers.__version__
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ImportError(f"{config.model_type}: transformers {version} is too old; install {oldest} or later")
        super().__init__(config)
        self.decoder = decoder_of(config)
        for module in self.decoder.modules():
            # The hooks would name a shared parameter once for each layer, as checkpoints do; here
            # it has the one name of its module.
            module._state_dict_hooks.clear()
            module._load_state_dict_pre_hooks.clear()
        # Weights around the layers are shared, and read without a call of their module: tools that
        # replace linear maps, such as adapters and quantization, leave these alone.
        for name, module in self.decoder.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("layers."):
                module.__class__ = Projection  # type: ignore[assignment]
        # A table since transformers 5, names before it.
        self._tied_weights_keys: Any = dict(config.tied) if self.ties_itself() else list(config.tied)

    @staticmethod
    def ties_itself() -> bool:
        """Whether transformers shares parameters by a table of their names."""
        return int(transformers.__version__.split(".")[0]) >= 5

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Share parameters again: a model that is made without memory for its weights has lost what
        it shared."""
        if self.ties_itself():
            return super().tie_weights(*args, **kwargs)
        for name, first in self.config.tied.items():
            module, _, parameter = name.rpartition(".")
            setattr(self.get_submodule(module), parameter, self.get_parameter(first))
        return None

    def _init_weights(self, module: nn.Module) -> None:
        # A decoder has its initial weights from the beginning.
        if module is getattr(self, "score", None):
            nn.init.normal_(module.weight, std=0.02)

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

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Let layers keep their inputs alone for the backward pass, and compute the rest again."""
        recompute = gradient_checkpointing_func
        # The older variant, transformers' default before 5, takes no arguments by name.
        if recompute is None or getattr(recompute, "keywords", {}).get("use_reentrant"):
            recompute = functools.partial(checkpoint, use_reentrant=False)
        for number, layer in enumerate(self.decoder.layers):
            layer.__dict__.pop("forward", None)
            if enable and number % every_n_layers == 0:
                layer.forward = functools.partial(recompute, layer.forward)
        self.gradient_checkpointing = enable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return getattr(self, "gradient_checkpointing", False)

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
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Hidden states for the arguments of :meth:`FairseqForCausalLM.forward`, and what else they
        ask for.

        Raises:
            ValueError: what is asked for does not exist here.
        """
        tokens = input_ids
        if inputs_embeds is not None and input_ids is None:
            tokens = inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.long)
        elif tokens is None or inputs_embeds is not None:
            raise ValueError("give either input_ids or inputs_embeds")
        if attention_mask is not None and attention_mask.dim() > 2:
            attention_mask = _padding_of(attention_mask)
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        cache = self._cache(past_key_values, use_cache)
        if cache is not None and (with_weights or inputs_embeds is not None):
            name = "output_attentions" if with_weights else "inputs_embeds"
            raise ValueError(f"{name}: not with a cache; give use_cache=False")
        reader = DecoderReader(self.decoder, bool(with_states))
        weights: list[Tensor] = []
        with self._attention():
            if cache is not None:
                real = torch.ones_like(tokens) if attention_mask is None else attention_mask[:, -tokens.size(1) :]
                read = cache.read(reader, tokens, real.bool())
            else:
                read = self._uncached(reader, tokens, attention_mask, inputs_embeds, weights if with_weights else None)
        parts = reader.parts(read)
        return BaseModelOutputWithPast(
            parts[-1], cache, parts if with_states else None, tuple(weights) if with_weights else None
        )

    def _uncached(
        self,
        reader: DecoderReader,
        tokens: Tensor,
        attention_mask: Tensor | None,
        embeddings: Tensor | None,
        weights: list[Tensor] | None,
    ) -> Tensor:
        """What *reader* gives for one segment of *tokens* [B, T], or *embeddings* [B, T, E];
        attention to *weights*."""
        order = None if attention_mask is None else _order(attention_mask[:, -tokens.size(1) :])
        moved = tokens if order is None else tokens.gather(1, order)
        with contextlib.ExitStack() as hooks:
            if embeddings is not None:
                replaced = embeddings if order is None else _gathered(embeddings, order)
                hooks.callback(self.decoder.embed_tokens.register_forward_hook(lambda *_: replaced).remove)
            modules = [layer.self_attn for layer in self.decoder.layers]
            calls = hooks.enter_context(noted(modules)) if weights is not None else []
            read = reader.read(moved)
        if weights is not None:
            # Fused attention does not return its weights: they are computed again from what each
            # call was given.
            for module, (x, kwargs) in zip(modules, calls, strict=True):
                of_layer = module.weights(x, *(kwargs[name] for name in ("memory", "positions", "visible")))
                weights.append(of_layer if order is None else _attention_back(of_layer, order, tokens.size(1)))
        return read if order is None else _moved_back(read, order, tokens.size(1))

    def _cache(self, cache: object, use_cache: bool | None) -> FairseqCache | None:
        """The cache to read with: a new one for an empty one of transformers, which has no room for
        a memory."""
        if isinstance(cache, FairseqCache):
            return cache
        if cache is None:
            return FairseqCache() if use_cache else None
        if isinstance(cache, Cache) and cache.get_seq_length() == 0:
            return FairseqCache()
        raise ValueError(f"past_key_values {type(cache).__name__}: expected what this model returned")

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """Attention by plain products where the configuration says ``eager``."""
        if getattr(self.config, "_attn_implementation", None) == "eager" and not torch.compiler.is_compiling():
            with sdpa_kernel(SDPBackend.MATH):
                yield
        else:
            yield

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        """*output*, or a tuple of its values, by the argument of ``forward`` or the
        configuration."""
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
        """Log-probabilities of the next token, as logits.

        Args:
            input_ids: [B, T]; with *past_key_values*, those that follow what it holds.
            attention_mask: 0 at padding: [B, T] or more columns, of which the last T count; or a
                causal mask [B, T, T].
            past_key_values: what an earlier call returned; it is changed in place.
            inputs_embeds: [B, T, E], in place of ``input_ids``; not with a cache.
            labels: targets [B, T], aligned with ``input_ids``; -100 is left out of the loss.
            use_cache: return a cache (default: if one is given).
            output_attentions: return the weights of attention [B, H, T, T]; not with a cache.
            output_hidden_states: return the inputs of the layers and what the output layer reads.
            logits_to_keep: compute logits for the last of so many tokens, or for these positions;
                0: for all.
            kwargs: for the loss, such as ``num_items_in_batch``.
        """
        asked = (past_key_values, use_cache, inputs_embeds, output_hidden_states, output_attentions)
        read = self.read(input_ids, attention_mask, *asked)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        # Log-probabilities are logits, too (their softmax is itself), and an adaptive softmax has
        # no others.
        hidden: Any = read.last_hidden_state
        logits = self.decoder.output_distribution.log_probs(hidden[:, last])
        loss = None
        if labels is not None:
            # Nothing was read before the first token after padding, which therefore has no
            # prediction.
            if attention_mask is not None:
                padding = attention_mask[:, -labels.size(1) :] == 0
                labels = labels.clone().masked_fill_(padding.roll(1, dims=1), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss, logits, read.past_key_values, read.hidden_states, read.attentions)
        return self._returned(output, return_dict)


class FairseqForSequenceClassification(FairseqPreTrainedModel):
    """A classifier of texts: a linear map of the hidden state of the last token."""

    # The loss is a mean over each batch: with gradient accumulation, the caller divides it.
    accepts_loss_kwargs = False

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        projection = getattr(self.decoder, "project_out_dim", None)
        width = config.hidden_size if projection is None else projection.out_features
        self.score = nn.Linear(width, config.num_labels or 2, bias=False)
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
        """Scores of the classes [B, N]; without *attention_mask* the padding is what
        ``config.pad_token_id`` says."""
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        read = self.read(input_ids, attention_mask, None, False, inputs_embeds, output_hidden_states, output_attentions)
        hidden: Any = read.last_hidden_state
        real = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        # The last real token, on whichever side the padding is.
        last = (real.long() * torch.arange(real.size(1), device=real.device)).argmax(1)
        logits = self.score(hidden[torch.arange(len(hidden), device=last.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, logits=logits)
        output = SequenceClassifierOutputWithPast(loss, logits, None, read.hidden_states, read.attentions)
        return self._returned(output, return_dict)


def _padding_of(mask: Tensor) -> Tensor:
    """The padding mask [B, T] that a causal *mask* [B, T, T] or [B, 1, T, T] says; -inf or False at
    hidden keys.

    Raises:
        ValueError: it hides other keys than padding and later ones.
    """
    visible = mask[:, 0] if mask.dim() == 4 else mask
    if visible.is_floating_point() and bool((visible < 0).any()):
        visible = visible == 0
    real = visible.bool().diagonal(dim1=-2, dim2=-1)
    causal = (real[:, None] & real[:, :, None]).tril()
    if mask.size(-1) != mask.size(-2) or not torch.equal(visible.bool() & real[:, :, None], causal):
        raise ValueError(f"attention_mask {list(mask.shape)}: must be causal; a mask [B, T] of the padding is enough")
    return real.long()


def _order(real: Tensor) -> Tensor:
    """Columns [B, S] that move the tokens of rows to their beginning, by *real* [B, T], 0 at
    padding.

    Attention is causal: tokens there do not see the padding after them.
    """
    # The tokens keep their order, and only the padding moves. Without a sort, for which ONNX has no
    # stable one.
    tokens = (real != 0).long()
    padding = 1 - tokens
    after = tokens.sum(1, keepdim=True) + padding.cumsum(1) - 1
    column = torch.where(tokens == 1, tokens.cumsum(1) - 1, after)  # the new one of each
    order = torch.zeros_like(column).scatter(
        1, column, torch.arange(real.size(1), device=real.device).expand_as(column)
    )
    # How many columns are needed depends on the data, which a graph does not.
    return order if torch.compiler.is_compiling() else order[:, : max(1, int(real.bool().sum(1).max()))]


def _gathered(states: Tensor, order: Tensor) -> Tensor:
    return states.gather(1, order[..., None].expand(*order.shape, states.size(2)))


def _moved_back(states: Tensor, order: Tensor, columns: int) -> Tensor:
    """*states* [B, S, C] of the columns *order* [B, S] at these columns of [B, T, C]; zeros
    elsewhere."""
    result = states.new_zeros(states.size(0), columns, states.size(2))
    return result.scatter(1, order[..., None].expand_as(states), states)


def _attention_back(weights: Tensor, order: Tensor, columns: int) -> Tensor:
    """Attention [B, H, S, M + S] of columns *order* [B, S] at these columns of [B, H, T, M + T];
    zeros elsewhere."""
    # Of a memory that begins with zeros.
    memory, weights = weights.tensor_split([weights.size(-1) - order.size(1)], dim=-1)
    rows = weights.new_zeros(*weights.shape[:3], columns)
    rows = torch.cat([memory, rows.scatter(3, order[:, None, None].expand_as(weights), weights)], dim=-1)
    result = weights.new_zeros(*weights.shape[:2], columns, rows.size(-1))
    return result.scatter(2, order[:, None, :, None].expand_as(rows), rows)
