"""Losses of criterions in fairseq's sense: computed from logits, and called with ``reduce``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fairseq.criterions.cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Loss, Sample, logging_output
from fairseq.criterions.masked_lm import MaskedLMCriterion
from fairseq.errors import UserError
from fairseq.logging import metrics
from fairseq.logging.figures import SIZE, Figure, language_model_figures
from fairseq.models.base import BaseFairseqModel
from fairseq.models.views import LogitsModel, logits_model, plain
from fairseq.system.refused import refused
from fairseq.utils import item


def label_smoothed_nll_loss(
    lprobs: Tensor, target: Tensor, epsilon: float, ignore_index: int | None = None, reduce: bool = True
) -> tuple[Tensor, Tensor]:
    """Smoothed and plain negative log-likelihood, summed, or of each target without *reduce*.

    Of *lprobs* [..., V] and *target* [...] or [..., 1]; those that are *ignore_index* count
    nothing. The probability *epsilon* is taken from the target and spread over the other words.
    """
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    # Ignored targets may be negative, such as −100, which is no index; they are zeroed below.
    nll = -lprobs.gather(-1, target.clamp(min=0))
    others = -lprobs.sum(-1, keepdim=True)
    if ignore_index is not None:
        ignored = target.eq(ignore_index)
        nll, others = nll.masked_fill(ignored, 0.0), others.masked_fill(ignored, 0.0)
    if reduce:
        nll, others = nll.sum(), others.sum()
    # `others` includes the target, so that its weight is lowered by the share which it gets there:
    # (1 − ε) for the target, ε / (V − 1) for each other word.
    share = epsilon / (lprobs.size(-1) - 1)
    return (1.0 - epsilon - share) * nll + share * others, nll


class MaskedLmLoss(MaskedLMCriterion):
    """The masked-LM criterion with fairseq's constructor: of settings and task, or of the task."""

    def __init__(self, *parts: object, **unused: object) -> None:
        super().__init__(next(part for part in (*parts, *unused.values()) if hasattr(part, "source_dictionary")))


class FairseqLoss:
    """Base that the adapter puts under a plug-in's criterion: ``compute_loss(…, reduce=…)`` returns
    loss and nll_loss.

    Without *reduce* it is the one of this package, which returns loss, sample size and sums.
    """

    def __init__(self, *args: object, **options: object) -> None:
        parameters = list(inspect.signature(super().__init__).parameters.values())
        # Constructors of fairseq take further arguments, such as whether to report accuracy: those
        # that this package's base does not know are dropped.
        if not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
            prefix = options.get("ignore_prefix_size") or next(iter(args[3:]), 0)  # (task, average, smoothing, prefix)
            if prefix:
                raise UserError(f"`ignore_prefix_size` {prefix}: not implemented; use 0")
            names = {one.name for one in parameters}
            # Those that take the settings have them before the task.
            args = tuple(itertools.dropwhile(lambda one: not hasattr(one, "source_dictionary"), args)) or args
            args, options = args[: len(parameters)], {name: value for name, value in options.items() if name in names}
        super().__init__(*args, **options)

    def get_lprobs_and_target(
        self, model: BaseFairseqModel, net_output: object, sample: Sample
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, V] and targets [N] of all tokens."""
        lprobs = model.get_normalized_probs(net_output, log_probs=True, sample=sample)
        return lprobs.flatten(0, -2), model.get_targets(sample, net_output).reshape(-1)

    def compute_loss(self: Any, model: object, net_output: object, sample: Sample, reduce: bool | None = None) -> Any:
        # Called by this package, which never passes `reduce`.
        if reduce is None and not isinstance(model, LogitsModel):
            return super().compute_loss(model, net_output, sample)  # type: ignore[misc]
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        smoothing = self.eps if isinstance(self, LabelSmoothedCrossEntropyCriterion) else 0.0
        losses = label_smoothed_nll_loss(lprobs, target, smoothing, self.padding_idx, reduce is not False)
        if reduce is False:
            losses = losses[0].flatten(), losses[1].flatten()
        return losses if reduce is not None else self.logged(losses, sample)

    def logged(self: object, losses: tuple[Tensor, Tensor], sample: Sample) -> Loss:
        """Loss, sample size and sums, as fairseq's criterions return them, of loss and nll_loss."""
        size = sample["target"].size(0) if getattr(self, "sentence_avg", False) else sample["ntokens"]
        return losses[0], size, {**logging_output(losses[0], sample, size), "nll_loss": losses[1].detach()}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[Mapping[str, object]]) -> None:
        """Log the figures of *logging_outputs*; plug-ins override it."""
        if cls.aggregate_logging_outputs is not FairseqLoss.aggregate_logging_outputs:
            log_aggregated(cls.aggregate_logging_outputs(logging_outputs))
        else:
            log_figures(language_model_figures(), logging_outputs)

    @staticmethod
    def aggregate_logging_outputs(logging_outputs: object) -> Any:
        """The figures of outputs, in the manner of fairseq before 0.8; plug-ins override it."""
        raise NotImplementedError

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Whether outputs may be summed before they are reduced: each is kept here."""
        return False

    def forward(self: Any, model: Any, sample: Sample, reduce: bool = True) -> Any:
        """Run the model on *sample* and compute its loss."""
        if not takes_reduce(type(self)):
            inputs = {name: value for name, value in sample["net_input"].items() if name != "src_lengths"}
            sample = super().prepare(plain(model), {**sample, "net_input": inputs})  # type: ignore[misc]
            return super().forward(plain(model), sample)  # type: ignore[misc]
        model = logits_model(model)
        return self.logged(self.compute_loss(model, model(**sample["net_input"]), sample, reduce=reduce), sample)


def log_aggregated(figures: Mapping[str, object]) -> None:
    """Log the *figures* of ``aggregate_logging_outputs``, but for the sizes among them."""
    for name, value in figures.items():
        if name not in ("nsentences", "ntokens", "sample_size"):
            metrics.log_scalar(name, value)


def log_figures(figures: Mapping[str, Figure], logging_outputs: Sequence[Mapping[str, object]]) -> None:
    """Log the *figures* that the sums of *logging_outputs* have, weighted by the sample size."""
    sums: dict[str, object] = {"loss": 0, "ntokens": 0, SIZE: 0}
    for output in logging_outputs:
        for name, value in output.items():
            if isinstance(value, Tensor | int | float):
                sums[name] = sums.get(name, 0) + item(value)
    sums.setdefault("nll_loss", sums["loss"])
    for name, figure in figures.items():
        if figure.is_known(sums):
            metrics.log_scalar(name, figure.compute(sums), sums[SIZE])


def takes_reduce(criterion: type) -> bool:
    """Whether a plug-in's *criterion* overrides ``compute_loss`` in fairseq's sense."""
    method: Any = criterion.compute_loss  # type: ignore[attr-defined]
    return method is not FairseqLoss.compute_loss and "reduce" in inspect.signature(method).parameters


MoECriterion = refused("MoECriterion", FairseqCriterion, "mixtures of experts are not implemented", __name__)
