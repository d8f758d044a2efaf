"""Base class of criterions: the interface that the trainer uses;
and the sums that several of them return.

Validation losses are also of subsets of tokens and of single tokens: ``sample["subsets"]`` holds a
mask for each of the task's ``subsets``, bool [B, T] or broadcastable to it;
``sample["positions"]``, where there is one, the position of each target in the corpus, int64
[B, T], −1 for none.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config import fields
from fairseq.config.registry import CRITERIONS, is_outside
from fairseq.config.settings import Settings, typed_settings
from fairseq.config.shared import Part
from fairseq.data.dataset import Sample
from fairseq.logging import metrics
from fairseq.logging.figures import SIZE, Figure, Gathered, language_model_figures, ratio
from fairseq.models.base import BaseFairseqModel
from fairseq.models.views import logits_model, plain
from fairseq.modules.devices import exact
from fairseq.modules.output_layer import OutputLayer, move_partition
from fairseq.system.refused import refused
from fairseq.utils import item

Loss = tuple[Tensor, int, dict[str, Any]]
"""The summed loss, the divisor of the gradient, and named sums over the batch: numbers, tensors of
one element, or :class:`~fairseq.logging.figures.Gathered` predictions."""
TOKEN_LOSSES = "token losses"
"""Name of gathered rows (position in the corpus, loss in nats), float64 [n, 2]."""


class FairseqCriterion(Part, nn.Module):
    """A loss function over a model's output and a sample.

    A criterion defines :meth:`compute_loss`. One in fairseq's sense runs the model itself in
    ``forward``, or has a ``compute_loss`` with the argument ``reduce``, which returns loss and
    nll_loss.
    """

    settings_name = "criterion"

    def __init__(self, *parts: Any, **unused: object) -> None:
        """Store the task among *parts*; settings may come first, stored as ``self.args``."""
        super().__init__()
        task = next((part for part in parts if hasattr(part, "source_dictionary")), parts[-1])
        self.args = parts[0] if parts[0] is not task else None
        self.task = task
        dictionary = getattr(task, "target_dictionary", None)
        # -100 is torch's number of targets that do not count, for tasks without a dictionary.
        self.padding_idx = dictionary.pad() if dictionary is not None else -100

    @classmethod
    def build_criterion(cls, args: object, task: Any) -> FairseqCriterion:
        """Build the criterion with the settings that its constructor names.

        Args:
            args: its settings, as attributes; the constructor takes them as ``args`` or ``cfg``, or
                single ones by name. None: it has none.
        """
        parameters = inspect.signature(cls.__init__).parameters
        # The base's constructor takes any number of parts: settings, if there are any, and task.
        if not parameters.keys() - {"self", "parts", "unused"}:
            return cls(task) if args is None else cls(args, task)
        values: dict[str, Any] = {} if args is None else dict(vars(args))
        if cls.config_class is not None:
            values |= vars(fields.typed(cls.config_class, args))
        values |= {"task": task, "args": args, "cfg": args}
        return cls(**{name: values[name] for name in parameters if name in values})

    @functools.cached_property  # which a criterion may set
    def carries_state(self) -> bool:
        """False if the loss hands the model no state of earlier steps, such as its memory."""
        return not runs_model(type(self))

    def check(self, model: BaseFairseqModel) -> None:
        """Raise UserError if *model* lacks the outputs
        this loss needs; called once, before any batch."""

    def prepare(self, model: BaseFairseqModel, sample: Sample) -> Sample:
        """Add to *sample*, on the host, values
        whose computation on the device would synchronise."""
        return sample

    def step(
        self, model: BaseFairseqModel, sample: Sample, inputs: Mapping[str, object]
    ) -> tuple[Loss, Mapping[str, Any]]:
        """Return the loss on *sample*, and the ``extra`` that the model returned.

        Further keyword arguments of the model, *inputs*, come from the state that steps carry.
        """
        if runs_model(type(self)):
            return self(logits_model(model), sample), {}
        # A dummy sample, which has not come through the iterator.
        if not sample["nsentences"]:
            sample = self.prepare(model, sample)
        net_output = model(**model.net_input(sample["net_input"]), **inputs)
        extra = net_output[1] if isinstance(net_output, tuple) and len(net_output) > 1 else None
        return self.compute_loss(model, net_output, sample), extra if isinstance(extra, Mapping) else {}

    def compute_loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Any:
        """Return the loss of *net_output*, which ``model(**sample["net_input"])`` returned, and
        sums by name."""
        raise NotImplementedError

    def figures(self) -> dict[str, Figure]:
        """The figures of log and validation, by name, in the order of the log.

        They are computed from totals of the sums that :meth:`compute_loss` returns. Any of them can
        be the ``--best-checkpoint-metric``.
        """
        return language_model_figures()

    def forward(self, model: Any, sample: Sample, reduce: bool = True) -> Loss:
        """Run the model on *sample* and compute its loss."""
        if takes_reduce(type(self)):
            model = logits_model(model)
            compute: Any = self.compute_loss
            loss, nll_loss = compute(model, model(**model.net_input(sample["net_input"])), sample, reduce=reduce)
            size = sample["target"].size(0) if getattr(self, "sentence_avg", False) else sample["ntokens"]
            return loss, size, {**logging_output(loss, sample, size), "nll_loss": nll_loss.detach()}
        model = plain(model)
        sample = {**sample, "net_input": model.net_input(sample["net_input"])}
        # Called by a plug-in's `forward`: samples of other criterions are prepared already.
        if runs_model(type(self)):
            sample = self.prepare(model, sample)
        return self.compute_loss(model, model(**sample["net_input"]), sample)

    @classmethod
    def reduce_metrics(cls, logging_outputs: Sequence[Mapping[str, object]]) -> None:
        """Log the figures of *logging_outputs*; plug-ins override it."""
        if cls.aggregate_logging_outputs is not FairseqCriterion.aggregate_logging_outputs:
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


def takes_reduce(criterion: type[FairseqCriterion]) -> bool:
    """Whether a plug-in's *criterion* overrides ``compute_loss`` in fairseq's sense."""
    method = criterion.compute_loss
    return is_outside(method) and "reduce" in inspect.signature(method).parameters


def runs_model(criterion: type[FairseqCriterion]) -> bool:
    """Whether a plug-in's *criterion* is one in fairseq's sense, which hands the model no state."""
    return is_outside(criterion.forward) or takes_reduce(criterion)


def logs_itself(criterion: type) -> bool:
    """Whether a plug-in's *criterion* makes the figures of the log of its outputs."""
    return any(is_outside(getattr(criterion, name)) for name in ("reduce_metrics", "aggregate_logging_outputs"))


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


