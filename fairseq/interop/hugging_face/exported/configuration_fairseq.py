"""Configuration of an exported language model, for Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class FairseqConfig(PretrainedConfig):
    """Settings of a model; beside them ``config.json`` has the usual names of a few sizes, for other programs.

    Attributes:
        settings: the model's settings in fairseq-short, with its architecture as ``arch``.
        vocab_size: number of words.
        padding_idx: id of the padding symbol, from which positions are numbered; -1: there is none.
    """

    model_type = "fairseq_lm"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self, settings: dict[str, Any] | None = None, vocab_size: int = 0, padding_idx: int = -1, **kwargs: Any
    ) -> None:
        # The settings say which parameters are shared; transformers loads them once only where this is set.
        super().__init__(**{**kwargs, "tie_word_embeddings": True})
        self.settings, self.vocab_size, self.padding_idx = settings, vocab_size, padding_idx
