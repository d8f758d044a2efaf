"""Settings of the tasks. Nothing here imports torch or NumPy: command lines are parsed without
them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from fairseq.config.fields import Config, flag
from fairseq.config.shared import BREAK_MODES
from fairseq.criterions.settings import HEAD
from fairseq.data.glue import TableLayout, labels_of, layout_of, split_file
from fairseq.errors import SettingError, UserError
from fairseq.modules import ACTIVATIONS

FORMER_LABELS = "0,1"  # the default in checkpoints of earlier versions


@dataclass(frozen=True)
class MaskedLMTaskConfig(Config):
    """Settings of masked language modelling."""

    sample_break_mode: str = flag(
        "complete", "block boundaries; longer lines are cut at `max_positions`", choices=BREAK_MODES
    )
    tokens_per_sample: int = flag(512, "tokens per row, begin symbol included; longer lines stay whole", low=2)
    mask_prob: float = flag(0.15, "fraction of tokens chosen for prediction", above=0, below=1)
    leave_unmasked_prob: float = flag(0.1, "fraction of chosen tokens left unchanged", low=0, high=1)
    random_token_prob: float = flag(0.1, "fraction of chosen tokens replaced by random ones", low=0, high=1)
    mask_whole_words: bool = flag(False, "choose all tokens of a word together")
    freq_weighted_replacement: bool = flag(False, "draw random replacements by their counts in the dictionary")

    def check(self) -> None:
        """Raise SettingError if the shares exceed 1."""
        if self.leave_unmasked_prob + self.random_token_prob > 1:
            raise SettingError(
                f"`random_token_prob` {self.random_token_prob}: with `leave_unmasked_prob` {self.leave_unmasked_prob} "
                "the sum is above 1; lower one of them"
            )


@dataclass(frozen=True)
class SentencePredictionTaskConfig(Config):
    """Settings of sentence prediction."""

    glue_task: str | None = flag(None, "GLUE task; sets columns, labels and metrics", metavar="NAME")
    labels: str | None = flag(None, "without `glue_task`: classes (default: the training table's)", metavar="LABEL,…")
    regression_target: bool = flag(False, "without `glue_task`: the column label holds scores, not classes")
    num_classes: int = flag(-1, "number of classes, as a check (-1: as in `labels`), or of scores", low=-1)
    sentence_pairs: bool = flag(False, "without `glue_task`: columns sentence1 and sentence2 instead of sentence")
    init_token: int | None = flag(None, "id of the first token of a row (default: <s>; of decoders </s>)", low=0)
    separator_token: int | None = flag(None, "id of a token between the end of a sentence and the next", low=0)
    shorten_method: str = flag(
        "truncate", "rows longer than `tokens_per_sample`: cut, or left as they are", choices=("none", "truncate")
    )
    data_bin: str | None = flag(
        None, "data folder of pre-training (default: DATA, else next to the checkpoint)", metavar="DIR", stored=False
    )
    bpe_codes: str | None = flag(
        None, "subword-nmt codes of pre-training after `tokenizer` moses", metavar="FILE", stored=False
    )
    tokens_per_sample: int = flag(512, "maximum tokens per row; longer rows are truncated", low=4)
    classification_head_name: str = flag(HEAD, "name of the classification head", metavar="NAME")
    pooler_dropout: float = flag(0.0, "dropout of the classification head", low=0, below=1)
    pooler_activation_fn: str = flag("tanh", "activation of the classification head", choices=ACTIVATIONS)

    def layout(self) -> TableLayout:
        """Columns, labels and metrics.

        Raises:
            UserError: unknown GLUE task, fewer than two classes,
                or settings that contradict each other.
        """
        layout = self._layout()
        if self.num_classes not in (-1, layout.outputs):
            kind = "a score is one number" if layout.is_regression else f"the classes are {', '.join(layout.labels)}"
            raise UserError(f"`num_classes` {self.num_classes}: {kind}; give {layout.outputs}, or leave it out")
        return layout

    def _layout(self) -> TableLayout:
        if self.glue_task is not None:
            for name in ("labels", "regression_target", "sentence_pairs"):
                if getattr(self, name) not in (getattr(SentencePredictionTaskConfig, name), FORMER_LABELS):
                    raise UserError(
                        f"`{name}`: `glue_task` {self.glue_task} sets columns and labels; leave one of them out"
                    )
            return layout_of(self.glue_task)
        if self.regression_target:
            return TableLayout(
                self._sentences(), labels=(), metrics=("pearson", "spearman"), scores=max(1, self.num_classes)
            )
        if self.labels is None and self.num_classes < 2:
            raise UserError("`labels`: not known without training data; give the classes")
        # A checkpoint of fairseq has their number only.
        names = self.labels if self.labels is not None else ",".join(map(str, range(self.num_classes)))
        labels = tuple(label.strip() for label in names.split(","))
        if len(set(labels)) < 2 or len(set(labels)) < len(labels) or "" in labels:
            raise UserError(f"`labels` {self.labels}: expected two or more different classes, such as no,yes")
        return TableLayout(self._sentences(), labels=labels)

    def completed(self, folder: str | Path) -> SentencePredictionTaskConfig:
        """These settings with the classes of the training data in *folder*, unless known, and
        whether it holds pairs.

        Raises:
            UserError: the data cannot be read, have no classes,
                or no pairs where the settings ask for pairs.
        """
        # Imported here, because it imports NumPy, half of the start of a command.
        from fairseq.data.sentence_folders import check_sentences, classes_of, input_folders

        inputs = input_folders(folder)
        if self.sentence_pairs and len(inputs) == 1:
            raise UserError(f"`sentence_pairs`: {inputs[0]} no input1 in its folder; make one, or leave the flag out")
        cfg = dataclasses.replace(self, sentence_pairs=len(inputs) == 2) if inputs and self.glue_task is None else self
        if self.labels is not None or self.glue_task is not None or self.regression_target:
            return cfg
        check_sentences(folder)
        layout = TableLayout(self._sentences())
        labels = classes_of(folder) if inputs else labels_of(split_file(folder, "train", layout), layout)
        return dataclasses.replace(cfg, labels=",".join(labels))

    def _sentences(self) -> tuple[str, ...]:
        return ("sentence1", "sentence2") if self.sentence_pairs else ("sentence",)


@dataclass(frozen=True)
class SentenceRankingTaskConfig(Config):
    """Settings of sentence ranking."""

    num_classes: int = flag(2, "number of candidates", low=2)
    init_token: int | None = flag(None, "id of a token before each candidate", low=0)
    separator_token: int | None = flag(None, "id of a token before the text of input0", low=0)
    max_option_length: int | None = flag(None, "maximum tokens of a candidate", low=1)
    shorten_method: str = flag(
        "none", "rows longer than the model's positions", choices=("none", "truncate", "random_crop")
    )
    pooler_dropout: float = flag(0.0, "dropout of the head", low=0, below=1)
    pooler_activation_fn: str = flag("tanh", "activation of the head", choices=ACTIVATIONS)
