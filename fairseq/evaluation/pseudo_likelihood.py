"""Pseudo-log-likelihoods of masked language models:
each token predicted in turn from the others of its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairseq.data.indexed_dataset import Corpus
from fairseq.distributed import World
from fairseq.distributed.tensor_part import rows_of
from fairseq.errors import UserError
from fairseq.evaluation.by_frequency import WordGroups
from fairseq.evaluation.scorer import Scores
from fairseq.logging import Progress, no_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.models.bert import BertModel
from fairseq.models.electra import ElectraModel
from fairseq.modules.precision import Precision
from fairseq.text.dictionary import Dictionary

SORTED_TOKENS = 4096  # tokens, of whole lines, whose rows are sorted by length


@dataclass(frozen=True)
class _Row:
    """A line with masks."""

    source: Tensor  # the line between begin and end, int64 [T + 2]
    token: int  # index of the predicted token in *source*
    end: int  # the tokens from *token* up to here are masked


class PseudoScorer:
    """Pseudo-log-likelihoods: a token is masked
    and predicted from all others (Salazar et al. 2020).

    With *within_words*, the later tokens of its word are masked, too, so that a word's own tokens
    do not give it away (PLL-word-l2r: Kauf and Ivanova 2023).

    Args:
        model: BERT, or ELECTRA, whose generator predicts the tokens; in evaluation mode.
        dictionary: of the model, with begin, padding, end and mask symbols.
        within_words: mask the rest of the word, too.
        batch_size: rows at once; a row has the masks of one token.
        precision: of the forward pass (default: float32).

    Raises:
        UserError: the model does not predict masked tokens, or the dictionary lacks a symbol.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        dictionary: Dictionary,
        within_words: bool = False,
        batch_size: int = 32,
        precision: Precision | None = None,
    ) -> None:
        name = type(model).__name__
        if not isinstance(model, BertModel | ElectraModel) or model.masked_lm is None:
            advice = "give BERT, or ELECTRA with its generator; fairseq-validate measures other masked models"
            raise UserError(f"{name}: pseudo-log-likelihoods of it cannot be computed; {advice}")
        if missing := [role for role in ("mask", "bos", "pad", "eos") if getattr(dictionary, f"{role}_index") < 0]:
            raise UserError(f"{name}: the dictionary has no {missing[0]} symbol; give the dictionary of the model")
        self.encoder, self.dictionary, self.batch_size = model.masked_lm, dictionary, batch_size
        self.longest = model.max_positions() - 2  # between begin and end
        self.precision = precision or Precision()
        self.words = WordGroups(dictionary) if within_words else None

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    @torch.inference_mode()
    def score(self, lines: Sequence[Sequence[int] | np.ndarray]) -> list[Tensor]:
        """Log-probabilities (natural) of the tokens of independent *lines* of ids, without
        ``</s>``: float32 [T] each.

        A line longer than the model's positions is read in non-overlapping parts.
        """
        rows = [row for line in lines for row in self._rows(line)]
        lprobs = torch.empty(len(rows))
        lengths = torch.tensor([len(row.source) for row in rows], dtype=torch.long)
        with self.precision.autocast(self.device):
            # By length: rows of a batch are padded to the longest.
            for indices in lengths.argsort(stable=True).split(self.batch_size) if rows else ():
                chosen, target = self._masked([rows[index] for index in indices.tolist()])
                lprobs[indices] = self.encoder.lm_head.target_log_probs(chosen, target).float().cpu()
        return list(lprobs.split([len(line) for line in lines]))

    def score_corpus(
        self,
        corpus: Corpus,
        progress: Progress = no_progress,
        world: World | None = None,
        shard: int = 0,
        shards: int = 1,
    ) -> Scores:
        """Score every token of *corpus* but the ``</s>`` that end lines; its tokens need memory.

        Args:
            corpus: whose lines are independent.
            progress: a bar over parts of the corpus.
            world: processes that share the parts; all of them get all scores.
            shard, shards: score the lines of part *shard*, from 0, of *shards* contiguous parts.

        Raises:
            UserError: there is no token to score.
        """
        tokens, world = np.asarray(corpus.tokens[:]).astype(np.int64), world or World()
        is_text = tokens != self.dictionary.eos()
        before = np.concatenate([[0], np.cumsum(is_text)])
        # Lines by the count of text tokens before them:
        # `</s>` is taken out, and its lines stay independent.
        lines = before[np.union1d(corpus.offsets, np.flatnonzero(~is_text) + 1)]
        first, last = lines[list(rows_of(len(lines) - 1, shard, shards))]
        if first == last:
            raise UserError("no tokens to score: the lines are empty; give a text with words, or fewer `num_shards`")
        text, lines = tokens[is_text][first:last], lines[(lines >= first) & (lines <= last)] - first
        # Parts of whole lines: rows are sorted by length
        # inside of a part, and the bar moves with each.
        firsts = np.unique(lines // SORTED_TOKENS, return_index=True)[1]
        ends = np.unique(np.append(lines[firsts], len(text)))
        lprobs = torch.zeros(len(text))
        parts = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))[world.rank :: world.size]
        for start, end in progress(parts, len(parts)):
            inside = lines[(lines >= start) & (lines <= end)]
            lprobs[start:end] = torch.cat(self.score(np.split(text[start:end], inside[1:-1] - start)))
        # Each process adds zeros to what the others computed.
        if world.size > 1:
            lprobs = world.sum(lprobs.to(world.device)).cpu()
        return Scores(text, lprobs.numpy(), np.clip(before[corpus.offsets] - first, 0, len(text)))

    @torch.inference_mode()
    def score_after(self, lines: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """For each line of ids, the log-probability of those from a position on, and whether each
        is the most probable.

        All tokens of the line are visible as far as the model has positions: those before it are
        left out first, and what is longer still is read in parts. ``</s>`` inside the line is read,
        and not scored.
        """
        rows = [(number, row) for number, (line, first) in enumerate(lines) for row in self._rows_after(line, first)]
        rows.sort(key=lambda item: len(item[1].source))
        totals, is_greedy = [0.0] * len(lines), [True] * len(lines)
        for start in range(0, len(rows), self.batch_size):
            numbers, batch = zip(*rows[start : start + self.batch_size], strict=True)
            with self.precision.autocast(self.device):
                chosen, target = self._masked(batch)
                lprobs = self.encoder.lm_head.log_probs(chosen).float().cpu()  # (B, V)
            results = lprobs.gather(1, target[:, None])[:, 0].tolist(), (lprobs.argmax(1) == target).tolist()
            for number, lprob, greedy in zip(numbers, *results, strict=True):
                totals[number] += lprob
                is_greedy[number] &= greedy
        return list(zip(totals, is_greedy, strict=True))

    def _rows_after(self, line: Sequence[int], first: int) -> Iterator[_Row]:
        end = len(line)
        while end > first:
            start = max(0, end - self.longest)
            for row in self._rows(line[start:end]):
                # An end of line inside the text is context, not a word to predict.
                if start + row.token > first and row.source[row.token] != self.dictionary.eos():
                    yield row
            end = start

    def _rows(self, line: Sequence[int] | np.ndarray) -> Iterator[_Row]:
        """A row for each token of *line*."""
        begin, end = self.dictionary.bos(), self.dictionary.eos()
        for start in range(0, len(line), self.longest):
            ids = np.asarray(line[start : start + self.longest], dtype=np.int64)
            source = torch.from_numpy(np.concatenate([[begin], ids, [end]]))
            for token, last in enumerate(self._ends(ids), 1):
                # Positions in the row count the begin symbol.
                yield _Row(source, token, last + 1)

    def _ends(self, ids: np.ndarray) -> list[int]:
        """For each of *ids*, the index behind the last token that is masked with it."""
        after = np.arange(1, len(ids) + 1)
        if self.words is None:
            return after.tolist()
        ends = np.append(self.words.first(ids)[1:], len(ids))
        return ends[np.searchsorted(ends, after)].tolist()

    def _masked(self, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """The hidden state at the masked token of each row, [rows, C], and the token, int64 [rows],
        on the CPU."""
        device = self.device
        tokens = torch.nn.utils.rnn.pad_sequence([row.source for row in rows], True, self.dictionary.pad())  # (B, T)
        column = torch.arange(tokens.size(1))
        at, ends = torch.tensor([row.token for row in rows]), torch.tensor([row.end for row in rows])
        target = tokens.gather(1, at[:, None])[:, 0]  # (B)
        tokens[(column >= at[:, None]) & (column < ends[:, None])] = self.dictionary.mask()
        hidden = self.encoder.sentence_encoder(tokens.to(device))  # (B, T, C)
        # One state a row goes through the output layer, not all T.
        return hidden[torch.arange(len(rows), device=device), at.to(device)], target
