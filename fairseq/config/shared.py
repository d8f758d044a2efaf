"""Settings that several parts have, declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fairseq.config.fields import Config, add_flags, flag
from fairseq.config.namespaces import namespace_of
from fairseq.config.registry import is_outside
from fairseq.errors import SettingError

# Beyond any published model; a mistyped number would otherwise build modules until memory ends.
MOST_LAYERS = 2000
BREAK_MODES = ("none", "complete", "complete_doc", "eos")


class Part:
    """Base of registered parts: what they read of a run's settings."""

    config_class: type | None = None
    """The dataclass of its settings."""
    settings_name: ClassVar[str]
    """The name of its settings in :class:`~fairseq.config.settings.Settings`."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the flags of the dataclass of its settings to *parser*."""
        if cls.config_class is not None:
            add_flags(parser, cls.config_class)

    @classmethod
    def settings_of(cls, settings: Any) -> Any:
        """Return what it is made from, of all *settings* of a run: its own; a plug-in's part has
        all, as a namespace."""
        return namespace_of(settings) if is_outside(cls) else getattr(settings, cls.settings_name)

    @classmethod
    def unread(cls, stored: Mapping[str, object]) -> Mapping[str, object]:
        """Return the settings *stored* in a checkpoint
        that it reads only if they are in its dataclass; which a plug-in's part reads of its
        namespace cannot be seen."""
        return {} if is_outside(cls) else stored


@dataclass(frozen=True)
class KernelConfig(Config):
    """Kernels of other packages, read by models and optimizers too."""

    no_apex: bool = flag(False, "do not use NVIDIA apex, even if it is installed", rare=True)


@dataclass(frozen=True)
class BlockConfig(Config):
    """Blocks of a language model, whose length is also the most positions of a model."""

    tokens_per_sample: int = flag(1024, "tokens per block", low=1)


@dataclass(frozen=True)
class ModelConfig(KernelConfig):
    """Base of the settings of this package's models."""

    @property
    def memory_length(self) -> int:
        """Tokens that the model remembers from segment to segment; 0: none."""
        return 0

    def at_block_length(self, tokens: int, longest: int) -> dict[str, object]:
        """Settings that change when staged training goes
        on with blocks of *tokens*; any stage's *longest* blocks."""
        return {}

    def with_memory(self, tokens: int, longest: int) -> dict[str, object] | None:
        """Settings with which the model remembers *tokens*, at most *longest* in any stage; None:
        it cannot."""
        return None if longest else {}


@dataclass(frozen=True)
class BlockModelConfig(BlockConfig, ModelConfig):
    """Settings of models with positions for the tokens of a block."""

    max_target_positions: int | None = flag(None, "maximum tokens per row (default: `tokens_per_sample`)", low=1)


@dataclass(frozen=True)
class NGramNotesConfig(Config):
    """Notes that decoders add to their input."""

    ngram_notes: int = flag(
        0, "rows of notes: learned vectors of pairs of tokens, added to the input", low=0, high=1 << 30
    )
    word_notes: int = flag(
        0, "rows of notes of words: learned vectors of a word's subwords so far", low=0, high=1 << 30
    )
    ngram_notes_dropout: float = flag(
        0.0, "share of tokens without their notes of pairs and words, in training", low=0.0, below=1.0
    )


@dataclass(frozen=True)
class MeanConfig(Config):
    """What summed gradients are divided by, read by criterions and by logs of training."""

    sentence_avg: bool = flag(False, "divide gradients by rows instead of tokens", rare=True)


@dataclass(frozen=True)
class AdaptiveCriterionConfig(MeanConfig):
    """Settings of the adaptive loss."""

    adaptive_loss_legacy_padding: bool = flag(False, "fairseq's padding bug: one word of each tail band untrained")

    @property
    def band_padding(self) -> bool:
        """Whether one word of each tail band is left out of the loss."""
        return self.adaptive_loss_legacy_padding


@dataclass(frozen=True)
class LanguageModelingTaskConfig(BlockConfig):
    """Settings of language modelling."""

    sample_break_mode: str = flag(
        "none",
        "block boundaries: fixed length, whole lines, lines within documents, single lines",
        choices=BREAK_MODES,
    )
    loss_positions: str = flag(
        "full",
        "training targets: every position of a segment, or its second half",
        choices=("full", "half"),
    )
    streams: bool = flag(False, "rows continue from batch to batch, also for models without memory")
    passage_tokens: int | None = flag(
        None,
        "memory or `streams`: a row reads passages of so many tokens (whole blocks, at least two), in a new random "
        "order each epoch (default: the corpus in order)",
        low=1,
    )
    add_bos_token: bool = flag(False, "begin-of-sentence symbol before each block and as its first target")
    shuffle_lines: bool = flag(False, "shuffle training lines each epoch, before they are cut into blocks")
    document_mask: bool = flag(False, "tokens read only their own document; blank lines separate documents")
    mixture: str | None = flag(
        None,
        "further data folders and their shares of the training tokens; DATA has the rest",
        metavar="DIR=SHARE,…",
        stored=False,
        training=True,
    )

    def check(self) -> None:
        """Raise SettingError if settings contradict `mixture`."""
        if not self.mixture:
            return
        if self.sample_break_mode != "none":
            raise SettingError(
                f"`sample_break_mode` {self.sample_break_mode}: `mixture` needs blocks of one size; use none"
            )
        if self.streams:
            raise SettingError("`streams`: rows of a `mixture` do not continue; leave one of them out")


def check_cutoffs(setting: str, cutoffs: list[int], vocabulary: int | None = None) -> None:
    """Raise SettingError unless cutoffs ascend and, in a *vocabulary* of known size, leave words
    for the last band."""
    text = ",".join(map(str, cutoffs))
    if not cutoffs or cutoffs[0] < 1 or any(a >= b for a, b in zip(cutoffs, cutoffs[1:], strict=False)):
        raise SettingError(f"`{setting}` {text}: cutoffs must be positive and ascending")
    if vocabulary is not None and cutoffs[-1] >= vocabulary:
        raise SettingError(
            f"`{setting}` {text}: the last cutoff must be below the dictionary size, {vocabulary}; "
            "lower the cutoffs or use a smaller `arch`"
        )
