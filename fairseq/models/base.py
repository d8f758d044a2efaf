"""Base classes of models: the interface that tasks, criterions and the scorer use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fairseq.config.shared import Part
from fairseq.modules.memory import Memory
from fairseq.modules.output_layer import OutputLayer
from fairseq.system import deferred

PAD = 1  # the id of padding in every dictionary of fairseq


def normalized(logits: Tensor, log_probs: bool) -> Tensor:
    """Probabilities of *logits*, or their logarithms: float32."""
    return logits.float().log_softmax(-1) if log_probs else logits.float().softmax(-1)


def tell(module: nn.Module, name: str, *values: object) -> None:
    """Call the method *name* of all parts of *module* that have it."""
    for part in module.modules():
        if part is not module and hasattr(part, name):
            getattr(part, name)(*values)


class BaseFairseqModel(Part, nn.Module):
    """A registered model, with the methods that fairseq calls.

    Subclasses define ``build_model`` and ``forward``.
    """

    settings_name = "model"
    output_layer: OutputLayer | None = None
    decisive_settings: tuple[str, ...] = ()
    """Settings that change what the model computes or trains, but not the names and shapes of its
    parameters.

    What evaluation may change, such as the length of memory, is not one.
    """
    memory_length: int = 0
    """Tokens that the model remembers from segment to segment; 0: none."""
    infused_dim: int | None = None
    """Width of the summed embeddings that ``forward`` hands to its argument ``infuse``; None: it
    has none."""
    reads_documents: bool = False
    """Whether ``forward`` takes ``document_positions``, so that rows may hold several documents."""
    skips_parameters: bool = False
    """True if a training step may leave parameters without a gradient."""

    @functools.cached_property  # which a model may set
    def predicts_next_token(self) -> bool:
        """Whether the model can be scored and sampled from left to right.

        One that takes ``masked_tokens``, or whose decoder does, cannot: fairseq's criterion of
        masked models gives it this argument.
        """
        return "masked_tokens" not in self._forward_arguments

    @functools.cached_property  # each update asks
    def _forward_arguments(self) -> frozenset[str]:
        """The names of the arguments of ``forward``, and of its decoder's."""
        parts = (self, getattr(self, "decoder", None))
        return frozenset(name for part in parts if part for name in inspect.signature(part.forward).parameters)

    @property
    def can_generate(self) -> bool:
        """Whether the model reads token by token: it has ``new_cache`` and an output layer."""
        return hasattr(type(self), "new_cache") and isinstance(self.output_layer, OutputLayer)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> BaseFairseqModel:
        """Make a model for *task*'s dictionary from its settings."""
        raise NotImplementedError

    def net_input(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """*inputs* with the lengths of rows where ``forward``, or the decoder's, names them, and
        else without."""
        if "src_lengths" not in self._forward_arguments:
            return {name: value for name, value in inputs.items() if name != "src_lengths"}
        return {"src_lengths": inputs["src_tokens"].ne(PAD).sum(1), **inputs}

    def extract_features(self, *args: object, **kwargs: object) -> Any:
        """Hidden states: a decoder's, or an encoder's output."""
        part: Any = getattr(self, "decoder", self)
        return part.extract_features(*args, **kwargs) if part is not self else self(*args, **kwargs)

    @property
    def supported_targets(self) -> set[str]:
        """What the model predicts."""
        return {"future"}

    def max_positions(self) -> Any:
        """The most tokens of a row, or None: as many as its decoder or encoder takes."""
        part: Any
        for part in (getattr(self, "decoder", None), getattr(self, "encoder", None)):
            if hasattr(part, "max_positions"):
                return part.max_positions()
        return None

    def max_decoder_positions(self) -> Any:
        return self.max_positions()

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the parts how many updates were made."""
        tell(self, "set_num_updates", num_updates)

    def set_epoch(self, epoch: int) -> None:
        """Tell the parts which epoch begins."""
        tell(self, "set_epoch", epoch)

    def prepare_for_inference_(self, cfg: object) -> None:
        """See :meth:`make_generation_fast_`."""
        self.make_generation_fast_()

    def make_generation_fast_(self, **options: object) -> None:
        """Let every part make itself ready for generation; the model is one of evaluation then."""
        for name, part in self.named_modules():
            if part is not self and hasattr(part, "make_generation_fast_"):
                part.make_generation_fast_(name=name, **options)
        self.eval()

    def check_memory_length(self, length: int) -> None:
        """Raise ValueError unless ``forward`` takes *length* as ``memory_length``, the tokens of
        the new memory."""
        if length != self.memory_length:
            reason = f"is made for a memory of {self.memory_length} tokens" if self.memory_length else "has no memory"
            raise ValueError(f"memory_length {length}: the model {reason}; use {self.memory_length}")

    def get_targets(self, sample: dict[str, Any], net_output: object) -> Tensor:
        """The targets of *sample*: [B, T]."""
        return sample["target"]

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: dict[str, object] | None = None) -> Tensor:
        """Probabilities, or their logarithms, over all words: [B, T, V], float32."""
        return self.get_normalized_probs_scriptable(net_output, log_probs, sample)

    def get_normalized_probs_scriptable(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        decoder: Any = getattr(self, "decoder", None)
        if hasattr(decoder, "get_normalized_probs"):
            return decoder.get_normalized_probs(net_output, log_probs, sample)
        # A method of that name is no output layer.
        if isinstance(self.output_layer, OutputLayer):
            lprobs = self.output_layer.log_probs(net_output[0])
            return lprobs if log_probs else lprobs.exp()
        output = net_output["encoder_out"] if isinstance(net_output, dict) else net_output
        return normalized(output[0] if isinstance(output, tuple | list) else output, log_probs)

    @classmethod
    def strip_for_inference(
        cls, args: Mapping[str, object], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Settings and parameters of the model that a checkpoint is used as after training: what
        serves training alone is dropped."""
        return args, parameters

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise UserError if the *parameters*
        of a checkpoint belong to other data than the model."""

    def lacks_head(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the *parameters* of a checkpoint lack a part
        that training begins anew, such as a head."""
        return False

    def check_init(self, parameters: Mapping[str, Tensor], source: str) -> None:
        """Raise UserError if the *parameters* of another model, called *source*, are too few to
        begin training with."""

    def data_specific(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the *parameters* of a checkpoint that belong to other data than the model."""
        return {}

    def upgrade_state_dict(self, state: dict[str, Any]) -> Any:
        """*state*, which may come from an older program, with the names this model uses."""
        self.upgrade_state_dict_named(state, "")
        return state

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> Any:
        """Let every part change *state_dict*; the names of parameters of the model begin with
        *name*."""

        def upgrade(module: nn.Module, prefix: str) -> None:
            for child_name, child in module.named_children():
                full = f"{prefix}.{child_name}" if prefix else child_name
                if hasattr(child, "upgrade_state_dict_named"):
                    child.upgrade_state_dict_named(state_dict, full)  # type: ignore[operator]
                elif hasattr(child, "upgrade_state_dict"):
                    child.upgrade_state_dict(state_dict)  # type: ignore[operator]
                upgrade(child, full)

        upgrade(self, name)
        return state_dict

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Tensor],
        strict: bool = True,
        model_cfg: object = None,
        args: object = None,
        assign: bool = False,
    ) -> Any:
        """Load *state_dict* after :meth:`upgrade_state_dict`."""
        state = dict(state_dict)
        changed = self.upgrade_state_dict(state)
        # A plug-in's method may change *state* and return nothing.
        return super().load_state_dict(state if changed is None else changed, strict=strict, assign=assign)


class FairseqLanguageModel(BaseFairseqModel):
    """A language model that is a decoder alone."""

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """The model in a folder, as fairseq's hub gives it; see
        :func:`fairseq.hub_utils.from_pretrained`."""
        return deferred.plugins().from_pretrained(cls, *args, **options)

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def output_layer(self) -> OutputLayer | None:  # type: ignore[override]
        """The decoder's distribution over words; None for a decoder that returns logits."""
        layer = getattr(self.decoder, "output_distribution", None)
        return layer if isinstance(layer, OutputLayer) else None

    def forward(
        self, src_tokens: Tensor, memory: Memory | None = None, **kwargs: object
    ) -> tuple[Tensor, dict[str, Any]]:
        """Pass everything to the decoder; a decoder without memory is not given any."""
        if memory is not None:
            # A decoder without memory need not take the argument.
            kwargs["memory"] = memory
        return self.decoder(src_tokens, **kwargs)
