"""The loss and the metrics of classes and scores of sentences."""

from __future__ import annotations

import importlib
import math
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.criterions.fairseq_criterion import FairseqCriterion, Loss, Sample, logging_output
from fairseq.errors import UserError
from fairseq.logging.figures import SIZE, Figure, Gathered, Values, ratio
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.devices import exact
from fairseq.system.deferred import names_of

PREDICTIONS = "predictions"
LIBRARIES = {"f1": "sklearn.metrics", "mcc": "sklearn.metrics", "pearson": "scipy.stats", "spearman": "scipy.stats"}


class SentencePredictionCriterion(FairseqCriterion):
    """Cross-entropy of a row's class, or the squared error of its score; averaged over rows.

    Figures: the metrics of the GLUE task in percent, and ``score``, their mean.

    Raises:
        UserError: the task has no classes or scores, or the package of a metric is not installed.
    """

    def __init__(self, *parts: Any, **unused: object) -> None:
        super().__init__(*parts)
        layout = getattr(self.task, "layout", None)
        if layout is None:
            raise UserError("`criterion` sentence_prediction: needs `task` sentence_prediction")
        self.is_regression: bool = layout.is_regression
        self.metrics: tuple[str, ...] = layout.metrics
        # Before training: a package that is missing should not end a run at its first validation.
        for name in self.metrics:
            if name in LIBRARIES:
                _library(name)

    @property
    def classification_head_name(self) -> str:
        """The head that the loss is computed with."""
        name: str = self.task.cfg.classification_head_name
        return name

    def check(self, model: BaseFairseqModel) -> None:
        if not hasattr(model, "classification_heads"):
            raise UserError(
                f"`criterion` sentence_prediction: {type(model).__name__} has no classification head; "
                "use `task` sentence_prediction"
            )

    def prepare(self, model: BaseFairseqModel, sample: Sample) -> Sample:
        """Name the head: a model may have several."""
        head = {"features_only": True, "classification_head_name": self.classification_head_name}
        return {**sample, "net_input": {**sample["net_input"], **head}}

    def compute_loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Loss:
        if "target" not in sample:
            raise UserError("the split has no labels to compute a loss; give a split with a label column")
        target = sample["target"]
        logits = net_output[0][: target.size(0)].float()  # (B, n); a dummy sample has no targets
        predicted = predictions(logits, self.is_regression)
        target = target.reshape(predicted.shape)  # (B), of datasets of single tokens (B, 1)
        if self.is_regression:
            loss = F.mse_loss(predictions(logits, True), target, reduction="sum")
        else:
            loss = F.cross_entropy(logits, target, reduction="sum")
        # float64 holds class numbers and float32 scores alike without loss.
        # Of several scores a row, each is a pair of its own.
        rows = torch.stack([exact(predicted.detach()).flatten(), exact(target).flatten()], dim=1)  # (B, 2)
        size = sample["nsentences"]
        return loss, size, {**logging_output(loss, sample, size), PREDICTIONS: Gathered(rows)}

    def figures(self) -> dict[str, Figure]:
        """``loss`` in bits a row (regression: mean squared error);
        in validation also the metrics and ``score``."""
        loss = ratio("loss", SIZE, 1.0 if self.is_regression else 1 / math.log(2))
        return {"loss": loss, **metric_figures(self.metrics)}


def predictions(logits: Tensor, is_regression: bool) -> Tensor:
    """Predicted classes or scores: logits [B, n] → [B]; several scores stay [B, n]."""
    return logits.squeeze(1) if is_regression else logits.argmax(1)


def metric_figures(metrics: tuple[str, ...]) -> dict[str, Figure]:
    """Figures of gathered predictions (predicted, target),
    float64 [rows, 2]: *metrics*, and their mean ``score``."""

    def figure(*names: str) -> Figure:
        def compute(sums: Values) -> float:
            predicted, target = sums[PREDICTIONS].double().unbind(1)
            return sum(metric(name, predicted, target) for name in names) / len(names)

        return Figure(compute, (PREDICTIONS,))

    return {**{name: figure(name) for name in metrics}, "score": figure(*metrics)}


def metric(name: str, predicted: Tensor, target: Tensor) -> float:
    """A metric in percent, ``accuracy`` or a key of :data:`LIBRARIES`, of classes or scores [n];
    F1's positive is 1.

    A correlation with a constant is 0, as in scikit-learn's
    Matthews correlation; so is F1 without positive rows.
    """
    if name == "accuracy":
        return 100 * float((predicted == target).double().mean())
    library = _library(name)
    x, y = predicted.numpy(), target.numpy()
    if name in ("pearson", "spearman"):
        if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nearly constant inputs
            return 100 * float(getattr(library, f"{name}r")(x, y).statistic)
    x, y = x.astype(int), y.astype(int)
    if name == "f1":
        return 100 * float(library.f1_score(y, x, zero_division=0.0))
    return 100 * float(library.matthews_corrcoef(y, x))


def _library(name: str) -> ModuleType:
    """Return the module of a metric; raise UserError if its package is not installed."""
    try:
        # Imported by name: scikit-learn and scipy take seconds, and are optional.
        return importlib.import_module(LIBRARIES[name])
    except ImportError:
        package = {"sklearn": "scikit-learn"}.get(LIBRARIES[name].split(".")[0], "scipy")
        raise UserError(
            f"`criterion` sentence_prediction: {name} needs {package}: pip install scikit-learn scipy"
        ) from None


__getattr__, _ = names_of(__name__, {"fairseq.dataclass": "SentencePredictionConfig=FairseqDataclass"})  # fairseq's
