"""The loss of masked language modelling."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fairseq.criterions.fairseq_criterion import FairseqCriterion, Loss, Sample, is_padded, logging_output, subset_sums
from fairseq.errors import UserError
from fairseq.logging.figures import SIZE, Figure, perplexity, ratio
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.output_layer import OutputLayer, move_partition
from fairseq.system.deferred import names_of


class MaskedLMCriterion(FairseqCriterion):
    """Negative log-likelihood of the chosen tokens (Devlin et al. 2019, §3.1), averaged over them.

    Only their hidden states pass through the output layer, with logits computed in chunks.
    """

    def __init__(self, *parts: Any, **unused: object) -> None:
        super().__init__(*parts)
        mask_prob("masked_lm", self.task)

    def check(self, model: BaseFairseqModel) -> None:
        if model.predicts_next_token:
            raise UserError(
                f"`criterion` masked_lm: {type(model).__name__} is not an encoder; use `criterion` cross_entropy"
            )
        if hasattr(model, "generator"):
            raise UserError(f"`criterion` masked_lm: {type(model).__name__} is not BERT; use `criterion` electra")

    def prepare(self, model: BaseFairseqModel, sample: Sample) -> Sample:
        """Find the chosen tokens on the host, and ask the model for hidden states.

        A model without an output layer is asked for the logits of the chosen tokens.
        """
        if not isinstance(model.output_layer, OutputLayer):
            chosen = sample["target"].ne(self.padding_idx)
            return {**sample, "net_input": {**sample["net_input"], "masked_tokens": chosen}}
        rows, target = output_layer(model).partition(sample["target"].reshape(-1), self.padding_idx)
        net_input = {**sample["net_input"], "features_only": True, "padded": is_padded(sample, self.padding_idx)}
        return {**sample, "net_input": net_input, "partition": (rows, target)}

    def compute_loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Loss:
        output = net_output[0].flatten(0, -2)
        if "partition" not in sample:
            # Logits: [B, T, V], or of the chosen tokens, [M, V],
            # from fairseq's models, which know the argument.
            mask = sample["target"].ne(self.padding_idx)
            target = sample["target"][mask] if net_output[0].dim() == 2 else sample["target"].reshape(-1)
            loss, chosen = nll(output, target, self.padding_idx), int(mask.sum())
            return loss, chosen, logging_output(loss, sample, chosen)
        chosen = len(sample["partition"][1])
        loss = output_layer(model).loss(output, move_partition(sample["partition"], output.device))
        sums = logging_output(loss, sample, chosen)
        if not self.training:
            sums |= subset_sums(output_layer(model), output, sample, self.padding_idx)
        return loss, chosen, sums

    def figures(self) -> dict[str, Figure]:
        """``loss`` in bits a chosen token, and ``ppl``."""
        return {"loss": ratio("loss", SIZE, 1 / math.log(2)), "ppl": perplexity("loss", SIZE)}


def mask_prob(criterion: str, task: Any) -> float:
    """Return the share of tokens that *task* chooses;
    raise UserError if it does not mask tokens."""
    share: float | None = getattr(getattr(task, "cfg", None), "mask_prob", None)
    if share is None:
        raise UserError(f"`criterion` {criterion}: needs a task that masks tokens; use `task` masked_lm")
    return share


def output_layer(model: BaseFairseqModel) -> OutputLayer:
    """The output layer of *model*, which predicts words from hidden states."""
    layer = model.output_layer
    assert isinstance(layer, OutputLayer)
    return layer


def nll(logits: Tensor, target: Tensor, padding_idx: int) -> Tensor:
    """Summed negative log-likelihood of targets that are not padding: logits [N, V], target [N]."""
    # float32: sums over a vocabulary lose digits in half precision.
    return F.cross_entropy(logits.float(), target, ignore_index=padding_idx, reduction="sum")


MaskedLmLoss = MaskedLMCriterion  # fairseq's name

__getattr__, _ = names_of(__name__, {"fairseq.dataclass": "MaskedLmConfig=FairseqDataclass"})
