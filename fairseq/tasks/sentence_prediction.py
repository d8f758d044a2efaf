"""Classes or scores of single sentences and pairs: fine-tuning of encoders.

Raw TSV files (:mod:`fairseq.data.glue` has the columns, labels and metrics of each GLUE task) are encoded as the
pre-training text was, and their rows kept in memory. The model is the encoder of a ``bert`` or ``electra`` model with
a head over the first token, under fairseq's names ``classification_heads.NAME.…``; output layer and generator are
dropped. Metrics are computed from gathered predictions.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.config import fields
from fairseq.config.command_settings import TextConfig
from fairseq.config.fields import Config, flag
from fairseq.config.registry import register_task
from fairseq.config.settings import Settings, typed_settings
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import data_folders, load_dictionary
from fairseq.data.glue import Label, Layout, check_labels, labels_of, layout_of, read_examples, split_file
from fairseq.data.sentences import SentenceEncoder, SentenceRows
from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel
from fairseq.models.sentence import SentenceModel
from fairseq.modules.transformer_layer import ACTIVATIONS
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer, find_tokenizer
from fairseq.text.tokenizers.choice import chosen_subwords
from fairseq.text.tokenizers.moses import Moses

FORMER_LABELS = "0,1"  # the default in checkpoints of earlier versions
UNLABELLED = "test"
"""First part of the names of splits that may lack labels."""


@dataclass(frozen=True)
class SentencePredictionConfig(Config):
    """Settings of sentence prediction."""

    glue_task: str | None = flag(None, "GLUE task; sets columns, labels and metrics", metavar="NAME")
    labels: str | None = flag(
        None, "without `glue_task`: classes (default: those of the training table)", metavar="LABEL,…"
    )
    regression_target: bool = flag(False, "without `glue_task`: the column label holds scores, not classes")
    sentence_pairs: bool = flag(False, "without `glue_task`: columns sentence1 and sentence2 instead of sentence")
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
            UserError: unknown GLUE task, fewer than two classes, or settings that a GLUE task has already.
        """
        if self.glue_task is not None:
            self._check_left_to_glue()
            return layout_of(self.glue_task)
        if self.regression_target:
            return Layout(self._sentences(), labels=(), metrics=("pearson", "spearman"))
        if self.labels is None:
            raise UserError("`labels`: not known without a training table; give the classes")
        labels = tuple(label.strip() for label in self.labels.split(","))
        if len(set(labels)) < 2 or len(set(labels)) < len(labels) or "" in labels:
            raise UserError(f"`labels` {self.labels}: expected two or more different classes, such as no,yes")
        return Layout(self._sentences(), labels=labels)

    def with_labels_of(self, folder: str | Path) -> SentencePredictionConfig:
        """These settings with the classes of the training table in *folder*, unless they are known.

        Raises:
            UserError: the table cannot be read or has no classes.
        """
        if self.labels is not None or self.glue_task is not None or self.regression_target:
            return self
        layout = Layout(self._sentences())
        return dataclasses.replace(self, labels=",".join(labels_of(split_file(folder, "train", layout), layout)))

    def _sentences(self) -> tuple[str, ...]:
        return ("sentence1", "sentence2") if self.sentence_pairs else ("sentence",)

    def _check_left_to_glue(self) -> None:
        for name in ("labels", "regression_target", "sentence_pairs"):
            if getattr(self, name) not in (getattr(SentencePredictionConfig, name), FORMER_LABELS):
                raise UserError(
                    f"`{name}`: `glue_task` {self.glue_task} sets columns and labels; leave one of them out"
                )