class LegacyFairseqCriterion(FairseqCriterion):
    """A criterion that is given the namespace and the task, as in fairseq before 0.10."""

    def __init__(self, args: object, task: object) -> None:
        super().__init__(args, task)


def build_criterion(settings: Settings, task: Any) -> FairseqCriterion:
    """Return the criterion that *settings* select."""
    settings = typed_settings(settings)
    cls = CRITERIONS[settings.chosen.criterion]
    return cls.build_criterion(cls.settings_of(settings), task)


def logging_output(loss: Tensor, sample: Sample, sample_size: int) -> dict[str, object]:
    """The sums common to all criterions."""
    return {
        "loss": loss.detach(),
        "ntokens": sample["ntokens"],
        "nsentences": sample["nsentences"],
        "sample_size": sample_size,
    }


def is_padded(sample: Sample, padding_idx: int) -> bool | None:
    """Return whether the tokens of *sample* have padding; None:
    they are on a GPU, where looking would synchronise."""
    tokens: Tensor = sample["net_input"]["src_tokens"]
    return bool(tokens.eq(padding_idx).any()) if tokens.device.type == "cpu" else None


def subset_sums(layer: OutputLayer, hidden: Tensor, sample: Sample, padding_idx: int) -> dict[str, object]:
    """Summed losses and numbers of the targets of each subset,
    for hidden states [N, C] of all tokens."""
    sums: dict[str, object] = {}
    if "positions" in sample:
        target = sample["target"].reshape(-1)
        # This synchronises, in validation only.
        rows = (target != padding_idx).nonzero().squeeze(1)
        sums[TOKEN_LOSSES] = _gathered(sample, rows, -layer.target_log_probs(hidden[rows], target[rows]))
    for name, mask in sample.get("subsets", {}).items():
        target = sample["target"].masked_fill(~mask, padding_idx).reshape(-1)
        count = int((target != padding_idx).sum())
        partition = move_partition(layer.partition(target, padding_idx), hidden.device)
        sums |= {f"{name}_loss": layer.loss(hidden, partition) if count else 0.0, f"{name}_targets": count}
    return sums


def subset_sums_of(losses: Tensor, real: Tensor, sample: Sample) -> dict[str, object]:
    """The sums of :func:`subset_sums` from all tokens' losses
    [B, T]; *real*, bool [B, T], is false at padding."""
    sums: dict[str, object] = {}
    if "positions" in sample:
        rows = real.reshape(-1).nonzero().squeeze(1)
        sums[TOKEN_LOSSES] = _gathered(sample, rows, losses.reshape(-1)[rows])
    for name, mask in sample.get("subsets", {}).items():
        sums |= {f"{name}_loss": (losses * (real & mask)).sum(), f"{name}_targets": (real & mask).sum()}
    return sums


def _gathered(sample: Sample, rows: Tensor, losses: Tensor) -> Gathered:
    """The *losses* [n] of the targets *rows* [n] of *sample*, with their positions."""
    # float64 holds positions up to 2**53 exactly,
    # so that position and loss are gathered as one tensor.
    return Gathered(torch.stack([exact(sample["positions"].reshape(-1)[rows]), exact(losses)], 1))


def subset_figures(names: Iterable[str]) -> dict[str, Figure]:
    """``NAME_loss`` of each subset, in bits a token; NaN where it has none."""
    return {f"{name}_loss": ratio(f"{name}_loss", f"{name}_targets", 1 / math.log(2)) for name in names}


MoECriterion = refused("MoECriterion", FairseqCriterion, "mixtures of experts are not implemented", __name__)
