"""Language models in Python: load a checkpoint, score text, generate text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fairseq.checkpoint.manager import BEST, LAST
from fairseq.data.dictionary import Dictionary
from fairseq.errors import UserError
from fairseq.evaluation import Scorer, Scores, Scoring, load_models
from fairseq.generation import sample
from fairseq.models import BaseFairseqModel

CHECKPOINT_NAMES = (BEST, "checkpoint.pt", LAST)  # in a folder, the first that is there

Scored = tuple[list[str], Tensor]


class LanguageModel:
    """A trained language model and its dictionary.

    Text is a sequence of words between white space, tokenised as the training text was. A line ends in ``</s>``; a word
    that the dictionary does not have is ``<unk>``.

    Args:
        model: in evaluation mode.
        dictionary: its words.
        tokens_per_sample: tokens of the segments that it reads.
    """

    def __init__(self, model: BaseFairseqModel, dictionary: Dictionary, tokens_per_sample: int) -> None:
        self.model = model
        self.dictionary = dictionary
        self.tokens_per_sample = tokens_per_sample
        self._never_sampled = [i for i in range(len(dictionary)) if _is_no_word(dictionary, i)]

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        data: str | Path,
        *,
        device: torch.device | str = "cpu",
        overrides: Mapping[str, Any] | None = None,
    ) -> LanguageModel:
        """Load a checkpoint, ours or fairseq's.

        Args:
            checkpoint: a file, or a folder with ``checkpoint_best.pt``, ``checkpoint.pt`` or ``checkpoint_last.pt``.
            data: a folder made by ``fairseq-preprocess``, or a ``dict.txt``.
            device: where the model runs.
            overrides: settings of the checkpoint to change, e.g. ``{"tokens_per_sample": 256}``.

        Raises:
            UserError: a file is missing or cannot be used, or checkpoint and dictionary do not belong together.
        """
        if not Path(data).exists():
            raise UserError(f"{data}: no such folder or dictionary; give a data-bin folder or its dict.txt")
        models, task, args = load_models([_find(Path(checkpoint))], data, overrides)
        return cls(models[0].to(device), task.source_dictionary, args.tokens_per_sample)

    @overload
    def score(self, text: str) -> Scored: ...
    @overload
    def score(self, text: list[str]) -> list[Scored]: ...
    def score(self, text: str | list[str]) -> Scored | list[Scored]:
        """The tokens of a text and the natural logarithms of their probabilities, float32 [tokens].

        A list of texts gives a list; they have nothing to do with one another. A text longer than the model's segment
        is read as ``fairseq-eval-lm`` reads a corpus, in non-overlapping segments.
        """
        if not isinstance(text, str):
            return [self.score(one) for one in text]
        scores = self._scores(text)
        return [self.dictionary[token] for token in scores.tokens], torch.from_numpy(scores.lprobs)

    def perplexity(self, text: str | list[str]) -> float:
        """Two to the power of the average loss of a token in bits, over one text or several.

        Raises:
            ValueError: there is no text.
        """
        texts = [text] if isinstance(text, str) else text
        if not texts:
            raise ValueError("perplexity: there is no text")
        lprobs = np.concatenate([self._scores(one).lprobs for one in texts]).astype(np.float64)
        return math.exp(-float(lprobs.mean()))

    def sample(
        self,
        prompt: str = "",
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> str:
        """The prompt and up to *max_tokens* tokens that follow it, an end of line counted as one.

        Args:
            prompt: what the text begins with; nothing: the start of a text.
            max_tokens: how many tokens are generated.
            temperature, top_k, top_p: see :func:`fairseq.generation.sampling.sample`.
            seed: the same seed gives the same text; None: another text each time.

        Raises:
            ValueError: a number is out of range.
        """
        eos = self.dictionary.eos()
        words = _encode(prompt, self.dictionary).tokens.tolist()[:-1]
        generator = None
        if seed is not None:
            generator = torch.Generator(next(self.model.parameters()).device).manual_seed(seed)
        words += sample(
            self.model,
            [eos, *words],
            max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
            forbidden=self._never_sampled,
        )
        return self._text(words)

    def _text(self, tokens: Sequence[int]) -> str:
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == self.dictionary.eos():
                lines.append([])
            else:
                lines[-1].append(self.dictionary[token])
        return "\n".join(" ".join(line) for line in lines)

    def _scores(self, text: str) -> Scores:
        device = next(self.model.parameters()).device
        scorer = Scorer([self.model], self.dictionary, Scoring(self.tokens_per_sample, batch_size=1), device=device)
        return scorer.score(_encode(text, self.dictionary))


@dataclass(frozen=True)
class _Text:
    """A text as a corpus."""

    tokens: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray


def _encode(text: str, dictionary: Dictionary) -> _Text:
    lines = re.split(r"\r\n|\r|\n", text)
    if len(lines) > 1 and not lines[-1]:
        lines.pop()  # the last line's own end
    encoded = [dictionary.encode_line(line) for line in lines]
    sizes = np.array([len(line) for line in encoded], dtype=np.int32)
    return _Text(np.concatenate(encoded), sizes, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))


def _is_no_word(dictionary: Dictionary, index: int) -> bool:
    """Whether a symbol never occurs in text: padding and the like, but not the end of a line."""
    filler = dictionary[index].startswith("madeupword") and dictionary.count[index] == 0
    return index != dictionary.eos() and (index < dictionary.nspecial or filler)


def _find(path: Path) -> Path:
    """The checkpoint at *path*, or in the folder *path*."""
    if not path.is_dir():
        return path
    for name in CHECKPOINT_NAMES:
        if (path / name).exists():
            return path / name
    raise UserError(f"{path}: no checkpoint in this folder; looked for {', '.join(CHECKPOINT_NAMES)}")