@register_task("sentence_prediction", dataclass=SentencePredictionConfig)
class SentencePredictionTask(FairseqTask):
    """Prediction of a class or a score of each row of the TSV files in the data folder.

    Text is encoded like the pre-training text, with tokenizer and dictionary of ``--data-bin``, to which ``<mask>`` is
    added as in pre-training. Rows are ``<s> a </s>`` or ``<s> a </s> b </s>``.
    """

    def __init__(self, args: Settings, dictionary: Dictionary, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(args)
        self.encode = SentenceEncoder(dictionary, tokenizer)
        self.cfg = self.typed(SentencePredictionConfig)
        self.layout = self.cfg.layout()
        self.dictionary = dictionary
        if dictionary.nspecial:
            dictionary.add_mask()
        for role in ("bos", "pad"):
            if getattr(dictionary, f"{role}_index") < 0:
                raise UserError(
                    f"{dictionary.path or DICTIONARY}: `task` sentence_prediction needs a {role} symbol, which the "
                    f"dictionary lacks; name one as {role}=WORD in its #specials line"
                )
        self._rows: dict[Path, SentenceRows] = {}

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: Any) -> SentencePredictionTask:
        settings = typed_settings(args)
        cfg = fields.typed(SentencePredictionConfig, settings.flat)
        data = data_folders(settings.data_path)[0]
        if not data.is_file():
            settings = settings.changed(labels=cfg.with_labels_of(data).labels)
        folder = cfg.data_bin or _dictionary_folder(settings)
        if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, DICTIONARY)):
            raise UserError(
                f"`data_bin` {os.path.join(folder, DICTIONARY)}: file not found; give the data folder of pre-training"
            )
        dictionary = Dictionary.load(folder) if os.path.isfile(folder) else load_dictionary(folder)
        return cls(settings, dictionary, _tokenizer(dictionary, cfg.bpe_codes))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    def build_model(self, args: Settings) -> BaseFairseqModel:
        """The encoder of the chosen architecture, with a classification head instead of the pre-training head."""
        cfg = self.cfg
        return SentenceModel(
            super().build_model(args),
            cfg.classification_head_name,
            self.layout.outputs,
            cfg.pooler_dropout,
            cfg.pooler_activation_fn,
        )

    def batch_settings(self) -> dict[str, Any]:
        return {"tokens_per_sample": self.cfg.tokens_per_sample}

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> SentenceRows:
        """The rows of ``SPLIT.tsv``, encoded once and kept in memory; ``valid`` is the development file."""
        path = split_file(folder or data_folders(self.settings.data_path)[0], split, self.layout)
        if path not in self._rows:
            self._rows[path] = self._read(path, split, training)
        return self._rows[path]

    def _read(self, path: Path, split: str, training: bool) -> SentenceRows:
        examples = read_examples(path, self.layout, labelled=not split.startswith(UNLABELLED))
        if training:
            check_labels(path, examples)
        texts, labels = ([getattr(example, name) for example in examples] for name in ("sentences", "label"))
        return self.rows(texts, labels, str(path))

    def rows(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Label | None], name: str) -> SentenceRows:
        """The rows of *texts*, one or two sentences each, with their *labels*; *name* stands in warnings."""
        model: Any = self.settings.model
        known = vars(model) if model is not None else {}
        return SentenceRows(
            [tuple(self.encode(text) for text in sentences) for sentences in texts],
            labels,
            self.dictionary,
            limit=min(self.cfg.tokens_per_sample, known.get("max_positions", self.cfg.tokens_per_sample)),
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
    """The folder that *checkpoint* is in if it has a dictionary, as the folders of runs and imports have; else None.

    Raises:
        UserError: *checkpoint* is a folder without one.
    """
    if not checkpoint:
        return None
    folder = find_checkpoint(checkpoint).parent
    return str(folder) if (folder / DICTIONARY).is_file() else None


def _dictionary_folder(settings: Settings) -> str:
    """DATA if it has a dictionary, else the folder of the checkpoint that weights come from, if that has one."""
    if any((Path(folder) / DICTIONARY).exists() for folder in data_folders(settings.data_path)):
        return settings.data_path
    return folder_beside(settings.flat.get("finetune_from_model")) or settings.data_path


def _tokenizer(dictionary: Dictionary, codes: str | None) -> Tokenizer | None:
    """The tokenizer of pre-training, which is beside the *dictionary*, or made from subword-nmt's *codes*.

    Raises:
        UserError: both are given, or one cannot be read.
    """
    assert dictionary.path is not None
    found = find_tokenizer(dictionary.path, dictionary.symbols)
    if codes is None:
        return found
    if found is not None:
        raise UserError(f"`bpe_codes` {codes}: {Path(dictionary.path).parent} has its tokenizer; leave the flag out")
    text = TextConfig(tokenizer="moses", bpe="subword_nmt", bpe_codes=codes)
    return Tokenizer(Moses(), chosen_subwords(text))
