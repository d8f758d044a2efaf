"""Classes or scores of single sentences and pairs: fine-tuning of encoders.

Raw TSV files (:mod:`fairseq.data.glue` has the columns, labels and metrics of each GLUE task) are encoded as the
pre-training text was; fairseq's folders (:mod:`fairseq.data.sentence_folders`) are binarised text. Rows are kept in
memory. The model is the encoder of a ``bert`` or ``electra`` model with a head over the first token.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.config import fields
from fairseq.config.command_settings import TextConfig
from fairseq.config.fields import Config, flag
from fairseq.config.registry import register_task
from fairseq.config.settings import Settings, typed_settings
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import data_folders, load_dictionary
from fairseq.data.glue import Label, Layout, check_labels, labels_of, layout_of, read_examples, split_file
from fairseq.data.sentence_folders import check_sentences, classes_of, input_folders, read_labels, read_sentences
from fairseq.data.sentences import SentenceRows
from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel
from fairseq.models.sentence import SentenceModel
from fairseq.modules.transformer_layer import ACTIVATIONS
from fairseq.system.lookup import exists, is_file, is_folder
from fairseq.tasks.fairseq_task import FairseqTask, check_symbols
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers import Tokenizer, find_tokenizer
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.tokenizer import chosen_subwords

FORMER_LABELS = "0,1"  # the default in checkpoints of earlier versions
UNLABELLED = "test"
"""First part of the names of splits that may lack labels."""


@dataclass(frozen=True)
class SentencePredictionTaskConfig(Config):
    """Settings of sentence prediction."""

    glue_task: str | None = flag(None, "GLUE task; sets columns, labels and metrics", metavar="NAME")
    labels: str | None = flag(None, "without `glue_task`: classes (default: the training table's)", metavar="LABEL,…")
    regression_target: bool = flag(False, "without `glue_task`: the column label holds scores, not classes")
    num_classes: int = flag(-1, "number of classes, as a check (-1: as in `labels`)", low=-1)
    sentence_pairs: bool = flag(False, "without `glue_task`: columns sentence1 and sentence2 instead of sentence")
    init_token: int | None = flag(None, "id of the first token of a row (default: <s>)", low=0)
    separator_token: int | None = flag(None, "id of a token between the end of a sentence and the next", low=0)
    shorten_method: str = flag(
        "truncate", "rows longer than `tokens_per_sample`: cut, or left as they are", choices=("none", "truncate")
    )
    data_bin: str | None = flag(
        None, "data folder of pre-training (default: DATA, else beside the checkpoint)", metavar="DIR"
    )
    bpe_codes: str | None = flag(None, "subword-nmt codes of pre-training after `tokenizer` moses", metavar="FILE")
    tokens_per_sample: int = flag(512, "maximum tokens per row; longer rows are truncated", low=4)
    classification_head_name: str = flag(
        "sentence_classification_head", "name of the classification head", metavar="NAME"
    )
    pooler_dropout: float = flag(0.0, "dropout of the classification head", low=0, below=1)
    pooler_activation_fn: str = flag("tanh", "activation of the classification head", choices=tuple(ACTIVATIONS))

    def layout(self) -> Layout:
        """Columns, labels and metrics.

        Raises:
            UserError: unknown GLUE task, fewer than two classes, or settings that contradict each other.
        """
        layout = self._layout()
        if self.num_classes not in (-1, layout.outputs):
            kind = "a score is one number" if layout.is_regression else f"the classes are {', '.join(layout.labels)}"
            raise UserError(f"`num_classes` {self.num_classes}: {kind}; give {layout.outputs}, or leave it out")
        return layout

    def _layout(self) -> Layout:
        if self.glue_task is not None:
            for name in ("labels", "regression_target", "sentence_pairs"):
                if getattr(self, name) not in (getattr(SentencePredictionTaskConfig, name), FORMER_LABELS):
                    raise UserError(
                        f"`{name}`: `glue_task` {self.glue_task} sets columns and labels; leave one of them out"
                    )
            return layout_of(self.glue_task)
        if self.regression_target:
            return Layout(self._sentences(), labels=(), metrics=("pearson", "spearman"))
        if self.labels is None and self.num_classes < 2:
            raise UserError("`labels`: not known without training data; give the classes")
        # A checkpoint of fairseq has their number only.
        names = self.labels if self.labels is not None else ",".join(map(str, range(self.num_classes)))
        labels = tuple(label.strip() for label in names.split(","))
        if len(set(labels)) < 2 or len(set(labels)) < len(labels) or "" in labels:
            raise UserError(f"`labels` {self.labels}: expected two or more different classes, such as no,yes")
        return Layout(self._sentences(), labels=labels)

    def completed(self, folder: str | Path) -> SentencePredictionTaskConfig:
        """These settings with the classes of the training data in *folder*, unless known, and whether it holds pairs.

        Raises:
            UserError: the data cannot be read, have no classes, or no pairs where the settings ask for pairs.
        """
        inputs = input_folders(folder)
        if self.sentence_pairs and len(inputs) == 1:
            raise UserError(f"`sentence_pairs`: {inputs[0]} has no input1 beside it; make that, or leave the flag out")
        cfg = dataclasses.replace(self, sentence_pairs=len(inputs) == 2) if inputs and self.glue_task is None else self
        if self.labels is not None or self.glue_task is not None or self.regression_target:
            return cfg
        check_sentences(folder)
        layout = Layout(self._sentences())
        labels = classes_of(folder) if inputs else labels_of(split_file(folder, "train", layout), layout)
        return dataclasses.replace(cfg, labels=",".join(labels))

    def _sentences(self) -> tuple[str, ...]:
        return ("sentence1", "sentence2") if self.sentence_pairs else ("sentence",)


@register_task("sentence_prediction", dataclass=SentencePredictionTaskConfig)
class SentencePredictionTask(FairseqTask):
    """Prediction of a class or a score of each row of the TSV files, or of binarised text, in the data folder.

    Text of tables is encoded like the pre-training text, with tokenizer and dictionary of ``--data-bin``, to which
    ``<mask>`` is added as in pre-training. Rows are ``<s> a </s>`` or ``<s> a </s> b </s>``.
    """

    def __init__(self, args: Settings, dictionary: Dictionary, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(args)
        self.encode = TextReader(dictionary, tokenizer)
        self.cfg = self.typed(SentencePredictionTaskConfig)
        self.layout = self.cfg.layout()
        self.dictionary = dictionary
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
        # From the flat settings: the classes of a checkpoint's may have to be completed before they are checked.
        settings = typed_settings(args)
        cfg = fields.typed(SentencePredictionTaskConfig, settings.flat)
        data = data_folders(settings.data_path)[0]
        if not is_file(data):
            known = cfg.completed(data)
            settings = settings.changed(labels=known.labels, sentence_pairs=known.sentence_pairs)
        inputs = input_folders(data)
        # Each of fairseq's folders has a dictionary, and they must be equal: `load_dictionary` compares the ones of a
        # list.
        folder = ":".join(map(str, inputs)) or cfg.data_bin or ""
        if not folder:
            # DATA if it has a dictionary, else the folder of the checkpoint that weights come from, if that has one.
            has_one = any(exists(Path(each) / DICTIONARY) for each in data_folders(settings.data_path))
            beside = None if has_one else folder_beside(settings.flat.get("finetune_from_model"))
            folder = beside or settings.data_path
        if is_folder(folder) and not exists(os.path.join(folder, DICTIONARY)):
            if folder == settings.data_path:
                check_sentences(folder)
            raise UserError(
                f"`data_bin` {os.path.join(folder, DICTIONARY)}: file not found; give the data folder of pre-training"
            )
        dictionary = Dictionary.load(folder) if is_file(folder) else load_dictionary(folder)
        return cls(settings, dictionary, _tokenizer(dictionary, cfg.bpe_codes))

    @property
    def label_dictionary(self) -> Dictionary:
        """The classes, as scripts written for fairseq number them: after the special symbols."""
        dictionary = Dictionary()
        for label in self.layout.labels:
            dictionary.add_symbol(label)
        return dictionary

    def build_model(self, args: Settings) -> BaseFairseqModel:
        """The encoder of the chosen architecture, with a classification head instead of the pre-training head."""
        cfg, model = self.cfg, cast(Any, super().build_model(args))
        if model.reads_all_settings and isinstance(getattr(model, "classification_heads", None), nn.ModuleDict):
            # A plug-in's, which has heads beside its output layer.
            model.register_classification_head(cfg.classification_head_name, num_classes=self.layout.outputs)
            return model
        return SentenceModel(
            model,
            cfg.classification_head_name,
            self.layout.outputs,
            cfg.pooler_dropout,
            cfg.pooler_activation_fn,
        )

    def batch_settings(self) -> dict[str, Any]:
        return {"tokens_per_sample": self.cfg.tokens_per_sample}

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> SentenceRows:
        """The rows of *split*, read once and kept in memory; of tables, ``valid`` is the development file."""
        data = Path(folder or data_folders(self.settings.data_path)[0])
        inputs = input_folders(data)
        path = data / split if inputs else split_file(data, split, self.layout)
        # Validation comes back to a split every epoch: encoding it again would cost more than its memory.
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
        """The rows of *texts*, one or two sentences each, with their *labels*; *name* stands in warnings.

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
            begin=self.cfg.init_token,
            separator=self.cfg.separator_token,
            # With one type all tokens have type 0, which is the model's default.
            token_types=known.get("token_types", 0) > 1,
            regression=self.layout.is_regression,
            name=name,
        )

    def dummy_sample(self, device: torch.device | str) -> Sample:
        tokens = torch.full((2, 2), self.dictionary.eos(), dtype=torch.long, device=device)
        kind = torch.float32 if self.layout.is_regression else torch.long
        target = torch.empty(0, dtype=kind, device=device)
        return {"nsentences": 0, "ntokens": 0, "net_input": {"src_tokens": tokens}, "target": target}


def folder_beside(checkpoint: str | Path | None) -> str | None:
    """The folder of *checkpoint* if it has a dictionary, as the folders of runs and imports have; else None."""
    if not checkpoint:
        return None
    folder = find_checkpoint(checkpoint).parent
    return str(folder) if is_file(folder / DICTIONARY) else None


def _tokenizer(dictionary: Dictionary, codes: str | None) -> Tokenizer | None:
    """The tokenizer beside the *dictionary*, or of subword-nmt's *codes*; UserError if there are both."""
    assert dictionary.path is not None
    tokenizer = find_tokenizer(dictionary.path, dictionary.symbols)
    if codes is None:
        return tokenizer
    if tokenizer is not None:
        raise UserError(f"`bpe_codes` {codes}: {Path(dictionary.path).parent} has its tokenizer; leave the flag out")
    text = TextConfig(tokenizer="moses", bpe="subword_nmt", bpe_codes=codes)
    return Tokenizer(Moses(), chosen_subwords(text))
