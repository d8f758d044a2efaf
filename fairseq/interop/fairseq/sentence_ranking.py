"""fairseq's ``sentence_ranking``: the right one of several sentences, each scored by a head with
one output."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fairseq.config.settings import Settings, typed_settings
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Loss, Sample, logging_output
from fairseq.criterions.settings import HEAD, SentenceRankingCriterionConfig
from fairseq.data.folders import data_folders, load_dictionary
from fairseq.data.glue import Layout, label_of, read_lines
from fairseq.errors import UserError
from fairseq.interop.fairseq import datasets
from fairseq.interop.fairseq.block_datasets import load_indexed_dataset
from fairseq.interop.fairseq.collated import CollatedDataset
from fairseq.logging.figures import SIZE, Figure, ratio
from fairseq.models.base import BaseFairseqModel
from fairseq.models.sentence import SentenceModel
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.settings import SentenceRankingTaskConfig
from fairseq.text.dictionary import Dictionary


class SentenceRankingCriterion(FairseqCriterion):
    """Cross-entropy of the right one among the candidates ``net_input1``, ``net_input2``, … of each
    row.

    In evaluation, rows of *save_predictions* are id, chosen number and right number, the numbers
    from 0.

    Raises:
        UserError: the file cannot be written, at the first validation.
    """

    config_class = SentenceRankingCriterionConfig
    carries_state = False

    def __init__(self, task: FairseqTask, ranking_head_name: str = HEAD, save_predictions: str | None = None) -> None:
        super().__init__(task)
        self.ranking_head_name, self.file = ranking_head_name, save_predictions
        self.mode = "w"  # of the first write, which replaces an earlier run's file

    def check(self, model: BaseFairseqModel) -> None:
        if self.ranking_head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"`criterion` sentence_ranking: {type(model).__name__} has no head {self.ranking_head_name}; "
                "use `task` sentence_ranking, or register_classification_head with num_classes=1"
            )

    def step(self, model: Any, sample: Sample, inputs: Any) -> tuple[Loss, dict[str, Any]]:
        return self(model, sample), {}

    def forward(self, model: BaseFairseqModel, sample: Sample, reduce: bool = True) -> Loss:
        size = sample["nsentences"]
        # A dummy sample has rows, no candidates, and no targets: its loss is 0.
        names = [f"net_input{number}" for number in range(1, self.task.args.num_classes + 1)] if size else ["net_input"]
        scores = [model(**sample[name], classification_head_name=self.ranking_head_name)[0] for name in names]
        logits = torch.cat(scores, 1).float()  # (B, candidates)
        chosen = logits.argmax(1)
        target = sample["target"].flatten() if size and "target" in sample else None
        if self.file is not None and not self.training:
            columns = [sample["id"], chosen] + ([target] if target is not None else []) if size else []
            self._write(torch.stack(columns, 1).tolist() if columns else [])
        loss = logits.sum() * 0 if target is None else F.cross_entropy(logits, target, reduction="sum")
        correct = (chosen == target).sum() if target is not None else torch.zeros_like(chosen).sum()
        return loss, size, {**logging_output(loss, sample, size), "ncorrect": correct}

    def _write(self, rows: list[list[int]]) -> None:
        """Write the *rows* of all processes: each validates a batch, or a dummy one, at a time."""
        if dist.is_available() and dist.is_initialized():
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, rows)
            if dist.get_rank() > 0:
                return
            rows = [row for part in gathered for row in part]
        try:
            with open(str(self.file), self.mode, encoding="utf-8") as file:
                file.writelines("\t".join(map(str, row)) + "\n" for row in rows)
        except OSError as error:
            raise UserError(f"`save_predictions` {self.file}: cannot be written ({error.strerror})") from None
        self.mode = "a"

    def figures(self) -> dict[str, Figure]:
        """``loss`` in bits a row, and ``accuracy`` in percent."""
        return {"loss": ratio("loss", SIZE, 1 / math.log(2)), "accuracy": ratio("ncorrect", SIZE, 100)}


class SentenceRankingTask(FairseqTask):
    """Rows of binarised folders ``input1`` … ``inputN``, each before ``input0`` where there is one.

    ``label/SPLIT.label`` has the number of the right input, from 0, of each row.
    """

    config_class = SentenceRankingTaskConfig
    reads = ("shorten_method",)

    def __init__(self, args: Settings, dictionary: Dictionary) -> None:
        super().__init__(args)
        self.cfg, self.dictionary = self.typed(SentenceRankingTaskConfig), dictionary
        if dictionary.nspecial:
            dictionary.add_mask()

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: Any) -> SentenceRankingTask:
        settings = typed_settings(args)
        return cls(settings, load_dictionary(data_folders(settings.data_path)[0] / "input1"))

    def build_model(self, args: Settings) -> BaseFairseqModel:
        """The encoder of the chosen architecture, with a head of one output instead of the
        pre-training head."""
        name = self.settings.flat.get("ranking_head_name", HEAD)
        return SentenceModel(super().build_model(args), name, 1, self.cfg.pooler_dropout, self.cfg.pooler_activation_fn)

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> CollatedDataset:
        data, cfg = Path(folder or data_folders(self.settings.data_path)[0]), self.cfg
        context: Any = None
        if os.path.isdir(data / "input0"):
            context = datasets.PrependTokenDataset(self._lines(data / "input0", split), cfg.separator_token)
        sample: dict[str, object] = {"id": datasets.IdDataset(), "nsentences": datasets.NumSamplesDataset()}
        limit, sizes = getattr(self.settings.model, "max_positions", None), []
        for number in range(1, cfg.num_classes + 1):
            row: Any = datasets.PrependTokenDataset(self._lines(data / f"input{number}", split), cfg.init_token)
            if cfg.max_option_length is not None:
                row = datasets.TruncateDataset(row, cfg.max_option_length)
            row = row if context is None else datasets.ConcatSentencesDataset(row, context)
            if limit is not None:
                method, seed = cfg.shorten_method, self.settings.common.seed
                row = datasets.maybe_shorten_dataset(row, split, "", method, limit, seed)
            sample[f"net_input{number}"] = {"src_tokens": datasets.RightPadDataset(row, self.dictionary.pad())}
            sizes.append(np.asarray(row.sizes))
        sample["ntokens"] = datasets.NumelDataset(row, reduce=True)
        labels = data / "label" / f"{split}.label"
        if training or os.path.isfile(labels):
            sample["target"] = datasets.RawLabelDataset(self._labels(labels, len(row)))
        return CollatedDataset(datasets.NestedDictionaryDataset(sample, [np.max(sizes, 0)]))

    def _lines(self, folder: Path, split: str) -> Any:
        lines = load_indexed_dataset(str(folder / split), self.dictionary)
        if lines is None:
            raise UserError(f"{folder / split}.idx: file not found; binarise each input with fairseq-preprocess")
        return lines

    def _labels(self, path: Path, rows: int) -> list[int]:
        """The numbers in the file of labels.

        Raises:
            UserError: there are too few or too many, or one is no number of an input.
        """
        lines, layout = read_lines(path), Layout((), labels=tuple(map(str, range(self.cfg.num_classes))))
        if len(lines) != rows:
            raise UserError(f"{path}: {len(lines)} lines where the inputs have {rows}; give one label for each row")
        labels = (label_of(f"{path}: line {number}", line.strip(), layout) for number, line in enumerate(lines, 1))
        return [int(label) for label in labels if isinstance(label, float)]
