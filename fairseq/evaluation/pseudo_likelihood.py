"""Pseudo-log-likelihoods of masked language models: each token predicted in turn from the others of its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairseq.data.masking import word_parts, word_rule
from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel
from fairseq.models.bert import BertModel
from fairseq.models.electra import ElectraModel
from fairseq.text.dictionary import Dictionary


@dataclass(frozen=True)
class _Row:
    """A line with masks.

    Attributes:
        source: the line between begin and end, int64 [T + 2].
        token: index of the predicted token in *source*.
        end: the tokens from *token* up to here are masked.
    """

    source: Tensor
    token: int
    end: int


class PseudoScorer:
    """Pseudo-log-likelihoods: a token is masked and predicted from all others (Salazar et al. 2020).

    With *within_words*, the later tokens of its word are masked, too, so that a word's own tokens do not give it away
    (PLL-word-l2r: Kauf and Ivanova 2023).

    Args:
        model: BERT, or ELECTRA, whose generator predicts the tokens; in evaluation mode.
        dictionary: of the model, with begin, padding, end and mask symbols.
        within_words: mask the rest of the word, too.
        batch_size: rows at once; a row has the masks of one token.

    Raises:
        UserError: the model does not predict masked tokens, or the dictionary lacks a symbol.
    """

    def __init__(
        self, model: BaseFairseqModel, dictionary: Dictionary, within_words: bool = False, batch_size: int = 32
    ) -> None:
        name = type(model).__name__
        if not isinstance(model, BertModel | ElectraModel) or model.masked_lm is None:
            raise UserError(f"{name}: does not predict masked tokens; give BERT, or ELECTRA with its generator")
        if missing := [role for role in ("mask", "bos", "pad", "eos") if getattr(dictionary, f"{role}_index") < 0]:
            raise UserError(f"{name}: the dictionary has no {missing[0]} symbol; give the dictionary of the model")
        self.encoder, self.dictionary, self.batch_size = model.masked_lm, dictionary, batch_size
        self.longest = model.max_positions() - 2  # between begin and end
        self.parts = word_parts(dictionary, word_rule(dictionary)) if within_words else None

    @torch.inference_mode()
    def score(self, lines: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities (natural) of the tokens of independent *lines* of ids, without ``</s>``: float32 [T] each.

        A line longer than the model's positions is read in non-overlapping parts.
        """
        rows = [row for line in lines for row in self._rows(line)]
        lprobs = torch.empty(len(rows))
        lengths = torch.tensor([len(row.source) for row in rows], dtype=torch.long)
        for indices in lengths.argsort(stable=True).split(self.batch_size) if rows else ():
            lprobs[indices] = self._predict([rows[index] for index in indices.tolist()])
        return list(lprobs.split([len(line) for line in lines]))

    def _rows(self, line: Sequence[int]) -> Iterator[_Row]:
        """A row for each token of *line*."""
        begin, end = self.dictionary.bos(), self.dictionary.eos()
        for start in range(0, len(line), self.longest):
            ids = np.asarray(line[start : start + self.longest], dtype=np.int64)
            source = torch.from_numpy(np.concatenate([[begin], ids, [end]]))
            for token, last in enumerate(self._ends(ids), 1):
                yield _Row(source, token, last + 1)

    def _ends(self, ids: np.ndarray) -> list[int]:
        """For each of *ids*, the index behind the last token that is masked with it."""
        after = np.arange(1, len(ids) + 1)
        if self.parts is None:
            return after.tolist()
        continues, joins = self.parts
        last = np.append(~(continues[ids[1:]] | joins[ids[:-1]]), True)  # whether a word ends here
        ends = after[last]
        return ends[np.searchsorted(ends, after)].tolist()

    def _predict(self, rows: Sequence[_Row]) -> Tensor:
        """The log-probability of the token of each row: float32 [rows], on the CPU."""
        device = next(self.encoder.parameters()).device
        tokens = torch.nn.utils.rnn.pad_sequence([row.source for row in rows], True, self.dictionary.pad())  # (B, T)
        column = torch.arange(tokens.size(1))
        at, ends = torch.tensor([row.token for row in rows]), torch.tensor([row.end for row in rows])
        target = tokens.gather(1, at[:, None])[:, 0]  # (B)
        tokens[(column >= at[:, None]) & (column < ends[:, None])] = self.dictionary.mask()
        hidden = self.encoder.sentence_encoder(tokens.to(device))  # (B, T, C)
        chosen = hidden[torch.arange(len(rows), device=device), at.to(device)]  # (B, C)
        return self.encoder.lm_head.target_log_probs(chosen, target).float().cpu()
