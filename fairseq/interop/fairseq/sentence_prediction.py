"""Tasks of sentences as plug-ins of fairseq extend them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fairseq.config.settings import Settings
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer


class LabelledTask(SentencePredictionTask):
    """The constructor of fairseq's task, whose third argument is the dictionary of the classes; the
    adapter puts it under a plug-in's task."""

    def __init__(self, args: Settings, dictionary: Dictionary, labels: Dictionary | Tokenizer | None = None) -> None:
        super().__init__(args, dictionary, None if isinstance(labels, Dictionary) else labels)
        if isinstance(labels, Dictionary) and not self.layout.is_regression:
            self.layout = dataclasses.replace(self.layout, labels=tuple(labels.words()))

    @classmethod
    def load_dictionary(cls, *words: Any, source: bool = True) -> Dictionary:
        """The dictionary in a file: the last of *words*, which are settings and the file in fairseq
        up to 0.10. One of the *source* has ``<mask>``."""
        dictionary = Dictionary.load(words[-1])
        if source and dictionary.nspecial:
            dictionary.add_mask()
        return dictionary
