"""Classes or scores of single sentences and pairs: fine-tuning of encoders and decoders.

Raw TSV files (:mod:`fairseq.data.glue` has the columns, labels and metrics of each GLUE task) are
encoded as the pre-training text was; fairseq's folders (:mod:`fairseq.data.sentence_folders`) are
binarised text. Rows are kept in memory. The model is a
:class:`~fairseq.models.sentence.SentenceModel`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.config import fields
from fairseq.config.command_settings import TextConfig
from fairseq.config.settings import Settings, typed_settings
from fairseq.config.shared import BlockConfig
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import data_folders, load_dictionary
from fairseq.data.glue import Label, check_labels, read_examples, split_file
from fairseq.data.sentence_folders import check_sentences, input_folders, read_labels, read_sentences
from fairseq.data.sentences import SentenceRows
from fairseq.dataclass import settings_of
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.sentence import SentenceModel
from fairseq.tasks.fairseq_task import FairseqTask, check_symbols
from fairseq.tasks.settings import SentencePredictionTaskConfig
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers import Tokenizer, find_tokenizer
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.tokenizer import chosen_subwords

UNLABELLED = "test"
"""First part of the names of splits that may lack labels."""


class SentencePredictionTask(FairseqTask):
    """Prediction of a class or a score of each row of the TSV files,
    or of binarised text, in the data folder.

    Text of tables is encoded like the pre-training text, with tokenizer and dictionary of
    ``--data-bin``, to which ``<mask>`` is added as in pre-training. Rows are ``<s> a </s>`` or
    ``<s> a </s> b </s>``; a decoder's begin with ``</s>`` and have no ``<mask>``.
    """

    config_class = SentencePredictionTaskConfig
    reads = ("shorten_method",)

    def __init__(self, args: Settings, dictionary: Dictionary, tokenizer: Tokenizer | Dictionary | None = None) -> None:
        """Make the task; plug-ins give the dictionary of the classes for the *tokenizer*."""
        super().__init__(args)
        labels, tokenizer = (tokenizer, None) if isinstance(tokenizer, Dictionary) else (None, tokenizer)
        self.encode = TextReader(dictionary, tokenizer)
        self.cfg = self.typed(SentencePredictionTaskConfig)
        self.layout = self.cfg.layout()
        if labels is not None and not self.layout.is_regression:
            self.layout = dataclasses.replace(self.layout, labels=tuple(labels.words()))
        self.dictionary = dictionary
        # A decoder's rows begin as its text did: with the end of what came before.
        self.begin = self.cfg.init_token
        if isinstance(self.settings.model, BlockConfig):
            self.begin = dictionary.eos() if self.begin is None else self.begin
        else:
            if dictionary.nspecial:
                dictionary.add_mask()
            check_symbols(dictionary, "sentence_prediction", "bos", "pad")
        for name in ("init_token", "separator_token"):
            index = getattr(self.cfg, name) or 0
            if index >= len(dictionary):
                raise UserError(f"`{name}` {index}: the dictionary has ids up to {len(dictionary) - 1}")
        self._rows: dict[Path, SentenceRows] = {}

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: Any) -> SentencePredictionTask:
        # From the flat settings: the classes of a checkpoint's
        # may have to be completed before they are checked.
        settings = typed_settings(args)
        cfg = fields.typed(SentencePredictionTaskConfig, settings.flat)
        data = data_folders(settings.data_path)[0]
        if not os.path.isfile(data):
            known = cfg.completed(data)
            settings = settings.changed(labels=known.labels, sentence_pairs=known.sentence_pairs)
        inputs = input_folders(data)
        # Each of fairseq's folders has a dictionary, and they must be equal: `load_dictionary`
        # compares the ones of a list.
        folder = ":".join(map(str, inputs)) or cfg.data_bin or ""
        if not folder:
            # DATA if it has a dictionary, else the folder of the checkpoint that weights come from,
            # if that has one.
            has_one = any(os.path.exists(Path(each) / DICTIONARY) for each in data_folders(settings.data_path))
            beside = None if has_one else folder_beside(settings.flat.get("finetune_from_model"))
            folder = beside or settings.data_path
        if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, DICTIONARY)):
            if folder == settings.data_path:
                check_sentences(folder)
            raise UserError(
                f"`data_bin` {os.path.join(folder, DICTIONARY)}: file not found; give the data folder of pre-training"
            )
        dictionary = Dictionary.load(folder) if os.path.isfile(folder) else load_dictionary(folder)
        return cls(settings, dictionary, _tokenizer(dictionary, cfg.bpe_codes))

    @classmethod
    def load_dictionary(cls, *words: Any, source: bool = True) -> Dictionary:
        """The dictionary in a file: the last of *words*, which are settings and the file in fairseq
        up to 0.10. One of the *source* has ``<mask>``."""
        dictionary = Dictionary.load(words[-1])
        if source and dictionary.nspecial:
            dictionary.add_mask()
        return dictionary

    @property
    def label_dictionary(self) -> Dictionary:
        """The classes, as scripts written for fairseq number them: after the special symbols."""
        dictionary = Dictionary()
        for label in self.layout.labels:
            dictionary.add_symbol(label)
        return dictionary

    def build_model(self, args: Settings, from_checkpoint: bool = False) -> BaseFairseqModel:
        """The layers of the chosen architecture,
        with a classification head instead of the pre-training head."""
        cfg, model = self.cfg, cast(Any, super().build_model(args))
        if isinstance(getattr(model, "classification_heads", None), nn.ModuleDict):
            # It has heads beside its output layer.
            model.register_classification_head(cfg.classification_head_name, num_classes=self.layout.outputs)
            return model
        return SentenceModel(
            model,
            cfg.classification_head_name,
            self.layout.outputs,
            cfg.pooler_dropout,
            cfg.pooler_activation_fn,
            self.dictionary.pad(),
        )

    def batch_settings(self) -> dict[str, Any]:
        return {"tokens_per_sample": self.cfg.tokens_per_sample}

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> SentenceRows:
        """The rows of *split*, read once and kept in memory;
        of tables, ``valid`` is the development file."""
        data = Path(folder or data_folders(self.settings.data_path)[0])
        inputs = input_folders(data)
        path = data / split if inputs else split_file(data, split, self.layout)
        # Validation comes back to a split every epoch:
        # encoding it again would cost more than its memory.
        if path not in self._rows:
            labelled = not split.startswith(UNLABELLED)
            if inputs:
                sentences = read_sentences(data, split, self.dictionary)
                labels = read_labels(data, split, self.layout, len(sentences), labelled)
            else:
                examples = read_examples(path, self.layout, labelled)
                sentences = [tuple(map(self.encode, example.sentences)) for example in examples]
                labels = [example.label for example in examples]
            if training:
                check_labels(path, labels)
            cut = self.cfg.shorten_method == "truncate"
            self._rows[path] = self._of_ids(sentences, labels, str(path), cut)
        return self._rows[path]

    def rows(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Label | None], name: str) -> SentenceRows:
        """The rows of *texts*, one or two sentences each,
        with their *labels*; *name* stands in warnings.

        They are cut to what the model reads, whatever the settings do with the rows of a split.
        """
        return self._of_ids([tuple(map(self.encode, text)) for text in texts], labels, name, cut=True)

    def _of_ids(
        self, sentences: Sequence[tuple[np.ndarray, ...]], labels: Sequence[Label | None], name: str, cut: bool
    ) -> SentenceRows:
        model: Any = self.settings.model
        known = vars(model) if model is not None else {}
        limit = min(self.cfg.tokens_per_sample, known.get("max_positions", self.cfg.tokens_per_sample))
        return SentenceRows(
            sentences,
            labels,
            self.dictionary,
            limit=limit if cut else None,
            begin=self.begin,
            separator=self.cfg.separator_token,
            # With one type all tokens have type 0, which is the model's default.
            token_types=known.get("token_types", 0) > 1,
            regression=self.layout.is_regression,
            name=name,
        )

    def dummy_sample(self, device: torch.device | str) -> Sample:
        tokens = torch.full((2, 2), self.dictionary.eos(), dtype=torch.long, device=device)
        kind = torch.float32 if self.layout.is_regression else torch.long
        rest = (self.layout.scores,) if self.layout.scores > 1 else ()
        target = torch.empty(0, *rest, dtype=kind, device=device)
        return {"nsentences": 0, "ntokens": 0, "net_input": {"src_tokens": tokens}, "target": target}


def folder_beside(checkpoint: str | Path | None) -> str | None:
    """The folder of *checkpoint* if it has a dictionary,
    as the folders of runs and imports have; else None."""
    if not checkpoint:
        return None
    folder = find_checkpoint(checkpoint).parent
    return str(folder) if os.path.isfile(folder / DICTIONARY) else None


def _tokenizer(dictionary: Dictionary, codes: str | None) -> Tokenizer | None:
    """The tokenizer next to the *dictionary*,
    or of subword-nmt's *codes*; UserError if there are both."""
    assert dictionary.path is not None
    tokenizer = find_tokenizer(dictionary.path, dictionary.symbols)
    if codes is None:
        return tokenizer
    if tokenizer is not None:
        raise UserError(f"`bpe_codes` {codes}: {Path(dictionary.path).parent} has its tokenizer; leave the flag out")
    text = TextConfig(tokenizer="moses", bpe="subword_nmt", bpe_codes=codes)
    return Tokenizer(Moses(), chosen_subwords(text))


__getattr__ = settings_of(__name__, {}, SentencePredictionConfig=SentencePredictionTaskConfig)  # fairseq's names
