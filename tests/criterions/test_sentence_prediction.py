"""Metrics of sentence prediction: over batches and ranks they are those of all predictions
together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import user_error

from fairseq.criterions import sentence_prediction
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion, metric
from fairseq.data.glue import GLUE, layout_of
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.logging.figures import NamedSums, RunningSums

CPU = torch.device("cpu")


def criterion_of(name: str) -> SentencePredictionCriterion:
    return SentencePredictionCriterion(SimpleNamespace(layout=layout_of(name)))


def report(name: str, output: torch.Tensor, target: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The figures of predictions of which two ranks each have two batches."""
    criterion = criterion_of(name)
    meters = []
    for part, labels in zip(output.chunk(2), target.chunk(2), strict=True):
        meter = RunningSums(CPU)
        for logits, wanted in zip(part.split(13), labels.split(13), strict=True):
            sample = {"target": wanted, "nsentences": len(wanted), "ntokens": 5 * len(wanted)}
            _, size, log = criterion.compute_loss(None, (logits, {}), sample)
            meter.add(NamedSums.of(log, size, CPU, gather=True))
        meters.append(meter)
    meters[1].reduce(World())
    other = meters[1].totals
    monkeypatch.setattr(World, "sum", lambda self, value: value + other.values)
    monkeypatch.setattr(World, "gather", lambda self, value, everywhere=False: [value, other.rows["predictions"]])
    meters[0].reduce(World(0, 2, CPU))
    return meters[0].report(criterion.figures())


@pytest.mark.parametrize("name", sorted(GLUE))
def test_figures_over_two_ranks_are_those_of_the_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.stats
    import sklearn.metrics

    layout = GLUE[name]
    torch.manual_seed(4)
    output = torch.randn(50, layout.outputs)
    if layout.is_regression:
        target = output.squeeze(1) + torch.randn(50)
        x, y = output.squeeze(1).double().numpy(), target.double().numpy()
        wanted: dict[str, Any] = {
            "pearson": scipy.stats.pearsonr(x, y)[0],
            "spearman": scipy.stats.spearmanr(x, y)[0],
            "loss": ((x - y) ** 2).mean() / 100,
        }
    else:
        target = torch.randint(layout.outputs, (50,))
        x, y = output.argmax(1).numpy(), target.numpy()
        binary = layout.outputs == 2
        wanted = {
            "accuracy": sklearn.metrics.accuracy_score(y, x),
            "f1": sklearn.metrics.f1_score(y, x) if binary else None,
            "mcc": sklearn.metrics.matthews_corrcoef(y, x),
            "loss": sklearn.metrics.log_loss(y, output.double().softmax(1).numpy()) / np.log(2) / 100,
        }
    found = report(name, output, target, monkeypatch)
    for key in ("loss", *layout.metrics):
        assert found[key] == pytest.approx(100 * wanted[key], rel=1e-5), key
    assert found["score"] == pytest.approx(100 * np.mean([wanted[key] for key in layout.metrics]), rel=1e-5)


def test_constant_predictions_have_no_correlation() -> None:
    ones, other = torch.ones(4).double(), torch.tensor([0.0, 1, 1, 0]).double()
    assert [metric(name, ones, other) for name in ("mcc", "pearson", "spearman")] == [0, 0, 0]
    assert metric("f1", 0 * ones, 0 * other) == 0


def test_a_missing_package_is_named_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(sentence_prediction.importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"mcc needs scikit-learn: pip install scikit-learn scipy"):
        criterion_of("CoLA")
    with pytest.raises(UserError, match="pearson needs scipy"):
        criterion_of("STS-B")
    with user_error("needs --task sentence_prediction"):
        SentencePredictionCriterion(SimpleNamespace())
