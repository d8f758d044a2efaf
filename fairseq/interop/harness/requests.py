"""Adapter for EleutherAI's lm-evaluation-harness: its three kinds of requests, answered by a
decoder or an encoder.

It does without the harness; :mod:`fairseq.interop.harness.model` is the model class for it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.errors import UserError
from fairseq.evaluation.pseudo_likelihood import PseudoScorer
from fairseq.evaluation.scorer import PROJECTED_AT_ONCE, Scorer, Scoring
from fairseq.hub import LanguageModel, MaskedLanguageModel
from fairseq.inference import Search, stream
from fairseq.modules import devices
from fairseq.text.text_corpus import TextCorpus, TextReader, report_unknown
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.tokenizer import LETTER

logger = logging.getLogger(__name__)

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
KNOWN = {"until", "do_sample", "temperature", "top_k", "top_p", *LENGTHS}


@dataclass(frozen=True)
class Piece:
    """Tokens that are read as one row."""

    row: int  # number of the request
    tokens: list[int]  # the first is not scored
    first: int  # index of the first scored token


class Requests:
    """Answers of a language model.

    As in the harness's own class for transformers, a whole text begins after ``</s>``, and so does
    a continuation without a context; a context stands for itself. Line feeds are as
    :attr:`TextReader.keeps_lines` says. A model with memory reads a text in segments; a model
    without reads the last tokens that fit into one, after ``<s>`` if it was trained with it
    (``--add-bos-token``). A request that names no number generates at most *max_tokens*.

    Raises:
        UserError: the model has no distribution over words.
    """

    def __init__(self, model: LanguageModel, batch_size: int = 8, max_tokens: int = 256) -> None:
        if model.model.output_layer is None:
            raise UserError(f"{type(model.model).__name__}: has no output layer that scores words; use another model")
        self.output_layer = model.model.output_layer
        self.model, self.batch_size, self.max_tokens = model, batch_size, max_tokens
        self.eos, self.segment = model.dictionary.eos(), model.tokens_per_sample
        self.pad = model.dictionary.pad()
        self.begin = model.dictionary.begin() if model.add_bos_token else None
        self.reader = TextReader(model.dictionary, model.tokenizer)
        scoring = Scoring(self.segment, batch_size=1, add_bos_token=model.add_bos_token)
        self.device = next(model.model.parameters()).device
        self.scorer = Scorer([model.model], model.dictionary, scoring, device=self.device)
        warn_closed(model.tokenizer)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return for each context and continuation the log-probability, and whether greedy search
        would choose it.

        White space at the end of a context belongs to the continuation.
        """
        pieces, read = [], []
        for number, (context, continuation) in enumerate(pairs):
            tokens, first = encode_pair(self.reader.ids, context, continuation)
            if first == 0:  # there is no token to predict the first one from
                tokens, first = tokens if tokens[:1] == [self.eos] else [self.eos, *tokens], 1
            pieces += self._pieces(number, tokens, first)
            read += tokens
        report_unknown(read, self.model.dictionary, ())
        results = [(0.0, True)] * len(pairs)
        for batch in self._batches(pieces):
            for piece, lprob, greedy in zip(batch, *self._scored(batch), strict=True):
                total, all_greedy = results[piece.row]
                results[piece.row] = total + lprob, all_greedy and greedy
        return results

    def rolling(self, texts: Iterable[str], starts: bool = True) -> list[float]:
        """Return the log-probability of each text,
        read as ``fairseq-eval-lm`` reads a corpus of its own.

        Unless it *starts*, no ``</s>`` stands before it, and its first token is context only.
        """
        rows = self.reader.rows(texts)
        totals = [0.0] * len(rows)
        if starts:
            # Texts of one segment are rows of batches; a longer one is a corpus.
            pieces = [Piece(row, [self.eos, *ids], 1) for row, ids in enumerate(rows) if 0 < len(ids) <= self.segment]
        else:
            pieces = [piece for row, ids in enumerate(rows) for piece in self._pieces(row, ids, 1)]
        for batch in self._batches(pieces):
            for piece, lprob in zip(batch, self._totals(batch), strict=True):
                totals[piece.row] += lprob
        for row, ids in enumerate(rows):
            if starts and len(ids) > self.segment:
                corpus = TextCorpus(np.array(ids, np.int32), np.array([len(ids)], np.int32))
                totals[row] = float(self.scorer.score(corpus).lprobs.sum(dtype=np.float64))
        report_unknown(itertools.chain.from_iterable(rows), self.model.dictionary, ())
        return totals

    def generations(self, prompts: Iterable[tuple[str, Mapping[str, object]]]) -> list[str]:
        """Return what follows each context, by its settings,
        up to the first of the strings ``until``.

        Raises:
            UserError: *settings* ask for what is not implemented, or the model cannot generate.
        """
        if not self.model.model.can_generate:
            raise UserError(f"{type(self.model.model).__name__}: has no cache to generate with; choose other tasks")
        texts, read = [], []
        for context, settings in prompts:
            prompt = self.reader.ids(context)
            texts.append(self._generated(prompt, settings))
            read += prompt
        report_unknown(read, self.model.dictionary, ())
        return texts

    def _generated(self, prompt: list[int], settings: Mapping[str, Any]) -> str:
        if unknown := sorted(settings.keys() - KNOWN):
            raise UserError(f"generation setting {unknown[0]}: not implemented; known: {', '.join(sorted(KNOWN))}")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        longest = next((int(settings[name]) for name in LENGTHS if settings.get(name) is not None), self.max_tokens)
        before, chosen, text = self.model.text(prompt), [], ""
        temperature = float(settings.get("temperature") or 0.0)
        greedy = temperature == 0 or not settings.get("do_sample", True)
        search = Search(longest, temperature=0)
        if not greedy:
            top_k, top_p = int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0)
            search = Search(longest, temperature, top_k, top_p)
        reader, forbidden = self.model.reader(), self.model.never_sampled
        for token in stream([reader], prompt or [self.eos], search, forbidden=forbidden):
            if token == self.model.dictionary.stop() or (token == self.eos and self.reader.keeps_lines):
                break
            # The whole text is decoded each time: a subword or a byte may change how the ones
            # before it read, and a stop string may span several tokens.
            chosen.append(token)
            text = self.model.text([*prompt, *chosen]).removeprefix(before)
            if ends := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(ends)]
        return text

    def _pieces(self, row: int, tokens: list[int], first: int) -> list[Piece]:
        """The rows in which tokens from *first* on are scored:
        all of them, or windows counted from the end."""
        if first >= len(tokens):
            return []
        if self.model.model.memory_length:
            return [Piece(row, tokens, first)]
        pieces, end = [], len(tokens)
        while end > first:
            # The window before is scored up to the first token that this one has as context only:
            # each token is scored once, and the last ones have the longest context.
            start = max(0, end - 1 - self.segment)
            pieces.append(Piece(row, tokens[start:end], max(first - start, 1)))
            end = start + 1
        return pieces

    def _batches(self, pieces: list[Piece]) -> Iterator[Sequence[Piece]]:
        """Batches of *pieces* with little padding."""
        # The longest first, so that memory that does not suffice shows at once.
        pieces.sort(key=lambda piece: -len(piece.tokens))
        for start in range(0, len(pieces), self.batch_size):
            yield pieces[start : start + self.batch_size]

    @torch.inference_mode()
    def _totals(self, pieces: Sequence[Piece]) -> list[float]:
        """The summed log-probability of each piece."""
        # fp64: answers are compared by these sums, and thousands of fp32 terms would lose digits.
        sums = torch.zeros(len(pieces), dtype=torch.float64, device=devices.exact_device(self.device))
        for rows, hidden, targets in self._predictions(pieces):
            lprobs = devices.exact(self.output_layer.target_log_probs(hidden, targets))
            sums.index_add_(0, rows.to(sums.device), lprobs)
        return sums.tolist()

    @torch.inference_mode()
    def _scored(self, pieces: Sequence[Piece]) -> tuple[list[float], list[bool]]:
        """The summed log-probability of each piece,
        and whether each of its tokens is the most probable."""
        sums = torch.zeros(len(pieces), dtype=torch.float64, device=devices.exact_device(self.device))
        misses = torch.zeros_like(sums)
        for rows, hidden, targets in self._predictions(pieces):
            lprobs = self.output_layer.log_probs(hidden)  # (N, V)
            rows = rows.to(sums.device)
            sums.index_add_(0, rows, devices.exact(lprobs.gather(1, targets[:, None])[:, 0]))
            misses.index_add_(0, rows, devices.exact(lprobs.argmax(1) != targets))
        return sums.tolist(), [not miss for miss in misses.tolist()]

    def _predictions(self, pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The rows [N], the hidden states [N, C] and the targets [N] of the scored tokens of
        *pieces*, in parts: all logits of a batch at once may not fit into memory."""
        model: Any = self.model.model
        longest = max(len(piece.tokens) for piece in pieces)
        # Padding on the right, which `mask` leaves out of the sums; a row's last token is only a
        # target.
        rows = [piece.tokens[:-1] + [self.pad] * (longest - len(piece.tokens)) for piece in pieces]
        source = torch.tensor(rows, device=self.device)  # (B, T)
        following = [piece.tokens[1:] + [self.pad] * (longest - len(piece.tokens)) for piece in pieces]
        target = torch.tensor(following, device=self.device)  # (B, T)
        positions = torch.arange(1, longest, device=self.device)
        firsts = torch.tensor([piece.first for piece in pieces], device=self.device)[:, None]
        ends = torch.tensor([len(piece.tokens) for piece in pieces], device=self.device)[:, None]
        mask = (positions >= firsts) & (positions < ends)  # (B, T)
        memory = None
        for start in range(0, longest - 1, self.segment):
            part = slice(start, min(start + self.segment, longest - 1))
            segment = source[:, part]
            if self.begin is not None:  # models with memory are trained without
                hidden, extra = model(F.pad(segment, (1, 0), value=self.begin))
                hidden = hidden[:, 1:]
            else:
                hidden, extra = model(segment) if memory is None else model(segment, memory=memory)
            memory = extra.get("memory")
            chosen = mask[:, part].nonzero()  # (N, 2)
            targets = target[:, part][mask[:, part]]
            for some in torch.arange(len(chosen), device=self.device).split(PROJECTED_AT_ONCE):
                yield chosen[some, 0], hidden[tuple(chosen[some].t())], targets[some]


class EncoderRequests:
    """Answers of an encoder: pseudo-log-likelihoods, in which each token is masked in turn (Salazar
    et al. 2020).

    *batch_size* masked rows are read at once; for *within_words* see :class:`PseudoScorer`.
    """

    def __init__(self, model: MaskedLanguageModel, batch_size: int = 8, within_words: bool = False) -> None:
        self.model, self.batch_size, self.within_words = model, batch_size, within_words
        self.reader = model.reader
        self.scorer = PseudoScorer(model.model, self.reader.dictionary, within_words, batch_size)
        warn_closed(self.reader.tokenizer)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation,
        and whether each of its tokens is the most probable.

        A token is predicted from the context and all other tokens of the continuation. The two are
        one row, with ``</s>`` between lines, which is not scored; what does not fit the positions
        of the model is left out in front.
        """
        lines = [encode_pair(self.reader.ids, context, continuation) for context, continuation in pairs]
        # Words outside of the vocabulary make results of different models incomparable, so that
        # their share is logged.
        report_unknown((token for line, _ in lines for token in line), self.reader.dictionary, ())
        return self.scorer.score_after(lines)

    def rolling(self, texts: Iterable[str]) -> list[float]:
        """Return the log-probability of each text, as :class:`MaskedLanguageModel` reads it."""
        scored = self.model.score(list(texts), self.batch_size, within_words=self.within_words)
        return [float(devices.exact(lprobs).sum()) for _, lprobs in scored]

    def generations(self, prompts: Iterable[tuple[str, Mapping[str, object]]]) -> list[str]:
        """Raise UserError: an encoder generates no text."""
        raise UserError("the model is an encoder, which generates no text; choose other tasks")


def encode_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], int]:
    """Return the ids of *context* and *continuation*,
    and the index at which the continuation begins.

    White space at the end of a context belongs to the continuation.
    """
    # The two are encoded together, because subwords may join across the border: the continuation
    # begins at the first token that differs.
    ids, before = encode(context + continuation), encode(context.rstrip())
    common = (a == b for a, b in zip(ids, before, strict=False))
    return ids, next((index for index, same in enumerate(common) if not same), min(len(ids), len(before)))


def warn_closed(tokenizer: Tokenizer | None) -> None:
    """Log a warning unless *tokenizer* has symbols for any text."""
    subwords = tokenizer.subwords if tokenizer is not None else None
    # A letter that no text has.
    if subwords is None or subwords.knows(LETTER) < 1:
        logger.warning(
            "the vocabulary is closed: other words are read as <unk>, so that results do not compare with "
            "models that can read any text"
        )
