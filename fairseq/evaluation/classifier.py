"""Classification with a fine-tuned model,
of new text and of splits, and the table of several runs."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq import checkpoint
from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.criterions.sentence_prediction import PREDICTIONS, metric_figures, predictions
from fairseq.data.glue import TableLayout
from fairseq.data.sentences import SentenceRows
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.models.base import BaseFairseqModel
from fairseq.models.sentence import SentenceModel
from fairseq.modules import devices
from fairseq.system.files import atomic_file
from fairseq.system.tables import table
from fairseq.tasks.sentence_prediction import SentencePredictionTask

Text = str | tuple[str, str]
"""A sentence, or a pair of sentences."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one text.

    Attributes:
        label: the most probable class; None in regression.
        score: its probability; in regression the predicted score.
        probabilities: of every class; empty in regression.
    """

    label: str | None
    score: float
    probabilities: Mapping[str, float]


@torch.inference_mode()
def row_logits(model: BaseFairseqModel, rows: SentenceRows, batch_size: int) -> Tensor:
    """Logits of the classes, or scores, of all *rows*: float32 [rows, outputs], on the CPU."""
    device = next(model.parameters()).device
    # By length: rows of a batch are padded to the longest.
    order = torch.from_numpy(rows.sizes).argsort(stable=True)
    logits = []
    for indices in order.split(batch_size):
        net_input = rows.batch(indices.numpy())["net_input"]
        logits.append(model(**{name: value.to(device) for name, value in net_input.items()})[0].float().cpu())
    return torch.cat(logits)[order.argsort()]


class SentenceClassifier:
    """A fine-tuned model, in evaluation mode, that predicts
    classes or scores of text, encoded as in fine-tuning."""

    def __init__(self, model: SentenceModel, task: SentencePredictionTask) -> None:
        self.model = model
        self.task = task

    @classmethod
    def from_pretrained(
        cls,
        checkpoint_path: str | Path,
        data: str | Path | None = None,
        *,
        device: torch.device | str = "cpu",
        state: Mapping[str, Any] | None = None,
    ) -> SentenceClassifier:
        """Load a checkpoint of ``fairseq-finetune`` or of ``--task sentence_prediction``.

        Args:
            checkpoint_path: the file, or a folder with the best or else the last one of a run.
            data: folder of the dictionary and the tokenizer,
                or a ``dict.txt``; None: the folder of the checkpoint.
            device: where the model runs; ``auto``: on a GPU if there is one.
            state: the content of the checkpoint where it has been read already.

        Raises:
            UserError: a file is missing or invalid, or the model is no classifier.
        """
        path = find_checkpoint(checkpoint_path)
        folder = path.parent if data is None else Path(data)
        dictionary = folder / DICTIONARY if os.path.isdir(folder) else folder
        state = checkpoint.load(path, only="model") if state is None else state
        if state["args"].get("task") != "sentence_prediction":
            raise UserError(f"{path}: not a fine-tuned classifier; give a checkpoint of fairseq-finetune")
        if not os.path.isfile(dictionary):
            raise UserError(f"{dictionary}: file not found; give the data folder of pre-training with `data`")
        # The checkpoint names the folder on the machine it was trained on.
        [model], task, _ = load_models(
            [path], dictionary.parent, settings={"data_bin": str(dictionary)}, states=[state]
        )
        if isinstance(task, SentencePredictionTask) and task.layout.scores > 1:
            raise UserError(f"{path}: predicts {task.layout.scores} scores a text; only one is supported")
        if not isinstance(model, SentenceModel) or not isinstance(task, SentencePredictionTask):
            raise UserError(f"{path}: {type(model).__name__} is not a classifier of this package")
        return cls(model.to(devices.chosen(device)), task)

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes by number; empty in regression."""
        return self.task.layout.labels

    @property
    def takes_pairs(self) -> bool:
        """Whether a text is a pair of sentences."""
        return len(self.task.layout.sentences) == 2

    def logits(self, texts: Sequence[Text], batch_size: int = 32) -> Tensor:
        """Logits of the classes, or scores, of *texts*: float32 [texts, outputs], on the CPU.

        Args:
            texts: sentences, or pairs of them where
                :attr:`takes_pairs`; too long ones are truncated.
            batch_size: texts at once; texts of similar length go together.

        Raises:
            ValueError: a text is a pair where one sentence is expected, or the other way round.
        """
        sentences = [self._sentences(text) for text in texts]
        return row_logits(self.model, self.task.rows(sentences, [None] * len(sentences), "input"), batch_size)

    def classify(self, texts: Sequence[Text], batch_size: int = 32) -> list[Prediction]:
        """Predict the class, or the score, of each of *texts*; see :meth:`logits`."""
        if not texts:
            return []
        # In float64, so that probabilities of many classes sum to 1 in what is printed.
        logits = devices.exact(self.logits(texts, batch_size))
        if self.task.layout.is_regression:
            return [Prediction(None, score, {}) for score in logits.squeeze(1).tolist()]
        results = []
        for row in logits.softmax(1).tolist():
            probabilities = dict(zip(self.labels, row, strict=True))
            label = max(probabilities, key=probabilities.__getitem__)
            results.append(Prediction(label, probabilities[label], probabilities))
        return results

    def _sentences(self, text: Text) -> tuple[str, ...]:
        sentences = (text,) if isinstance(text, str) else tuple(text)
        if len(sentences) != len(self.task.layout.sentences):
            expected = "pairs of sentences" if self.takes_pairs else "single sentences"
            raise ValueError(f"{text!r:.80}: the model reads {expected}")
        return sentences


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a split, in the order of the file."""

    predicted: Tensor  # classes or scores, float64 [n]
    target: Tensor | None  # the labels, float64 [n]; None where the file has none
    layout: TableLayout  # of the task

    def metrics(self) -> dict[str, float]:
        """The task's metrics and ``score``, in percent; empty without labels."""
        if self.target is None:
            return {}
        gathered = {PREDICTIONS: torch.stack([self.predicted, self.target], dim=1)}
        return {name: metric.compute(gathered) for name, metric in metric_figures(self.layout.metrics).items()}

    def write(self, path: Path) -> None:
        """Write ``index`` and ``prediction`` as GLUE's
        submissions have them, whole or not at all."""
        labels = self.layout.labels
        texts = [labels[int(value)] if labels else f"{value:.4f}" for value in self.predicted.tolist()]
        lines = ["index\tprediction", *(f"{index}\t{name}" for index, name in enumerate(texts))]
        with atomic_file(path) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())


