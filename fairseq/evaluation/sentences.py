"""Predictions of a fine-tuned model on a split, and the table of several runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fairseq.criterions.sentence_prediction import PREDICTIONS, metric_figures, predictions
from fairseq.data.glue import Layout
from fairseq.evaluation.tables import markdown
from fairseq.models import BaseFairseqModel
from fairseq.system.files import atomic_file
from fairseq.tasks.sentence_prediction import SentencePredictionTask


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a split, in the order of the file.

    Attributes:
        predicted: classes or scores, float64 [n].
        target: the labels, float64 [n]; None where the file has none.
        layout: of the task.
    """

    predicted: Tensor
    target: Tensor | None
    layout: Layout

    def metrics(self) -> dict[str, float]:
        """The task's metrics and ``score``, in percent; empty without labels."""
        if self.target is None:
            return {}
        gathered = {PREDICTIONS: torch.stack([self.predicted, self.target], dim=1)}
        return {name: metric.compute(gathered) for name, metric in metric_figures(self.layout.metrics).items()}

    def write(self, path: Path) -> None:
        """Write ``index`` and ``prediction`` as GLUE's submissions have them, whole or not at all."""
        labels = self.layout.labels
        texts = [labels[int(value)] if labels else f"{value:.4f}" for value in self.predicted.tolist()]
        lines = ["index\tprediction", *(f"{index}\t{name}" for index, name in enumerate(texts))]
        with atomic_file(path) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())


@torch.no_grad()
def predict(
    model: BaseFairseqModel,
    task: SentencePredictionTask,
    split: str,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Predictions:
    """Predict every row of *split*.

    Args:
        model: fine-tuned, in evaluation mode, on *device*.
        task: whose files are read.
        split: e.g. ``valid`` or ``test``.
        batch_size: rows at once; rows of similar sizes go together.
        device: where the model is.

    Raises:
        UserError: the split's file cannot be used.
    """
    dataset = task.dataset(split)
    # By length: rows of a batch are padded to the longest.
    order = torch.from_numpy(dataset.sizes).argsort(stable=True)
    predicted = torch.empty(len(dataset), dtype=torch.float64)
    target = torch.empty(len(dataset), dtype=torch.float64)
    labelled = True
    for indices in order.split(batch_size):
        sample = dataset.batch(indices.numpy())
        logits = model(**{name: value.to(device) for name, value in sample["net_input"].items()})[0].float()
        predicted[indices] = predictions(logits, task.layout.is_regression).double().cpu()
        labelled = labelled and "target" in sample
        if labelled:
            target[indices] = sample["target"].double()
    return Predictions(predicted, target if labelled else None, task.layout)


@dataclass(frozen=True)
class FinetunedRun:
    """The best checkpoint of one run.

    Attributes:
        lr, seed: of the run.
        figures: the metrics of the development file, in percent.
        folder: of checkpoint and predictions.
    """

    lr: float
    seed: int
    figures: Mapping[str, float]
    folder: str


@dataclass(frozen=True)
class RateSummary:
    """Runs of one learning rate.

    Attributes:
        lr: the rate.
        runs: their number.
        mean: of each metric.
        deviation: sample standard deviation of each metric; NaN for one run.
    """

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
        summaries.append(
            RateSummary(
                lr,
                len(of_seeds),
                {name: statistics.fmean(values) for name, values in columns.items()},
                {name: statistics.stdev(values) if len(values) > 1 else math.nan for name, values in columns.items()},
            )
        )
    return summaries


def best_rate(summaries: Sequence[RateSummary]) -> RateSummary:
    """The rate with the highest mean ``score`` on the development file; the first of equals."""
    # By the mean over the seeds: the best single run would choose the luckiest seed.
    return max(summaries, key=lambda summary: summary.mean["score"])


def as_table(summaries: Sequence[RateSummary]) -> str:
    """A Markdown table of mean ± deviation, the best rate marked."""
    names = list(summaries[0].mean)
    rows, best = [["lr", "runs", *names]], best_rate(summaries)
    for summary in summaries:
        cells = [f"{summary.lr:g}" + (" (best)" if summary is best else ""), str(summary.runs)]
        for name in names:
            deviation = summary.deviation[name]
            cells.append(f"{summary.mean[name]:.2f}" + ("" if math.isnan(deviation) else f" ± {deviation:.2f}"))
        rows.append(cells)
    return "\n".join(markdown(rows))
