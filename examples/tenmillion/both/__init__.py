"""A plug-in: some batches are causal, in the others a decoder reads both ways and predicts masked
tokens.

Charpentier & Samuel (2024, "GPT or BERT: why not both?") train one model in both ways. The masked
tokens, too, are predicted from the position before them, so that both ways share their weights.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fairseq.config import flag
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.modules.attention import Bidirectional


@dataclass(frozen=True)
class BothConfig:
    """Settings of :class:`Both`."""

    causal_share: float = flag(0.5, "share of the batches that are causal", low=0, high=1)
    masked_share: float = flag(0.25, "share of the tokens that other batches mask", low=0, high=1)


@register_criterion("both", dataclass=BothConfig)
class Both(CrossEntropyCriterion):
    """Cross entropy of the next tokens, or of masked tokens read both ways."""

    config_class = BothConfig

    def __init__(self, task, causal_share=0.5, masked_share=0.25):
        super().__init__(task, sentence_avg=False)
        self.causal_share, self.masked_share, self.batches = causal_share, masked_share, 0
        self.seed = task.settings.common.seed

    def prepare(self, model, sample):
        """Mask a sample, unless it is causal."""
        self.batches += 1
        share = self.causal_share
        sample["causal"] = int(self.batches * share) > int((self.batches - 1) * share)
        if not sample["causal"] and sample["nsentences"]:
            # Each seed of a run has masks of its own.
            [state] = np.random.SeedSequence([self.seed, self.batches]).generate_state(1, np.uint64)
            self.mask(sample, torch.Generator().manual_seed(int(state >> 1)))
        return super().prepare(model, sample)

    def mask(self, sample, generator):
        """Mask tokens of a sample [B, T]; all other targets become padding."""
        tokens, dictionary = sample["net_input"]["src_tokens"], self.task.dictionary
        chosen = torch.rand(tokens.shape, generator=generator) < self.masked_share
        chosen[:, 0] = False  # no position before it predicts it
        chosen &= tokens != dictionary.eos()
        # In the dictionary of 8,000 subwords, the last symbol is a filler, which no text has.
        sample["net_input"]["src_tokens"] = tokens.masked_fill(chosen, len(dictionary) - 1)
        predicted = torch.zeros_like(chosen)
        predicted[:, :-1] = chosen[:, 1:]
        sample["target"] = sample["target"].masked_fill(~predicted, self.padding_idx)
        sample["ntokens"] = int(predicted.sum())

    def step(self, model, sample, inputs):
        """The loss; masked samples are read both ways."""
        if sample.get("causal", True):
            return super().step(model, sample, inputs)
        model.decoder._visible = lambda memory_length: Bidirectional()
        try:
            return super().step(model, sample, inputs)
        finally:
            del model.decoder._visible
