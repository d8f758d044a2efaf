"""Base classes of models: the interface that tasks, criterions and the scorer use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fairseq.config.shared import Part
from fairseq.modules.memory import Memory
from fairseq.modules.output_layer import OutputLayer
from fairseq.system import deferred


class BaseFairseqModel(Part, nn.Module):
    """A registered model.

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
    skips_parameters: bool = False
    """True if a training step may leave parameters without a gradient."""
    predicts_next_token: bool = True
    """True if the model is a language model that can be scored and sampled from left to right."""

    @property
    def can_generate(self) -> bool:
        """Whether the model reads token by token: it has ``new_cache`` and an output layer."""
        return hasattr(type(self), "new_cache") and isinstance(self.output_layer, OutputLayer)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> BaseFairseqModel:
        """Make a model for *task*'s dictionary from its settings."""
        raise NotImplementedError

    def max_positions(self) -> int | None:
        """The most tokens of a row, or None."""
        return None

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
        # A method of that name is no output layer.
        if isinstance(self.output_layer, OutputLayer):
            lprobs = self.output_layer.log_probs(net_output[0])
        else:
            lprobs = net_output[0].float().log_softmax(-1)
        return lprobs if log_probs else lprobs.exp()

    @classmethod
    def finished(
        cls, args: Mapping[str, object], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Settings and parameters of the model that a checkpoint is used as after training: what
        serves training alone is dropped."""
        return args, parameters

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise UserError if the *parameters*
        of a checkpoint belong to other data than the model."""

    def is_begun_by(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the *parameters* of a checkpoint lack a part
        that training begins anew, such as a head."""
        return False

    def check_start(self, parameters: Mapping[str, Tensor], source: str) -> None:
        """Raise UserError if the *parameters* of another model, called *source*, are too few to
        begin training with."""

    def of_other_data(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the *parameters* of a checkpoint that belong to other data than the model."""
        return {}

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """*state*, which may come from an older program, with the names this model uses."""
        return state


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

    def max_positions(self) -> int | None:
        return self.decoder.max_positions()  # type: ignore[operator]
