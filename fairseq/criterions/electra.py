"""Loss of ELECTRA: generator and discriminator."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F

from fairseq.criterions.fairseq_criterion import (
    FairseqCriterion,
    Loss,
    Sample,
    is_padded,
    logging_output,
    subset_sums_of,
)
from fairseq.criterions.masked_lm import mask_prob, output_layer
from fairseq.criterions.settings import ElectraLossConfig
from fairseq.errors import UserError
from fairseq.logging.figures import SIZE, Figure, perplexity, ratio
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.output_layer import move_partition


class ElectraCriterion(FairseqCriterion):
    """Mean loss of the generator plus λ times the discriminator's (Clark et al. 2020, §2).

    The discriminator's loss is a mean over all tokens except padding. The generator's sum is
    divided by ``--mask-prob`` times their number, the expected number of chosen tokens: with one
    divisor for both, the sum over processes equals the result of one process.
    """

    config_class = ElectraLossConfig

    def __init__(self, task: Any, cfg: ElectraLossConfig) -> None:
        super().__init__(task)
        self.discriminator_weight = cfg.discriminator_weight
        # The expected number of chosen tokens, not the drawn one,
        # so that all processes divide by the same.
        self.mask_prob = mask_prob("electra", task)

    def check(self, model: BaseFairseqModel) -> None:
        if getattr(model, "generator", None) is None:
            raise UserError(
                f"`criterion` electra: {type(model).__name__} has no generator; use an electra architecture "
                "with `generator_size` above 0"
            )

    def prepare(self, model: BaseFairseqModel, sample: Sample) -> Sample:
        """Find the chosen tokens on the host, for the generator to fill."""
        target = sample["target"].reshape(-1)
        rows = (target != self.padding_idx).nonzero().squeeze(1)
        masked = (rows, target[rows])
        more = {"masked": masked, "noise": sample.get("noise"), "padded": is_padded(sample, self.padding_idx)}
        return {**sample, "net_input": {**sample["net_input"], **more}}

    def compute_loss(self, model: BaseFairseqModel, net_output: Any, sample: Sample) -> Loss:
        logits, extra = net_output
        net_input = sample["net_input"]
        masked = move_partition(net_input["masked"], logits.device)
        generator = output_layer(model).loss(extra["generator_hidden"].flatten(0, 1), masked)
        # A dummy sample has tokens, but none that count.
        real = net_input["src_tokens"].ne(self.padding_idx) & bool(sample["nsentences"])  # (B, T)
        replaced = extra["replaced"].float()
        # In float32: in half precision a confident discriminator's loss would be 0.
        each = F.binary_cross_entropy_with_logits(logits.float(), replaced, reduction="none")
        discriminator = (each * real).sum()
        loss = generator / self.mask_prob + self.discriminator_weight * discriminator
        sums = {
            **logging_output(loss, sample, sample["ntokens"]),
            "generator_loss": generator.detach(),
            "discriminator_loss": discriminator.detach(),
            "chosen": len(masked[1]),
            "replaced": replaced.sum(),
            "correct": (logits.detach().gt(0).eq(extra["replaced"]) & real).sum(),
        }
        if not self.training:
            sums |= subset_sums_of(each, real, sample)
        return loss, sample["ntokens"], sums

    def figures(self) -> dict[str, Figure]:
        """Total loss; the generator's in bits a chosen token,
        the discriminator's in bits a token; its accuracy."""
        to_bits = 1 / math.log(2)
        return {
            "loss": ratio("loss", SIZE, to_bits),
            "generator_loss": ratio("generator_loss", "chosen", to_bits),
            "generator_ppl": perplexity("generator_loss", "chosen"),
            "discriminator_loss": ratio("discriminator_loss", "ntokens", to_bits),
            "discriminator_accuracy": ratio("correct", "ntokens"),
            "replaced": ratio("replaced", "ntokens"),
        }
