"""The harness's requests, answered by a masked language model: pseudo-log-likelihoods (Salazar et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairseq.errors import UserError
from fairseq.evaluation.pseudo_likelihood import PseudoScorer
from fairseq.hub import MaskedLanguageModel
from fairseq.interop.harness.requests import encode, joined, warn_closed
from fairseq.text.text_corpus import report_unknown


class EncoderRequests:
    """Answers of an encoder, in which each token of an answer is masked in turn.

    Args:
        model: whose texts are independent.
        batch_size: masked rows read at once.
        within_words: mask the rest of a token's word, too; see :class:`PseudoScorer`.
    """

    def __init__(self, model: MaskedLanguageModel, batch_size: int = 8, within_words: bool = False) -> None:
        self.model, self.batch_size, self.within_words = model, batch_size, within_words
        self.reader = model.reader
        self.scorer = PseudoScorer(model.model, self.reader.dictionary, within_words, batch_size)
        warn_closed(self.reader.tokenizer)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether each of its tokens is the most probable.

        A token is predicted from the context and all other tokens of the continuation. The two are one row, with
        ``</s>`` between lines, which is not scored; what does not fit the positions of the model is left out in front.
        """
        lines = [joined(self._encode, context, continuation) for context, continuation in pairs]
        # Words outside of the vocabulary make results of different models incomparable, so that their share is logged.
        report_unknown((token for line, _ in lines for token in line), self.reader.dictionary, ())
        return self.scorer.score_after(lines)

    def rolling(self, texts: Iterable[str]) -> list[float]:
        """Return the log-probability of each text, read line by line as ``fairseq-eval-lm`` reads a file."""
        scored = self.model.score(list(texts), self.batch_size, within_words=self.within_words)
        return [float(lprobs.double().sum()) for _, lprobs in scored]

    def generations(self, prompts: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Refuse.

        Raises:
            UserError: an encoder generates no text.
        """
        raise UserError("the model is an encoder, which generates no text; choose other tasks")

    def _encode(self, text: str) -> list[int]:
        return encode(text, self.reader.dictionary, self.reader.tokenizer)