def predict(model: BaseFairseqModel, task: SentencePredictionTask, split: str, batch_size: int = 32) -> Predictions:
    """Predict every row of *split*, e.g. ``valid`` or ``test``,
    with a fine-tuned *model* in evaluation mode.

    Raises:
        UserError: the split's file cannot be used.
    """
    rows = task.dataset(split)
    predicted = devices.exact(predictions(row_logits(model, rows, batch_size), task.layout.is_regression))
    target = None if None in rows.labels else torch.tensor(rows.labels, dtype=torch.float32).double()
    return Predictions(predicted, target, task.layout)


@dataclass(frozen=True)
class FinetunedRun:
    """The best checkpoint of one run: metrics of the development file,
    in percent, and folder of the predictions."""

    lr: float
    seed: int
    figures: Mapping[str, float]
    folder: str


@dataclass(frozen=True)
class RateSummary:
    """Mean and sample standard deviation of each metric
    over the runs of one learning rate; NaN for one run."""

    lr: float
    runs: int
    mean: Mapping[str, float]
    deviation: Mapping[str, float]


def summarize(runs: Sequence[FinetunedRun]) -> list[RateSummary]:
    """Mean and deviation over the seeds of each learning rate, in the order of the runs."""
    summaries = []
    for lr in dict.fromkeys(run.lr for run in runs):
        of_seeds = [run.figures for run in runs if run.lr == lr]
        columns = {name: [metrics[name] for metrics in of_seeds] for name in of_seeds[0]}
        mean = {name: statistics.fmean(values) for name, values in columns.items()}
        deviation = {name: statistics.stdev(v) if len(v) > 1 else math.nan for name, v in columns.items()}
        summaries.append(RateSummary(lr, len(of_seeds), mean, deviation))
    return summaries


def best_rate(summaries: Sequence[RateSummary]) -> RateSummary:
    """The rate with the highest mean ``score`` on the development file; the first of equals."""
    # By the mean over the seeds: the best single run would choose the luckiest seed.
    return max(summaries, key=lambda summary: -math.inf if math.isnan(summary.mean["score"]) else summary.mean["score"])


def as_table(summaries: Sequence[RateSummary]) -> str:
    """A table of mean ± deviation, the best rate marked."""
    names = list(summaries[0].mean)
    rows, best = [["lr", "runs", *names]], best_rate(summaries)
    for summary in summaries:
        cells = [f"{summary.lr:g}" + (" (best)" if summary is best else ""), str(summary.runs)]
        for name in names:
            deviation = summary.deviation[name]
            cells.append(f"{summary.mean[name]:.2f}" + ("" if math.isnan(deviation) else f" ± {deviation:.2f}"))
        rows.append(cells)
    return "\n".join(table(rows))
