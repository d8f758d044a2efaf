"""Cross entropy: plain, with smoothed targets, and through an adaptive softmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.config.fields import typed
from fairseq.config.shared import AdaptiveCriterionConfig
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Loss, Sample, logging_output, subset_sums
from fairseq.criterions.settings import CrossEntropyConfig, LabelSmoothedCrossEntropyConfig
from fairseq.dataclass import settings_of
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.views import LogitsModel
from fairseq.modules.adaptive_softmax import BandedSoftmax
from fairseq.modules.output_layer import LinearOutput, OutputLayer, move_partition


class CrossEntropyCriterion(FairseqCriterion):
    """Summed negative log-likelihood of the targets, computed by the output layer of the model."""

    config_class: type | None = CrossEntropyConfig
    band_padding = False
    eps = 0.0

    def __init__(self, task: Any, sentence_avg: bool) -> None:
        super().__init__(task)
        self.sentence_avg = sentence_avg

    def check(self, model: BaseFairseqModel) -> None:
        if not model.predicts_next_token:
            raise UserError(
                f"`criterion`: {type(model).__name__} is an encoder, which does not predict the next token; "
                "use `criterion` masked_lm (electra for ELECTRA) with `task` masked_lm"
            )
        # Targets of a masking task are padding wherever no token was chosen: the loss would look
        # fine, and be of 15 %.
        if hasattr(getattr(self.task, "cfg", None), "mask_prob"):
            raise UserError(
                f"`task`: it masks tokens, but {type(model).__name__} predicts the next token; "
                "use `task` language_modeling"
            )

    def prepare(self, model: BaseFairseqModel, sample: Sample) -> Sample:
        layer = model.output_layer
        if isinstance(layer, OutputLayer):
            # On the host: selecting targets on a device synchronises,
            # because their number has to be read.
            target = sample["target"].reshape(-1)
            sample["partition"] = layer.partition(target, self.padding_idx, self.band_padding)
        return sample

    def get_lprobs_and_target(self, model: Any, net_output: object, sample: Sample) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, V] and targets [N] of all tokens."""
        lprobs = model.get_normalized_probs(net_output, log_probs=True, sample=sample)
        return lprobs.flatten(0, -2), model.get_targets(sample, net_output).reshape(-1)

    def compute_loss(self, model: Any, net_output: Any, sample: Sample, reduce: bool | None = None) -> Any:
        """Loss, sample size and sums; with *reduce*, as plug-ins call it, loss and nll_loss, summed
        or, if it is false, of each target."""
        if reduce is None and not isinstance(model, LogitsModel):
            return self._loss(model, net_output, sample)
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        loss, nll = label_smoothed_nll_loss(lprobs, target, self.eps, self.padding_idx, reduce is not False)
        return (loss, nll) if reduce is not False else (loss.flatten(), nll.flatten())

    def _loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Loss:
        hidden = net_output[0]
        layer = model.output_layer
        if isinstance(layer, OutputLayer):
            loss = layer.loss(hidden.flatten(0, -2), self._partition(layer, sample, hidden.device))
        else:
            lprobs = model.get_normalized_probs(net_output, log_probs=True, sample=sample)
            target = model.get_targets(sample, net_output).reshape(-1)
            loss = F.nll_loss(lprobs.flatten(0, -2), target, ignore_index=self.padding_idx, reduction="sum")
        sample_size = sample["nsentences"] if self.sentence_avg else sample["ntokens"]
        sums = {**logging_output(loss, sample, sample_size), **self._subset_sums(layer, hidden, sample)}
        return loss, sample_size, sums

    def _subset_sums(self, layer: object, hidden: Tensor, sample: Sample) -> dict[str, object]:
        """In validation, the cross entropy of each subset of tokens, for hidden states
        [B, T, C]."""
        if self.training or not isinstance(layer, OutputLayer):
            return {}
        return subset_sums(layer, hidden.flatten(0, -2), sample, self.padding_idx)

    def _partition(self, layer: OutputLayer, sample: Sample, device: torch.device) -> Any:
        """The targets of *sample* that count, on *device*;
        :meth:`prepare` has computed them on the host."""
        partition = sample.get("partition")
        if partition is None:  # the criterion was called directly
            partition = layer.partition(sample["target"].reshape(-1), self.padding_idx, self.band_padding)
        return move_partition(partition, device)


