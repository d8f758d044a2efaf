"""fairseq's ``sentence_ranking``: the right one of several sentences, each scored by a head with
one output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.config.settings import Settings, typed_settings
from fairseq.config.shared import BlockConfig
from fairseq.criterions.settings import HEAD
from fairseq.data import datasets
from fairseq.data.block_datasets import load_indexed_dataset
from fairseq.data.collated import CollatedDataset
from fairseq.data.folders import data_folders, load_dictionary
from fairseq.data.glue import TableLayout, label_of, read_lines
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.sentence import SentenceModel
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.settings import SentenceRankingTaskConfig
from fairseq.text.dictionary import Dictionary


class SentenceRankingTask(FairseqTask):
    """Rows of binarised folders ``input1`` … ``inputN``, each before ``input0`` where there is one.

    ``label/SPLIT.label`` has the number of the right input, from 0, of each row.
    """

    config_class = SentenceRankingTaskConfig
    reads = ("shorten_method",)

    def __init__(self, args: Settings, dictionary: Dictionary) -> None:
        super().__init__(args)
        self.cfg, self.dictionary = self.typed(SentenceRankingTaskConfig), dictionary
        if dictionary.nspecial and not isinstance(self.settings.model, BlockConfig):  # decoders have none
            dictionary.add_mask()

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: Any) -> SentenceRankingTask:
        settings = typed_settings(args)
        return cls(settings, load_dictionary(data_folders(settings.data_path)[0] / "input1"))

    def build_model(self, args: Settings, from_checkpoint: bool = False) -> BaseFairseqModel:
        """The layers of the chosen architecture, with a head of one output instead of the
        pre-training head."""
        name, cfg, pad = self.settings.flat.get("ranking_head_name", HEAD), self.cfg, self.dictionary.pad()
        return SentenceModel(super().build_model(args), name, 1, cfg.pooler_dropout, cfg.pooler_activation_fn, pad)

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
        lines, layout = read_lines(path), TableLayout((), labels=tuple(map(str, range(self.cfg.num_classes))))
        if len(lines) != rows:
            raise UserError(f"{path}: {len(lines)} lines where the inputs have {rows}; give one label for each row")
        labels = (label_of(f"{path}: line {number}", line.strip(), layout) for number, line in enumerate(lines, 1))
        return [int(label) for label in labels if isinstance(label, float)]
