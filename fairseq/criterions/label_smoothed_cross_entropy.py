"""Cross entropy against smoothed targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fairseq.config.fields import flag
from fairseq.config.registry import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyConfig, CrossEntropyCriterion
from fairseq.criterions.fairseq_criterion import Loss, Sample, TrainedModel, logging_output
from fairseq.modules.output_layer import LinearOutput, OutputLayer


@dataclass(frozen=True)
class LabelSmoothedCrossEntropyConfig(CrossEntropyConfig):
    """Settings of the label-smoothed cross entropy."""

    label_smoothing: float = flag(0.0, "probability mass spread over all words", low=0, below=1)


@register_criterion("label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyConfig)
class LabelSmoothedCrossEntropyCriterion(CrossEntropyCriterion):
    """Cross entropy against (1 − ε) · target + ε · uniform over the V words (Szegedy et al. 2016, section 7).

    ``nll_loss`` is the plain cross entropy.
    """

    def __init__(self, task: Any, sentence_avg: bool, label_smoothing: float) -> None:
        super().__init__(task, sentence_avg)
        self.eps = label_smoothing

    def compute_loss(self, model: TrainedModel, net_output: Any, sample: Sample) -> Loss:
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
        # In float32: differences of large sums follow.
        states = (flat if rows is None else flat[rows]).float()  # (N, C)
        weight = layer.weight.float()  # (V, C)
        of_target = (states * weight[target]).sum()
        of_all = states.sum(0) @ weight.sum(0)
        # log-softmax = logit − log Z, and log Z cancels: ε · (mean of −log p over words − nll) = ε · (h·w_y − mean of
        # h·w_v).
        return nll + self.eps * (of_target - of_all / weight.size(0)), nll

    def _full(self, model: TrainedModel, layer: Any, net_output: Any, sample: Sample) -> tuple[Tensor, Tensor]:
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