class LabelSmoothedCrossEntropyCriterion(CrossEntropyCriterion):
    """Cross entropy against (1 − ε) · target + ε · uniform
    over the V words (Szegedy et al. 2016, section 7).

    ``nll_loss`` is the plain cross entropy.
    """

    config_class = LabelSmoothedCrossEntropyConfig

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
    ) -> None:
        super().__init__(task, sentence_avg)
        if ignore_prefix_size:
            raise UserError(f"`ignore_prefix_size` {ignore_prefix_size}: not implemented; use 0")
        self.eps = label_smoothing

    def _loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Loss:
        layer = model.output_layer
        # Only a full softmax without bias has this short form of the mean over all words.
        if isinstance(layer, LinearOutput) and layer.bias is None:
            loss, nll = self._linear(layer, net_output[0], sample)
        else:
            loss, nll = self._full(model, layer, net_output, sample)
        sample_size = sample["nsentences"] if self.sentence_avg else sample["ntokens"]
        sums = {**logging_output(loss, sample, sample_size), "nll_loss": nll.detach()}
        return loss, sample_size, {**sums, **self._subset_sums(layer, net_output[0], sample)}

    def _linear(self, layer: LinearOutput, hidden: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
        """Both losses without storing the logits: the sum of all logits of a row is h · Σ_v w_v."""
        rows, target = partition = self._partition(layer, sample, hidden.device)
        flat = hidden.flatten(0, -2)
        nll = layer.loss(flat, partition)
        # In float32, also under autocast, which would lower the product: differences of large sums
        # follow.
        with torch.autocast(hidden.device.type, enabled=False):
            states = (flat if rows is None else flat[rows]).float()  # (N, C)
            weight = layer.weight.float()  # (V, C)
            of_target = (states * weight[target]).sum()
            of_all = states.sum(0) @ weight.sum(0)
        # log-softmax = logit − log Z, and log Z cancels: ε · (mean of −log p over words − nll) = ε
        # · (h·w_y − mean of h·w_v).
        return nll + self.eps * (of_target - of_all / weight.size(0)), nll

    def _full(self, model: BaseFairseqModel, layer: Any, net_output: Any, sample: Sample) -> tuple[Tensor, Tensor]:
        if isinstance(layer, OutputLayer):
            lprobs, target = layer.log_probs(net_output[0]), sample["target"]
        else:
            lprobs = model.get_normalized_probs(net_output, log_probs=True, sample=sample)
            target = model.get_targets(sample, net_output)
        lprobs, target = lprobs.flatten(0, -2), target.reshape(-1).to(lprobs.device)  # (N, V), (N)
        # Zeros instead of a selection, whose size would have to be read from the device.
        padding = target == self.padding_idx
        nll = -lprobs.gather(-1, target[:, None]).squeeze(-1).masked_fill(padding, 0.0).sum()
        smooth = -lprobs.sum(-1).masked_fill(padding, 0.0).sum()
        return (1 - self.eps) * nll + self.eps / lprobs.size(-1) * smooth, nll


class AdaptiveLoss(CrossEntropyCriterion):
    """Negative log-likelihood through an adaptive softmax
    (Grave et al. 2017), each band over its own words."""

    config_class = AdaptiveCriterionConfig

    def __init__(self, task: Any, sentence_avg: bool, cfg: Any = None) -> None:
        super().__init__(task, sentence_avg)
        self.band_padding = typed(AdaptiveCriterionConfig, cfg or {}).band_padding

    def _loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Loss:
        # Two bounds are one band: such a softmax is a full one.
        if not isinstance(model.output_layer, BandedSoftmax) or len(model.output_layer.bounds) == 2:
            raise UserError(
                "`criterion` adaptive_loss: the model's softmax has no bands; use `criterion` cross_entropy"
            )
        return super()._loss(model, net_output, sample)


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


__getattr__ = settings_of(  # fairseq's names
    __name__,
    {},
    CrossEntropyCriterionConfig=CrossEntropyConfig,
    LabelSmoothedCrossEntropyCriterionConfig=LabelSmoothedCrossEntropyConfig,
    AdaptiveLossConfig=AdaptiveCriterionConfig,
)
